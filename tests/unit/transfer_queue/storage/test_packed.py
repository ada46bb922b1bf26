"""Packed batches: small, exact, and refused in a sentence when they are not whole."""

from __future__ import annotations

import io
import tracemalloc
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncflow.transfer_queue.storage import packed as module
from asyncflow.transfer_queue.storage.packed import PREFIX, pack, read_frames, unpack, write_frame
from asyncflow.types import Batch, GroupMeta, Interval, Ragged
from tests.depth import few

METAS = [GroupMeta(3, 2, 5, Interval(1, 4)), GroupMeta(2**47, 1, 6, Interval(2, 2), "eval")]


def sample() -> Batch:
    return Batch(
        np.array([6, 7, 2**48], np.int64),
        np.array([3, 2**47], np.int64),
        {
            "ids": Ragged(np.arange(5), np.array([0, 2, 2, 5])),
            "pairs": Ragged(np.arange(4, dtype=np.float32).reshape(2, 2), np.array([0, 0, 2, 2])),
            "prompt": Ragged(np.array([1], np.uint8), np.array([0, 1, 1])),
            "reward": np.array([0.5, np.nan, -0.0], np.float32),
            "flag": np.array([True, False, True]),
            "image": np.arange(18, dtype=np.int16).reshape(3, 2, 3),
            "nothing": np.empty((3, 0), np.float64),
        },
    )


def joined(batch: Batch, metas: list[GroupMeta] | None = None) -> bytes:
    return b"".join(pack(batch, METAS if metas is None else metas))


def assert_same(found: Batch, wanted: Batch) -> None:
    assert found.indices.tolist() == wanted.indices.tolist() and found.groups.tolist() == wanted.groups.tolist()
    assert list(found.columns) == list(wanted.columns)
    for name, values in wanted.columns.items():
        other = found.columns[name]
        assert type(other) is type(values)
        if isinstance(values, Ragged) and isinstance(other, Ragged):
            assert other.offsets.tolist() == values.offsets.tolist() and other.offsets.dtype == np.int64
        ours, theirs = (v.values if isinstance(v, Ragged) else v for v in (values, other))
        assert theirs.dtype == ours.dtype and theirs.shape == ours.shape and theirs.tobytes() == ours.tobytes()
        assert theirs.flags.aligned and not theirs.flags.writeable


def test_what_is_unpacked_is_what_was_packed() -> None:
    for make in (bytes, bytearray, memoryview):
        metas, found = unpack(make(joined(sample())))
        assert metas == METAS
        assert_same(found, sample())
    empty = Batch(np.empty(0, np.int64), np.empty(0, np.int64), {"ids": Ragged(np.empty(0, np.int64), np.zeros(1, np.int64))})
    assert_same(unpack(joined(empty, []))[1], empty)


def test_arrays_that_are_not_contiguous_are_packed_in_their_order() -> None:
    wide = np.arange(24, dtype=np.int64).reshape(6, 4)
    batch = Batch(np.arange(6)[::2], np.array([0]), {"a": wide[::2, 1:3], "b": Ragged(np.arange(10)[::2], np.array([0, 2, 3, 5]))})
    assert_same(unpack(joined(batch, []))[1], batch)


def test_a_mebibyte_of_rows_takes_at_most_two_per_cent_more() -> None:
    rng = np.random.default_rng(0)
    lengths = rng.integers(64, 385, 300)
    offsets = np.concatenate(([0], np.cumsum(lengths)))
    total = int(offsets[-1])
    columns = {"ids": Ragged(rng.integers(0, 9, total), offsets), "logprobs": Ragged(rng.random(total, np.float32), offsets)}
    batch = Batch(np.arange(300), np.arange(38), columns)
    payload = sum(c.nbytes for c in columns.values()) + batch.indices.nbytes + batch.groups.nbytes
    metas = [GroupMeta(g, 8, 0, Interval(0, 1)) for g in range(38)]
    assert (
        payload > 700_000 and len(joined(batch, [])) <= 1.02 * payload + 200 and len(joined(batch, metas)) <= 1.02 * payload + 1200
    )


