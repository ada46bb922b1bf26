"""Bytes of one version as differences from another, where few of their numbers changed. Lossless; numpy and zlib alone.

    unsigned words of new ^ words of old --where not 0--> gaps between their places, and these words --zlib--> bytes

A step at a small learning rate changes few bfloat16 weights: most updates are less than half of the last bit. The words that did
change differ in few bits, so both streams compress. A difference that is not well below the bytes themselves is not made.

What is put together is checked by the hash of the whole version, as any version is.
"""

from __future__ import annotations

import zlib
from typing import Final

import numpy as np

from asyncflow.types import Array

WORTH: Final = 0.5
"""Largest size of a difference, as a part of the bytes themselves: a larger one is not made."""
GAP: Final = 0xFFFF
"""Words that a gap of 16 bits passes over without a change at its end: it is followed by another gap."""
LEVEL: Final = 1
"""Level of zlib: the quickest. Higher levels make the few bytes that are left hardly fewer."""


class DamagedDifference(ValueError):
    """Bytes that are no difference from what they are for."""


def difference(new: Array, old: Array) -> Array | None:
    """Bytes (uint8 [m]) that make `old` (uint8 [n]) into `new` (uint8 [n]); None where they are not worth it, or n is odd."""
    if len(new) % 2:
        return None
    changed = new.view(np.uint16) ^ old.view(np.uint16)
    places = np.flatnonzero(changed)
    if 4 * len(places) > len(new):  # a gap and a word for each, before they are compressed
        return None
    gaps = np.diff(places, prepend=-1) - 1
    if (jumps := gaps // GAP).any():
        gaps = _with_jumps(gaps, jumps)
    parts = gaps.astype("<u2").view(np.uint8), changed[places].astype("<u2").view(np.uint8)
    streams = [zlib.compress(part.reshape(-1, 2).T.tobytes(), LEVEL) for part in parts]  # high bytes apart: mostly 0
    made = np.frombuffer(len(streams[0]).to_bytes(4, "little") + b"".join(streams), np.uint8)
    return made if len(made) <= WORTH * len(new) else None


def apply(made: Array, target: Array) -> None:
    """Make `target` (uint8 [n], writable), which holds the old bytes, into the new ones.

    Raises `DamagedDifference` for bytes that are no difference of n bytes.
    """
    try:
        size = int.from_bytes(made[:4].tobytes(), "little")
        gaps, changed = (_words(stream, len(target)) for stream in (made[4 : 4 + size], made[4 + size :]))
    except zlib.error as error:
        raise DamagedDifference(str(error)) from error
    is_place = gaps != GAP
    places = np.cumsum(gaps.astype(np.int64) + is_place)[is_place] - 1
    words = target.view(np.uint16)
    if len(places) != len(changed) or (len(places) and places[-1] >= len(words)):
        raise DamagedDifference(f"it is not one of {len(target)} bytes")
    words[places] ^= changed


def _with_jumps(gaps: Array, jumps: Array) -> Array:
    """Gaps of which none is longer than 16 bits say: before one that is, as many of `GAP` words as fit into it."""
    ends = np.cumsum(jumps + 1) - 1
    split = np.full(int(ends[-1]) + 1, GAP)
    split[ends] = gaps % GAP
    return split


def _words(stream: Array, num_bytes: int) -> Array:
    """The numbers of a compressed stream, which has no more than `num_bytes`: uint16."""
    unpacker = zlib.decompressobj()
    found = unpacker.decompress(stream.tobytes(), num_bytes + 1)
    if len(found) > num_bytes or len(found) % 2 or not unpacker.eof:
        raise DamagedDifference(f"it is not one of {num_bytes} bytes")
    return np.ascontiguousarray(np.frombuffer(found, np.uint8).reshape(2, -1).T).view("<u2").ravel().astype(np.uint16)
