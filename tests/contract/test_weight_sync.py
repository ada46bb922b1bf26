"""One suite over every weight sync: what is fetched is what was published, to the bit, or an error."""

import asyncio
import gc
import json
import os
import stat
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
import torch
from safetensors.torch import load_file

from asyncflow.registry import load
from asyncflow.transport import Credentials
from asyncflow.types import HeldWeights, TensorSpec, UserError, WeightSource
from asyncflow.weight_sync import WEIGHT_SYNCS, collective
from asyncflow.weight_sync.base import Manifest, WeightReceiver, WeightSender, WeightSync, WeightSyncError, WeightSyncOptions
from asyncflow.weight_sync.collective import Collective
from asyncflow.weight_sync.group import CHUNK_BYTES
from asyncflow.weight_sync.network import Network
from tests.contract.devices import needed_devices
from tests.contract.weight_sources import Gathered
from tests.patience import patience, until

MakeSync = Callable[..., WeightSync]


@pytest.fixture(scope="session")
def key(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("key") / "key.pem"
    Credentials.create(path)
    return path


class Spread:
    """The ends of a weight sync, each on a device of its own: the sender on the first, `rollout/1` on the third."""

    def __init__(self, make: MakeSync, device: str) -> None:
        make(device=device)  # options that are not possible are refused at once
        self._make, self._device = make, device

    def sender(self, incarnation: str) -> WeightSender:
        return self._make(device=f"{self._device}:0").sender(incarnation)

    def receiver(self, worker: str) -> WeightReceiver:
        return self._make(device=f"{self._device}:{1 + int(worker.rpartition('/')[2])}").receiver(worker)


@pytest.fixture(params=[*sorted(WEIGHT_SYNCS), "collective-cuda", "collective-npu"])
def make_sync(request: pytest.FixtureRequest, tmp_path: Path, key: Path) -> MakeSync:
    name, _, device = request.param.partition("-")
    kind = load("weight sync", WEIGHT_SYNCS[name])

    def make(**options: Any) -> WeightSync:
        made: WeightSync = kind(WeightSyncOptions(directory=tmp_path / "weights", key=key, **{"deadline_seconds": 10.0, **options}))
        return made

    if not device:
        return make
    needed_devices(device, 4)  # two ends on one are refused by NCCL
    return lambda **options: Spread(partial(make, **options), device)


@pytest.fixture
def shared(tmp_path: Path) -> Any:
    kind = load("weight sync", WEIGHT_SYNCS["shared_memory"])
    return lambda **options: kind(WeightSyncOptions(directory=tmp_path / "weights", **options))


def random_tensors(seed: int) -> dict[str, torch.Tensor]:
    """Every kind that makes a layout difficult: odd sizes, several dtypes, a scalar, an empty and a transposed tensor."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(7, 5, generator=generator)
    return {
        "z.weight": normal,
        "a.bfloat16": normal.flatten()[:13].bfloat16(),
        "a.int64": torch.arange(3) + seed,
        "a.bool": normal[0] > 0,
        "scalar": normal[0, 0].clone(),
        "empty": normal[:0],
        "transposed": torch.randn(4, 6, generator=generator).t(),
        "not.finite": torch.tensor([float("nan"), float("inf"), -0.0]),
        "large": torch.randn(700, 600, generator=generator),
    }


def assert_same_bits(fetched: Any, published: dict[str, torch.Tensor]) -> None:
    assert fetched.keys() == published.keys()
    for name, tensor in published.items():
        assert fetched[name].dtype == tensor.dtype and fetched[name].shape == tensor.shape
        assert fetched[name].contiguous().view(-1).view(torch.uint8).equal(tensor.contiguous().view(-1).view(torch.uint8)), name


async def test_what_is_fetched_is_what_was_published_to_the_bit(make_sync: MakeSync) -> None:
    sync = make_sync()
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    for version in range(5):
        tensors = random_tensors(version)
        manifest = await sender.publish(version, HeldWeights(tensors))
        assert (manifest.incarnation, manifest.version) == ("first", version)
        for tensor in tensors.values():
            tensor.zero_()  # the sender keeps a copy
        # the manifest crosses a wire
        manifest = msgspec.msgpack.decode(msgspec.msgpack.encode(manifest), type=Manifest)
        fetched = await receiver.fetch(manifest)
        assert_same_bits(fetched, random_tensors(version))
        assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in fetched.values())
        await receiver.release()
    await sender.close()
    await receiver.close()


async def test_the_memory_of_a_fetch_is_used_again(make_sync: MakeSync) -> None:
    sync = make_sync(keep=2)
    sender, receiver, places = sync.sender("first"), sync.receiver("rollout/0"), set()
    for version in range(6):
        fetched = await receiver.fetch(await sender.publish(version, HeldWeights(random_tensors(version))))
        places.add(fetched["large"].data_ptr())
    assert len(places) <= 2


async def test_what_is_fetched_stays_as_it_is_until_it_is_released(make_sync: MakeSync, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "GATHER_SECONDS", 0.1)  # they ask one by one
    sync = make_sync(keep=1)
    sender, late, other = sync.sender("first"), sync.receiver("rollout/0"), sync.receiver("rollout/1")
    fetched = await late.fetch(await sender.publish(0, HeldWeights(random_tensors(0))))
    for version in range(1, 5):
        manifest = await sender.publish(version, HeldWeights(random_tensors(version)))
        assert_same_bits(await other.fetch(manifest), random_tensors(version))
    assert_same_bits(fetched, random_tensors(0))
    await late.release()
    assert_same_bits(await late.fetch(manifest), random_tensors(4))
    for end in (late, other, sender):
        await end.close()


async def test_tensors_that_were_stored_into_spoil_one_fetch_at_most(make_sync: MakeSync, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collective, "GATHER_SECONDS", 0.1)  # they ask one by one
    sync = make_sync(keep=1)
    sender, receiver, other = sync.sender("first"), sync.receiver("rollout/0"), sync.receiver("rollout/1")
    for version in range(4):
        manifest = await sender.publish(version, HeldWeights(random_tensors(version)))
        try:
            fetched = await receiver.fetch(manifest)
        except WeightSyncError:
            fetched = await receiver.fetch(manifest)
        assert_same_bits(fetched, random_tensors(version))
        fetched["large"].zero_()
        assert_same_bits(await other.fetch(manifest), random_tensors(version))


async def test_the_last_versions_stay_available_and_no_others(make_sync: MakeSync) -> None:
    sync = make_sync(keep=3)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifests = [await sender.publish(version, HeldWeights(random_tensors(version))) for version in range(7)]
    for version in (4, 6, 5, 4):
        assert_same_bits(await receiver.fetch(manifests[version]), random_tensors(version))
    for version in range(4):
        with pytest.raises(WeightSyncError):
            await receiver.fetch(manifests[version])


@pytest.mark.parametrize("keep", [1, 2])
async def test_a_version_that_is_to_stay_can_be_had_late_and_again(
    make_sync: MakeSync, keep: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collective, "GATHER_SECONDS", 0.1)  # they ask one by one
    sync = make_sync(keep=keep)
    sender, late, again = sync.sender("first"), sync.receiver("evaluator/0"), sync.receiver("evaluator/1")
    manifests = []
    for version in range(5):
        manifests.append(await sender.publish(version, HeldWeights(random_tensors(version))))
        sender.retain({version} if version == 1 else {1} if version < 4 else ())
    for receiver in (late, again):
        assert_same_bits(await receiver.fetch(manifests[1]), random_tensors(1))
        await receiver.release()
    assert_same_bits(await late.fetch(manifests[4]), random_tensors(4))
    await late.release()
    for version in (5, 6, 7):  # it may go now
        manifests.append(await sender.publish(version, HeldWeights(random_tensors(version))))
        assert_same_bits(await late.fetch(manifests[version]), random_tensors(version))
        await late.release()
    with pytest.raises(WeightSyncError):
        await sync.receiver("evaluator/2").fetch(manifests[1])
    for end in (late, again, sender):
        await end.close()


async def test_who_asks_for_a_version_that_is_gone_costs_nobody_another(make_sync: MakeSync) -> None:
    sync = make_sync(keep=1)
    if isinstance(sync, Collective | Spread):
        pytest.skip("a broadcast has no files where it arrives")
    sender, receiver, late = sync.sender("first"), sync.receiver("rollout/0"), sync.receiver("rollout/1")
    gone, kept = [await sender.publish(version, HeldWeights(random_tensors(version))) for version in (0, 1)]
    await receiver.fetch(kept)
    await receiver.release()
    with pytest.raises(WeightSyncError):
        await late.fetch(gone)
    await sender.close()
    assert_same_bits(await late.fetch(kept), random_tensors(1))  # of the machine's own file, if the sender is elsewhere


async def test_a_version_can_be_published_again(make_sync: MakeSync) -> None:
    sync = make_sync(keep=2)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    before = await sender.publish(0, HeldWeights(random_tensors(0)))
    one = await sender.publish(1, HeldWeights(random_tensors(1)))
    again = await sender.publish(1, HeldWeights(random_tensors(11)))
    assert_same_bits(await receiver.fetch(again), random_tensors(11))
    assert_same_bits(await receiver.fetch(before), random_tensors(0))
    with pytest.raises(WeightSyncError, match="hash"):
        await receiver.fetch(one)


async def test_a_restarted_sender_starts_afresh(make_sync: MakeSync) -> None:
    sync = make_sync(keep=2, deadline_seconds=patience(1.0))
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    old = [await sender.publish(version, HeldWeights(random_tensors(version))) for version in range(3)]
    await receiver.fetch(old[-1])
    await sender.close()
    sender = sync.sender("second")
    manifest = await sender.publish(2, HeldWeights(random_tensors(22)))
    assert manifest.incarnation == "second"
    assert_same_bits(await receiver.fetch(manifest), random_tensors(22))
    for stale in old:
        with pytest.raises(WeightSyncError):
            await receiver.fetch(stale)


@pytest.mark.parametrize(
    "wrong",
    [
        {"hash": "0" * 32},
        {"num_bytes": 1},
        {"tensors": {"z.weight": TensorSpec((7, 5), "float32")}},
        {"address": "/nowhere/weights-0.safetensors", "served_at": "unix:/nowhere/sender.sock"},
    ],
    ids=lambda wrong: next(iter(wrong)),
)
async def test_a_manifest_that_does_not_match_is_refused(make_sync: MakeSync, wrong: dict[str, Any]) -> None:
    sync = make_sync(deadline_seconds=patience(1.0))
    manifest = await sync.sender("first").publish(0, HeldWeights(random_tensors(0)))
    with pytest.raises(WeightSyncError) as caught:
        await sync.receiver("rollout/0").fetch(msgspec.structs.replace(manifest, **wrong))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"z.weight": TensorSpec((5, 7), "float32")},
        {"z.weight": TensorSpec((7, 5), "int32")},
        {"extra": TensorSpec((0,), "float32")},
    ],
)
async def test_other_names_shapes_or_dtypes_are_refused(make_sync: MakeSync, change: dict[str, TensorSpec]) -> None:
    sync = make_sync()
    manifest = await sync.sender("first").publish(0, HeldWeights(random_tensors(0)))
    with pytest.raises(WeightSyncError):
        await sync.receiver("rollout/0").fetch(msgspec.structs.replace(manifest, tensors={**manifest.tensors, **change}))


async def test_a_version_with_other_tensors_is_not_published(make_sync: MakeSync) -> None:
    sync = make_sync()
    sender = sync.sender("first")
    manifest = await sender.publish(0, HeldWeights(random_tensors(0)))
    with pytest.raises(WeightSyncError, match="other tensors"):
        await sender.publish(1, HeldWeights({"z.weight": torch.zeros(7, 5)}))
    assert_same_bits(await sync.receiver("rollout/0").fetch(manifest), random_tensors(0))


async def test_a_hundred_versions_leave_nothing_behind(make_sync: MakeSync, tmp_path: Path) -> None:
    sync = make_sync(keep=2)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    tensors = {"w": torch.randn(1 << 20), "b": torch.randn(1001)}  # 4 MB
    process = psutil.Process()
    for version in range(100):
        if version == 10:
            memory, num_files, num_fds = process.memory_info().rss, len(list(tmp_path.rglob("*"))), process.num_fds()
        tensors["w"][version] = version
        fetched = await receiver.fetch(await sender.publish(version, HeldWeights(tensors)))
        assert fetched["w"][version] == version
    assert len(list(tmp_path.rglob("*"))) == num_files
    assert process.num_fds() <= num_fds
    assert process.memory_info().rss - memory < 3 * 4 * (1 << 20)


async def test_the_event_loop_runs_while_weights_travel(make_sync: MakeSync) -> None:
    sync = make_sync()
    publishing = asyncio.ensure_future(sync.sender("first").publish(0, HeldWeights({"w": torch.zeros(4 << 20)})))
    await asyncio.sleep(0)
    assert not publishing.done()
    fetching = asyncio.ensure_future(sync.receiver("rollout/0").fetch(await publishing))
    await asyncio.sleep(0)
    assert not fetching.done()
    await fetching


async def test_tensors_that_are_gathered_are_held_one_at_a_time_and_give_the_same_bits_in_any_order(make_sync: MakeSync) -> None:
    for dtype in (None, "bfloat16"):
        sync, tensors = make_sync(dtype=dtype), random_tensors(0)
        sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
        manifest = await sender.publish(0, HeldWeights(tensors))
        fetched = {name: tensor.clone() for name, tensor in (await receiver.fetch(manifest)).items()}
        for version, order in enumerate((sorted(tensors), sorted(tensors, reverse=True), list(tensors)), 1):
            source = Gathered(tensors, order)
            again = await sender.publish(version, source)
            assert (again.hash, again.tensors) == (manifest.hash, manifest.tensors)
            assert source.most_alive == 1 and source.num_alive == 0
            assert_same_bits(await receiver.fetch(again), fetched)
        await sender.close()
        await receiver.close()


class Broken(Gathered):
    """Something is wrong with what comes after the first tensor."""

    def __init__(self, fault: str) -> None:
        super().__init__(random_tensors(7))
        self._fault = fault

    async def tensors(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        wrong = {"other shape": torch.zeros(5, 7), "other dtype": torch.zeros(7, 5).double()}
        async for name, tensor in super().tensors():
            if self._fault == "raises" and name == "large":
                raise ConnectionError("a rank has gone")
            if self._fault in wrong and name == "z.weight":
                yield name, wrong[self._fault]
            elif self._fault != "one is missing" or name != "large":
                yield name, tensor
            if self._fault == "one comes twice" and name == "large":
                yield name, tensor
            if self._fault == "one more" and name == "large":
                yield "other", tensor


@pytest.mark.parametrize("keep", [1, 2])
@pytest.mark.parametrize("fault", ["raises", "other shape", "other dtype", "one is missing", "one comes twice", "one more"])
async def test_weights_that_break_off_or_are_not_what_they_said_are_not_published(
    make_sync: MakeSync, fault: str, keep: int
) -> None:
    sync = make_sync(keep=keep)
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifest = await sender.publish(0, HeldWeights(random_tensors(0)))
    with pytest.raises(ConnectionError if fault == "raises" else WeightSyncError, match=r"large|z\.weight|other|gone"):
        await sender.publish(1, Broken(fault))
    if keep == 2:
        assert_same_bits(await receiver.fetch(manifest), random_tensors(0))
    else:
        with pytest.raises(WeightSyncError):
            await receiver.fetch(manifest)
    again = await sender.publish(1, HeldWeights(random_tensors(1)))
    assert_same_bits(await receiver.fetch(again), random_tensors(1))


async def test_a_publish_that_is_cancelled_and_two_at_once_spoil_nothing(make_sync: MakeSync) -> None:
    class Endless(Gathered):
        async def tensors(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
            async for pair in super().tensors():
                yield pair
                if pair[0] == "large":
                    begun.set()
                    await asyncio.Event().wait()

    sync, begun = make_sync(), asyncio.Event()
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    waiting = asyncio.create_task(sender.publish(0, Endless(random_tensors(5))))
    await asyncio.wait_for(begun.wait(), patience(10))
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    sources: list[WeightSource] = [Gathered(random_tensors(0)), HeldWeights(random_tensors(1)), Gathered(random_tensors(2))]
    manifests = await asyncio.gather(*(sender.publish(version, source) for version, source in enumerate(sources)))
    for version in (1, 2):
        assert_same_bits(await receiver.fetch(manifests[version]), random_tensors(version))


async def test_keep_below_one_is_refused(make_sync: MakeSync) -> None:
    with pytest.raises(UserError, match="keep"):
        make_sync(keep=0)


@pytest.mark.parametrize("place", ["header", "first tensor", "last byte"])
async def test_bytes_that_are_damaged_on_the_way_are_refused(make_sync: MakeSync, place: str) -> None:
    sync = make_sync()
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    manifest = await sender.publish(0, HeldWeights(random_tensors(0)))
    where = {"header": 20, "first tensor": 2048, "last byte": manifest.num_bytes - 1}[place]
    flip_a_bit(Path(manifest.address), where)
    for _ in range(2):
        with pytest.raises(WeightSyncError):
            await receiver.fetch(manifest)
    flip_a_bit(Path(manifest.address), where)
    assert_same_bits(await receiver.fetch(manifest), random_tensors(0))  # nobody has kept what was damaged


def flip_a_bit(path: Path, where: int) -> None:
    with path.open("r+b") as file:
        file.seek(where)
        byte = file.read(1)[0]
        file.seek(where)
        file.write(bytes([byte ^ 1]))


async def test_all_receivers_have_the_same_bits_and_one_that_starts_again_too(make_sync: MakeSync) -> None:
    sync = make_sync(num_receivers=3)
    sender, receivers = sync.sender("first"), [sync.receiver(f"rollout/{i}") for i in range(3)]
    for version in range(4):
        manifest = await sender.publish(version, HeldWeights(random_tensors(version)))
        for fetched in await asyncio.gather(*(receiver.fetch(manifest) for receiver in receivers)):
            assert_same_bits(fetched, random_tensors(version))
        await receivers[version % 3].close()
        receivers[version % 3] = sync.receiver(f"rollout/{version % 3}")
        assert_same_bits(await receivers[version % 3].fetch(manifest), random_tensors(version))


async def test_wide_floats_travel_as_bfloat16_by_choice(make_sync: MakeSync) -> None:
    sync = make_sync(dtype="bfloat16")
    wide, published = random_tensors(0) | {"double": torch.randn(3000, dtype=torch.float64)}, {}
    for name, tensor in wide.items():
        published[name] = tensor.bfloat16() if tensor.is_floating_point() else tensor.clone()
    manifest = await sync.sender("first").publish(0, HeldWeights(wide))
    assert manifest.tensors["double"] == TensorSpec((3000,), "bfloat16") and manifest.tensors["a.int64"].dtype == "int64"
    assert_same_bits(await sync.receiver("rollout/0").fetch(manifest), published)


@pytest.mark.parametrize("keep", [1, 2, 3])
async def test_there_are_no_copies_beyond_the_retained_versions(make_sync: MakeSync, keep: int) -> None:
    """A machine has `keep` files. A worker that installs from these has no copy; one that a broadcast reaches retains one."""
    sync, before = make_sync(keep=keep), storages()
    sender, receiver = sync.sender("first"), sync.receiver("rollout/0")
    tensors = {f"layer.{i}": torch.randn(1 << 18) for i in range(8)}  # 8 MiB
    for version in range(8):
        manifest = await sender.publish(version, Gathered(tensors))  # as from a device
        fetched = await receiver.fetch(manifest)
        await receiver.release()
    folders = 2 if isinstance(sync, Network) else 1  # the workers' machine has files of its own
    folder = str(Path(manifest.address).parent)

    def maps() -> list[list[str]]:
        return [line.split() for line in Path("/proc/self/maps").read_text().splitlines() if folder in line]

    await until(lambda: len({line[4] for line in maps()}) <= folders * keep)  # the threads let go of what they were given
    known = before.keys() | {tensor.untyped_storage().data_ptr() for tensor in (*tensors.values(), *fetched.values())}
    await until(lambda: sum(size for place, size in storages().items() if place not in known) < 2.1 * CHUNK_BYTES)
    lines, files = maps(), list(Path(folder).rglob("weights-*"))
    assert len(files) == len({line[4] for line in lines}) == folders * keep  # by inode: none is deleted and still mapped
    assert sum(path.stat().st_size for path in files) == len(files) * manifest.num_bytes
    sizes = {place: size for place, size in storages().items() if place not in before}
    own = sum(sizes.pop(tensor.untyped_storage().data_ptr()) for tensor in tensors.values())
    places = {tensor.untyped_storage().data_ptr() for tensor in fetched.values()}
    received = sum(sizes.pop(place) for place in places)
    if isinstance(sync, Collective | Spread):
        assert len(places) == 1 and received < 1.01 * own
    else:
        mapped = [tuple(int(end, 16) for end in line[0].split("-")) for line in lines]
        assert all(any(begin <= place < end for begin, end in mapped) for place in places)
    assert sum(sizes.values()) < 2.1 * CHUNK_BYTES  # a broadcast's buffers


def storages() -> dict[int, int]:
    """Bytes of the live tensors' memory, by its address. A decoder that other tests left has packed weights, which tell neither."""
    gc.collect()
    tensors = [item for item in gc.get_objects() if type(item) is torch.Tensor and item.layout is torch.strided]
    live = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in live}