def test_lengths_that_need_more_than_32_bits_are_kept() -> None:
    huge = Ragged(np.empty((1 << 33, 0), np.int64), np.array([0, 1 << 33]))  # 2 ** 33 values of no bytes
    _, found = unpack(joined(Batch(np.array([1]), np.array([0]), {"huge": huge}), []))
    assert found.ragged("huge").offsets.tolist() == [0, 1 << 33] and found.ragged("huge").values.shape == (1 << 33, 0)


def test_objects_are_not_packed() -> None:
    with pytest.raises(ValueError, match="column 'a' has dtype"):
        pack(Batch(np.array([1]), np.array([0]), {"a": np.array([None])}))
    with pytest.raises(ValueError, match="column 'a' has dtype"):
        pack(Batch(np.array([1]), np.array([0]), {"a": np.array([1], ">i8")}))


def test_every_flipped_bit_and_every_cut_is_found() -> None:
    whole = joined(sample())
    for at in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[at // 8] ^= 1 << at % 8
        with pytest.raises(ValueError):
            unpack(damaged)
    for size in range(len(whole)):
        with pytest.raises(ValueError):
            unpack(whole[:size])
    with pytest.raises(ValueError, match="announced"):
        unpack(whole + b"\0" * 8)


def resealed(header: Any, body: bytes) -> bytes:
    """A value with a right checksum, whatever it says."""
    raw = header if isinstance(header, bytes) else msgspec.msgpack.encode(header)
    rest = raw + bytes(-len(raw) % 8) + body
    checksum = xxhash.xxh3_64_intdigest(PREFIX.pack(module.MAGIC, module.VERSION, len(raw), len(body), 0) + rest)
    return PREFIX.pack(module.MAGIC, module.VERSION, len(raw), len(body), checksum) + rest


def parts() -> tuple[list[Any], bytes]:
    whole = joined(sample())
    size, _, _ = module._sizes(whole[: PREFIX.size])
    start = PREFIX.size + size
    return msgspec.msgpack.decode(whole[PREFIX.size : start]), whole[start + -size % 8 :]


def test_a_value_sealed_again_as_it_was_is_read() -> None:
    assert_same(unpack(resealed(*parts()))[1], sample())


def column(*changes: tuple[int, Any]) -> Any:
    """A header whose column `ids` has been changed."""

    def change(header: list[Any]) -> None:
        for at, value in changes:
            header[3][0][at] = value

    return change


def shift(lengths: list[int]) -> bytes:
    _, body = parts()
    start = 3 * 8 + 2 * 8
    return body[:start] + np.array(lengths, np.uint32).tobytes() + body[start + 12 :]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (column((1, "object")), "unknown dtype 'object'"),
        (column((1, "i8,O")), "unknown dtype"),
        (column((3, 4)), "4 entries for 3 rows of 2 groups"),
        (column((4, 4)), "do not add up to its 4 values"),
        (column((4, 1 << 40)), "do not add up"),
        (column((4, 1 << 62)), "impossible shape"),
        (column((2, [1 << 45])), "impossible shape"),
        (column((2, [0] * 40)), "impossible shape"),
        (column((4, -1)), "header cannot be read"),
        (column((5, 3)), "lengths of 3 bytes"),
        (column((5, 0)), "is dense and has 5 values for 3 entries"),
        (column((0, "reward")), "'reward' is there twice"),
        (lambda header: header.__setitem__(1, 1 << 60), "row indices take .* bytes"),
        (lambda header: header.__setitem__(2, 4), "column 'ids'"),
        (lambda header: header[3].pop(), None),
        (lambda header: header[3].pop(0), "entries|left|lengths|values"),
        (lambda header: header.append(1), "header cannot be read"),
        (lambda header: header.__setitem__(0, [[1, 2]]), "header cannot be read"),
    ],
)
def test_a_header_that_lies_is_refused_in_words(change: Any, message: str | None) -> None:
    header, body = parts()
    change(header)
    if message is None:  # a column of no bytes: nothing is left over without it
        assert "nothing" not in unpack(resealed(header, body))[1].columns
        return
    with pytest.raises(ValueError, match=message):
        unpack(resealed(header, body))


@pytest.mark.parametrize("lengths", [[2, 0, 4], [5, 1, 3], [0, 0, 0], [2**32 - 1, 3, 2]])
def test_lengths_that_lie_are_refused(lengths: list[int]) -> None:
    header, _ = parts()
    with pytest.raises(ValueError, match="column 'ids'"):
        unpack(resealed(header, shift(lengths)))


