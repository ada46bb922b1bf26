"""Rows that have the same columns as one value of bytes, for key-value stores and snapshot files. No pickle.

    prefix    magic "AFP", version (1 byte), header length (uint32), body length (uint64), checksum (uint64); little endian
    header    msgpack: the groups' metas, the numbers of rows and groups, and each column's name, dtype, shape and lengths
    body      indices, groups, then each column: a ragged one's lengths (uint32 where they fit, else uint64), the values

The header and every array are padded to 8 bytes, so that what is unpacked are aligned views of the value. The checksum (xxh3_64)
covers all that follows the magic, itself left out.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from math import prod
from typing import Annotated, BinaryIO

import msgspec
import numpy as np
import xxhash

from asyncflow.types import Array, Batch, GroupMeta, Ragged, Values

MAGIC = b"AFP"
VERSION = 1
PREFIX = struct.Struct("<3sBIQQ")
_INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
DTYPES = frozenset(("bool", *_INTEGERS, "float16", "float32", "float64", "complex64", "complex128"))

Count = Annotated[int, msgspec.Meta(ge=0)]
PackedBytes = bytes | bytearray | memoryview


class _PackedColumn(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """`length_bytes`: of each of a ragged column's lengths; 0 for a dense column, whose `num_values` are its entries."""

    name: str
    dtype: str
    shape: list[Count]
    num_entries: Count
    num_values: Count
    length_bytes: Count


class _PackedHeader(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    metas: list[GroupMeta]
    num_rows: Count
    num_groups: Count
    columns: list[_PackedColumn]


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_PackedHeader)


def pack(batch: Batch, metas: Sequence[GroupMeta] = ()) -> list[bytes | memoryview]:
    """Buffers that are, one after another, the packed value. The values' own are views: write or join them before they change.

    Raises `ValueError` naming a column of a dtype that cannot be packed.
    """
    arrays = [batch.indices.astype(np.int64, copy=False), batch.groups.astype(np.int64, copy=False)]
    columns = []
    for name, values in batch.columns.items():
        array = values.values if isinstance(values, Ragged) else values
        if array.dtype.name not in DTYPES or not array.dtype.isnative:
            raise ValueError(f"column {name!r} has dtype {array.dtype.str}, which cannot be packed")
        length_bytes = 0
        if isinstance(values, Ragged):
            lengths = values.lengths
            length_bytes = 4 if not len(lengths) or int(lengths.max()) < 1 << 32 else 8
            arrays.append(lengths.astype(np.uint32 if length_bytes == 4 else np.uint64))
        arrays.append(array)
        shape = list(array.shape[1:])
        columns.append(_PackedColumn(name, array.dtype.name, shape, len(values), len(array), length_bytes))
    header = _encoder.encode(_PackedHeader(list(metas), len(batch.indices), len(batch.groups), columns))
    body = [piece for array in arrays for piece in _padded(array)]
    sizes = len(header), sum(len(piece) for piece in body)
    checksum = xxhash.xxh3_64(_covered(*sizes))
    pieces = [header + bytes(-len(header) % 8), *body]
    for piece in pieces:
        checksum.update(piece)
    return [PREFIX.pack(MAGIC, VERSION, *sizes, checksum.intdigest()), *pieces]


def unpack(packed: PackedBytes) -> tuple[list[GroupMeta], Batch]:
    """The metas and the batch; its arrays are read-only views of `packed`, only offsets are new.

    Raises `ValueError` saying what is wrong with a value that is not whole. Allocates at most twice the value's own size.
    """
    view = memoryview(packed).toreadonly().cast("B")
    header_bytes, body_bytes, checksum = _sizes(view[: PREFIX.size])
    if len(view) != _length(header_bytes, body_bytes):
        raise ValueError(f"{len(view)} bytes are there, and {_length(header_bytes, body_bytes)} are announced")
    covered = xxhash.xxh3_64(_covered(header_bytes, body_bytes))
    covered.update(view[PREFIX.size :])
    if covered.intdigest() != checksum:
        raise ValueError("the checksum is wrong: the value is damaged")
    try:
        header = _decoder.decode(view[PREFIX.size : PREFIX.size + header_bytes])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ValueError(f"the header cannot be read: {error}") from error
    body = _PackedArrays(view, _length(header_bytes, 0))
    indices = body.take("int64", header.num_rows, (), "the row indices")
    groups = body.take("int64", header.num_groups, (), "the group numbers")
    columns: dict[str, Values] = {}
    for column in header.columns:
        if column.name in columns:
            raise ValueError(f"column {column.name!r} is there twice")
        columns[column.name] = _column(body, column, header)
    if body.at != len(view):
        raise ValueError(f"{len(view) - body.at} bytes are left over")
    return header.metas, Batch(indices, groups, columns)