# Only of files in memory


async def test_a_shortened_file_is_refused(shared: Any) -> None:
    manifest = await shared().sender("first").publish(0, HeldWeights(random_tensors(0)))
    copy = Path(manifest.address).with_name("short")
    copy.write_bytes(Path(manifest.address).read_bytes()[:-1])
    with pytest.raises(WeightSyncError, match="bytes"):
        await shared().receiver("rollout/0").fetch(msgspec.structs.replace(manifest, address=str(copy)))


async def test_a_link_is_not_followed(shared: Any) -> None:
    manifest = await shared().sender("first").publish(0, HeldWeights(random_tensors(0)))
    link = Path(manifest.address).with_name("link")
    link.symlink_to(manifest.address)
    with pytest.raises(WeightSyncError):
        await shared().receiver("rollout/0").fetch(msgspec.structs.replace(manifest, address=str(link)))


async def test_the_files_are_plain_safetensors_and_as_many_as_kept(shared: Any, tmp_path: Path) -> None:
    sender = shared(keep=2).sender("first")
    for version in range(5):
        manifest = await sender.publish(version, HeldWeights(random_tensors(version)))
        assert_same_bits(load_file(manifest.address), random_tensors(version))
    content = Path(manifest.address).read_bytes()
    header = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])
    for name, tensor in random_tensors(0).items():  # each aligned to its own element
        assert header[name]["data_offsets"][0] % tensor.element_size() == 0, name
    names = sorted(path.name for path in (tmp_path / "weights").glob("*.safetensors"))
    assert names == ["weights-3.safetensors", "weights-4.safetensors"]


