"""The arena: memory comes back when the last view goes, and a reader in another process notices that it has."""

from __future__ import annotations

import gc
import os
import random
import stat
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncflow.transport import arena as arena_module
from asyncflow.transport.arena import Arena, ArenaPlace, ArenaReader
from asyncflow.types import RunError
from tests.patience import patience

MIB = 1 << 20


@pytest.fixture(params=["anonymous", "file"])
def arena(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Arena]:
    made = Arena(64 * MIB, None if request.param == "anonymous" else tmp_path / "arena", keep_bytes=4 * MIB)
    yield made
    made.close()


def is_inside(arena: Arena, array: np.ndarray) -> bool:
    return 0 <= array.__array_interface__["data"][0] - arena._address < arena.capacity_bytes


def test_arrays_are_exact_aligned_and_apart(arena: Arena) -> None:
    sizes = [1, 63, 64, 65, 4096, 100_001, MIB]
    arrays = [arena.allocate(n) for n in sizes]
    for i, array in enumerate(arrays):
        assert array.shape == (sizes[i],) and array.dtype == np.uint8 and array.flags.writeable and is_inside(arena, array)
        assert array.__array_interface__["data"][0] % 64 == 0
        array[:] = i
    assert all((array == i).all() for i, array in enumerate(arrays))
    assert arena.allocate(0).shape == (0,)


VIEWS: dict[str, Callable[[np.ndarray], object]] = {
    "a slice": lambda a: a[100:200],
    "a slice of a slice": lambda a: a[100:200][3:5],
    "another dtype and shape": lambda a: a.view(np.int32)[4:].reshape(-1, 3),
    "an array over it": lambda a: np.ndarray((4, 4), np.float64, a[64:]),
    "a memoryview": lambda a: a[8:].data.cast("B"),
    "an array over a memoryview": lambda a: np.frombuffer(memoryview(a)[8:16], np.uint8),
}


@pytest.mark.parametrize("kind", VIEWS)
def test_memory_is_free_when_the_last_view_has_gone(arena: Arena, kind: str) -> None:
    array = arena.allocate(MIB)
    whole = arena.used_bytes
    assert MIB <= whole <= MIB + 4096
    view = VIEWS[kind](array)
    del array
    gc.collect()
    assert arena.used_bytes == whole
    del view
    gc.collect()
    assert arena.used_bytes == 0


def test_freed_ranges_merge_and_are_used_again(arena: Arena) -> None:
    arrays = [arena.allocate(MIB) for _ in range(6)]
    first = arrays[1].__array_interface__["data"][0]
    del arrays[3], arrays[1], arrays[1]  # what were the fourth, the second and the third
    again = arena.allocate(3 * MIB)
    assert again.__array_interface__["data"][0] == first, "three neighbours make one range"


def test_pages_are_kept_up_to_a_bound_and_then_given_back(request: pytest.FixtureRequest) -> None:
    path = Path(f"/dev/shm/asyncflow-test-{os.getpid()}")  # a disk's file systems count blocks otherwise
    arena = Arena(64 * MIB, path, keep_bytes=4 * MIB)
    request.addfinalizer(arena.close)
    big = arena.allocate(16 * MIB)
    big[:] = 1
    assert path.stat().st_blocks * 512 >= 16 * MIB
    del big
    assert arena.kept_bytes == 4 * MIB and path.stat().st_blocks * 512 <= 5 * MIB
    pages = path.stat().st_blocks
    small = arena.allocate(MIB)  # out of those that were kept
    assert path.stat().st_blocks == pages and arena.kept_bytes + arena.used_bytes == 4 * MIB
    del small
    assert arena.kept_bytes == 4 * MIB
    arena.close()


def test_anonymous_pages_are_given_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    arena = Arena(256 * MIB, keep_bytes=0)
    before = resident()
    array = arena.allocate(128 * MIB)
    array[:] = 1
    assert resident() > before + 100 * MIB
    del array
    assert resident() < before + 32 * MIB


def test_where_there_is_no_room_an_ordinary_array_is_given(arena: Arena) -> None:
    kept = [arena.allocate(30 * MIB), arena.allocate(30 * MIB)]
    other = arena.allocate(30 * MIB)
    assert [is_inside(arena, a) for a in [*kept, other]] == [True, True, False] and other.shape == (30 * MIB,)
    assert arena.locate(other) is None
    del kept[0]
    assert is_inside(arena, arena.allocate(30 * MIB))