def write_frame(file: BinaryIO, metas: Sequence[GroupMeta], batch: Batch) -> int:
    """Append a packed batch to a file; its prefix says how long it is. Returns the bytes written."""
    buffers = pack(batch, metas)
    for piece in buffers:
        file.write(piece)
    return sum(len(piece) for piece in buffers)


def read_frames(file: BinaryIO) -> Iterator[tuple[list[GroupMeta], Batch]]:
    """The batches from where a seekable file stands to its end. Raises `ValueError` naming the offset of one that is not whole."""
    start = file.tell()
    size = file.seek(0, 2)
    while start < size:
        file.seek(start)
        prefix = file.read(PREFIX.size)
        try:
            header_bytes, body_bytes, _ = _sizes(prefix)
            length = _length(header_bytes, body_bytes)
            if length > size - start:
                raise ValueError(f"{length} bytes are announced, and {size - start} are left in the file")
            frame = unpack(prefix + file.read(length - PREFIX.size))
        except ValueError as error:
            raise ValueError(f"the frame at byte {start} cannot be read: {error}") from error
        yield frame
        start += length


def _covered(header_bytes: int, body_bytes: int) -> bytes:
    """Part of the prefix that the checksum covers."""
    return PREFIX.pack(MAGIC, VERSION, header_bytes, body_bytes, 0)


def _length(header_bytes: int, body_bytes: int) -> int:
    return PREFIX.size + header_bytes + -header_bytes % 8 + body_bytes


def _sizes(prefix: PackedBytes) -> tuple[int, int, int]:
    """(header length, body length, checksum)."""
    if len(prefix) < PREFIX.size:
        raise ValueError(f"{len(prefix)} bytes are too few for a prefix of {PREFIX.size}")
    magic, version, header_bytes, body_bytes, checksum = PREFIX.unpack(prefix)
    if magic != MAGIC:
        raise ValueError(f"it begins with {bytes(magic)!r}, not {MAGIC!r}: this is no packed batch")
    if version != VERSION:
        raise ValueError(f"it has version {version}; this program reads version {VERSION}")
    return header_bytes, body_bytes, checksum


def _padded(array: Array) -> list[bytes | memoryview]:
    if not array.nbytes:
        return []
    view = np.ascontiguousarray(array).data.cast("B")
    return [view, bytes(-len(view) % 8)] if len(view) % 8 else [view]


class _PackedArrays:
    """The arrays of a value, taken off one after another."""

    def __init__(self, view: memoryview, at: int) -> None:
        self._view = view
        self.at = at

    def take(self, dtype: str, count: int, shape: tuple[int, ...], what: str) -> Array:
        """A read-only array [count, *shape]. Raises `ValueError` when the value ends before it does."""
        num_values = count * prod(shape)
        num_bytes = num_values * np.dtype(dtype).itemsize
        if num_bytes > len(self._view) - self.at:
            raise ValueError(f"{what} take {num_bytes} bytes, and {len(self._view) - self.at} are left")
        array = np.frombuffer(self._view, dtype, num_values, self.at) if num_bytes else np.empty(0, dtype)
        array.flags.writeable = False
        self.at += num_bytes + -num_bytes % 8
        return array.reshape(count, *shape)


def _column(body: _PackedArrays, column: _PackedColumn, header: _PackedHeader) -> Values:
    name = f"column {column.name!r}"
    if column.dtype not in DTYPES:
        raise ValueError(f"{name} has an unknown dtype {column.dtype!r}")
    if len(column.shape) > 16 or prod(column.shape) >= 1 << 40 or max(column.num_values, *column.shape, 0) >= 1 << 48:
        raise ValueError(f"{name} has the impossible shape {column.num_values} x {column.shape}")
    if column.num_entries not in (header.num_rows, header.num_groups):
        raise ValueError(f"{name} has {column.num_entries} entries for {header.num_rows} rows of {header.num_groups} groups")
    shape = tuple(column.shape)
    if column.length_bytes == 0:
        if column.num_values != column.num_entries:
            raise ValueError(f"{name} is dense and has {column.num_values} values for {column.num_entries} entries")
        return body.take(column.dtype, column.num_values, shape, name)
    if column.length_bytes not in (4, 8):
        raise ValueError(f"{name} has lengths of {column.length_bytes} bytes")
    lengths = body.take(f"uint{8 * column.length_bytes}", column.num_entries, (), f"the lengths of {name}")
    offsets = np.zeros(column.num_entries + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:], dtype=np.int64)
    if offsets[-1] != column.num_values or bool((offsets[1:] < offsets[:-1]).any()):
        raise ValueError(f"the lengths of {name} do not add up to its {column.num_values} values")
    return Ragged(body.take(column.dtype, column.num_values, shape, name), offsets)