def test_lengths_whose_sum_wraps_round_are_refused() -> None:
    count, each = (1 << 17) + 1, 1 << 47  # 2 ** 64 + 2 ** 47 values of no bytes: 2 ** 47 to an int64
    header = [[], count, 0, [["huge", "int64", [0], count, each, 8]]]
    body = np.zeros(count, np.int64).tobytes() + np.full(count, each, np.uint64).tobytes()
    with pytest.raises(ValueError, match="do not add up"):
        unpack(resealed(header, body))


def test_bytes_that_belong_to_nothing_are_refused() -> None:
    header, body = parts()
    with pytest.raises(ValueError, match="8 bytes are left over"):
        unpack(resealed(header, body + bytes(8)))


def test_what_is_announced_is_not_allocated(tmp_path: Path) -> None:
    header, body = parts()
    header[1] = 1 << 60
    prefix = PREFIX.pack(module.MAGIC, module.VERSION, 1 << 31, 1 << 60, 0)
    tracemalloc.start()
    for value in (resealed(header, body), prefix + bytes(100)):
        with pytest.raises(ValueError):
            unpack(value)
        with pytest.raises(ValueError):
            list(read_frames(io.BytesIO(value)))
    (tmp_path / "frames").write_bytes(prefix + bytes(100))
    with (tmp_path / "frames").open("rb") as file, pytest.raises(ValueError, match=r"byte 0 .* are left in the file"):
        list(read_frames(file))
    assert tracemalloc.get_traced_memory()[1] < 1 << 20
    tracemalloc.stop()


@settings(max_examples=few(80, 400), deadline=None)
@given(st.data())
def test_nothing_but_a_value_error_comes_of_changed_bytes_with_a_right_checksum(data: st.DataObject) -> None:
    header, body = parts()
    raw = bytearray(msgspec.msgpack.encode(header))
    changed = bytearray(body)
    for _ in range(data.draw(st.integers(1, 4))):
        target = data.draw(st.sampled_from([raw, raw, changed]))
        if target:
            at = data.draw(st.integers(0, len(target) - 1))
            how = data.draw(st.sampled_from(["set", "cut", "insert"]))
            target[at : at + (how != "insert")] = b"" if how == "cut" else bytes([data.draw(st.integers(0, 255))])
    try:
        _, found = unpack(resealed(bytes(raw), bytes(changed)))
    except ValueError:
        return
    for values in found.columns.values():
        assert len(values) in (len(found.indices), len(found.groups))
        if isinstance(values, Ragged):
            assert values.offsets[0] == 0 and values.offsets[-1] == len(values.values) and (values.lengths >= 0).all()


def test_frames_are_read_back_in_turn() -> None:
    file = io.BytesIO()
    file.write(b"head")
    sizes = [write_frame(file, METAS, sample()), write_frame(file, [], sample())]
    assert file.tell() == 4 + sum(sizes)
    file.seek(4)
    found = list(read_frames(file))
    assert [metas for metas, _ in found] == [METAS, []]
    for _, batch in found:
        assert_same(batch, sample())
    file.seek(0, 2)
    assert list(read_frames(file)) == []


def test_a_file_that_ends_early_names_the_byte_where_its_last_frame_begins() -> None:
    file = io.BytesIO()
    size = write_frame(file, METAS, sample())
    write_frame(file, METAS, sample())
    whole = file.getvalue()
    for cut in (size + 1, size + PREFIX.size, size + PREFIX.size + 1, len(whole) - 1):
        frames = read_frames(io.BytesIO(whole[:cut]))
        assert_same(next(frames)[1], sample())
        with pytest.raises(ValueError, match=f"the frame at byte {size} cannot be read"):
            next(frames)
    damaged = bytearray(whole)
    damaged[size + 60] ^= 1
    frames = read_frames(io.BytesIO(bytes(damaged)))
    next(frames)
    with pytest.raises(ValueError, match=f"byte {size} .*(damaged|announced)"):
        next(frames)


def test_another_version_and_another_file_are_told_apart() -> None:
    whole = bytearray(joined(sample()))
    whole[3] = 9
    with pytest.raises(ValueError, match="version 9; this program reads version 1"):
        unpack(whole)
    with pytest.raises(ValueError, match="no packed batch"):
        unpack(b"PK\3\4" + bytes(100))