async def test_directory_and_files_are_private(shared: Any, tmp_path: Path) -> None:
    manifest = await shared().sender("first").publish(0, HeldWeights(random_tensors(0)))
    assert stat.S_IMODE((tmp_path / "weights").stat().st_mode) == 0o700
    assert stat.S_IMODE(Path(manifest.address).stat().st_mode) == 0o600


async def test_an_open_directory_is_refused(shared: Any, tmp_path: Path) -> None:
    (tmp_path / "weights").mkdir()
    os.chmod(tmp_path / "weights", 0o755)
    with pytest.raises(UserError, match="only you can open"):
        shared().sender("first")


async def test_a_version_that_did_not_fit_leaves_the_others(shared: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def no_room(fd: int, offset: int, length: int) -> None:
        raise OSError(28, "No space left on device")

    sender, receiver = shared(keep=2).sender("first"), shared().receiver("rollout/0")
    manifest = await sender.publish(0, HeldWeights(random_tensors(0)))
    monkeypatch.setattr(os, "posix_fallocate", no_room)
    with pytest.raises(WeightSyncError, match="no room for"):
        await sender.publish(1, HeldWeights(random_tensors(1)))
    assert_same_bits(await receiver.fetch(manifest), random_tensors(0))
    assert [path.name for path in (tmp_path / "weights").iterdir()] == ["weights-0.safetensors"]
    monkeypatch.undo()
    assert_same_bits(await receiver.fetch(await sender.publish(1, HeldWeights(random_tensors(1)))), random_tensors(1))