def test_a_full_file_system_is_no_crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arena = Arena(64 * MIB, tmp_path / "arena")

    def full(*_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    array = arena.allocate(MIB)
    array[:] = 1
    assert not is_inside(arena, array) and arena.used_bytes == 0
    monkeypatch.undo()
    assert is_inside(arena, arena.allocate(MIB))
    arena.close()


def test_the_file_is_private_new_and_removed(tmp_path: Path) -> None:
    path = tmp_path / "arena"
    before = os.umask(0)
    try:
        arena = Arena(MIB, path)
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(FileExistsError):
        Arena(MIB, path)
    array = arena.allocate(100)
    arena.close()
    assert not path.exists()
    array[:] = 5
    assert not is_inside(arena, arena.allocate(100)), "no room can be reserved in a file that is closed"


def test_a_reader_copies_what_a_place_says(tmp_path: Path) -> None:
    arena = Arena(16 * MIB, tmp_path / "arena")
    before, array = arena.allocate(MIB), arena.allocate(MIB)
    array[:] = np.random.default_rng(0).integers(0, 256, MIB)
    reader = ArenaReader(tmp_path / "arena")
    for part in (array, array[64:128], array.view(np.int64).reshape(4, -1)[2:3]):
        place = arena.locate(part)
        assert place is not None
        copied = reader.copy(place, lambda n: np.empty(n, np.uint8))
        assert copied.tobytes() == part.tobytes() and not np.shares_memory(copied, array)
    assert arena.locate(array[::2]) is None and arena.locate(np.zeros(5)) is None
    del before
    arena.close()


@pytest.mark.parametrize("is_used_again", [False, True])
def test_a_reader_notices_that_the_range_has_been_freed(tmp_path: Path, is_used_again: bool) -> None:
    arena = Arena(16 * MIB, tmp_path / "arena")
    reader = ArenaReader(tmp_path / "arena")
    array = arena.allocate(MIB)
    place = arena.locate(array)
    assert place is not None

    def drop_while_reading(num_bytes: int) -> np.ndarray:
        nonlocal array, again
        del array
        if is_used_again:
            again = arena.allocate(MIB)  # the same range, for somebody else
        return np.empty(num_bytes, np.uint8)

    again: np.ndarray | None = None
    with pytest.raises(LookupError, match="dropped while"):
        reader.copy(place, drop_while_reading)
    if again is not None:
        renewed = arena.locate(again)
        assert renewed is not None and renewed.offset == place.offset and renewed.generation != place.generation
    arena.close()


@pytest.mark.parametrize("place", [(-1, 8, 0, 0), (0, -8, 0, 0), (MIB - 4, 8, 0, 0), (0, 8, MIB, 0), (0, 8, 4, 0), (0, 8, -8, 0)])
def test_a_place_outside_is_refused(tmp_path: Path, place: tuple[int, int, int, int]) -> None:
    arena = Arena(MIB, tmp_path / "arena")
    with pytest.raises(ValueError, match="no such place"):
        ArenaReader(tmp_path / "arena").copy(ArenaPlace(*place), lambda n: np.empty(n, np.uint8))
    arena.close()


def test_an_arena_that_cannot_be_read_is_said(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="cannot be read"):
        ArenaReader(tmp_path / "absent")
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(RunError, match="cannot be read"):
        ArenaReader(tmp_path / "link")


def test_random_use_loses_nothing_and_overlaps_nothing(arena: Arena) -> None:
    rng, live = random.Random(0), list[tuple[int, np.ndarray]]()
    array: np.ndarray | None
    for i in range(2_000):
        if live and rng.random() < 0.5:
            number, array = live.pop(rng.randrange(len(live)))
            assert (array == number % 251).all()
        else:
            array = arena.allocate(rng.choice([1, 5_000, 70_000, 300_000]))
            array[:] = i % 251
            live.append((i, array))
        array = None
    live.clear()
    assert arena.used_bytes == 0 and arena._free.num_bytes == arena.capacity_bytes
    assert len(arena._free._ends) == 1 and arena.kept_bytes <= arena.keep_bytes


def test_any_thread_may_free_and_a_holder_of_the_lock_too(arena: Arena) -> None:
    def use() -> None:
        for _ in range(300):
            arrays = [arena.allocate(70_000) for _ in range(4)]
            arrays[0].fill(1)

    threads = [threading.Thread(target=use) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(patience(30))
        assert not thread.is_alive()
    array = arena.allocate(10)
    with arena._lock:  # as if the garbage collector ran inside `allocate`
        del array
    assert arena.used_bytes == 0


def test_clients_share_one_arena_for_what_they_receive() -> None:
    one, two = arena_module.receive_buffer(MIB), arena_module.receive_buffer(MIB)
    assert arena_module._received is not None
    assert is_inside(arena_module._received, one) and is_inside(arena_module._received, two)


def test_a_forked_child_leaves_its_parents_arena_alone(tmp_path: Path) -> None:
    arena = Arena(16 * MIB, tmp_path / "arena", keep_bytes=0)
    array = arena.allocate(MIB)
    array[:] = 3
    place = arena.locate(array)
    assert place is not None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # that threads may be running
        child = os.fork()
    if child == 0:
        with arena._lock:
            pass
        del array
        os._exit(0 if not is_inside(arena, arena.allocate(MIB)) else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert (ArenaReader(tmp_path / "arena").copy(place, lambda n: np.empty(n, np.uint8)) == 3).all()
    arena.close()
