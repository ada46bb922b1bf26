"""Frames: what one message looks like in a stream of bytes. Pure: no sockets, no clock, no event loop.

    prefix    magic and version (4 bytes), header length, number of buffers (uint32 each), body length (uint64), little endian
    lengths   of the buffers, uint64 each
    header    msgpack: see codec.py
    body      the raw bytes of the numpy arrays in the message, each padded to a multiple of 8 bytes so that all are aligned

The sizes are checked as soon as they have arrived and before anything is allocated. A small frame is cut out of a receive buffer
that holds many of them; a large one is received straight into where its arrays will lie.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence

import numpy as np

from asyncflow.transport.limits import FrameLimits

MAGIC = b"AFT2"
PREFIX = struct.Struct("<4sIIQ")
LARGE_BYTES = 64 << 10
"""Bodies from here on are received in place and may be handed over by reference."""
RECEIVE_BYTES = 256 << 10
ALIGNMENT = 8
_PADDING = bytes(ALIGNMENT)

Buffer = bytes | memoryview
Frame = tuple[Buffer, Sequence[np.ndarray]]
"""A header, and the buffers as uint8 [length] each."""


def encode_frame(header: bytes, arrays: Sequence[np.ndarray], limits: FrameLimits) -> list[Buffer]:
    """The pieces to send. C-contiguous `arrays` are not copied: they must not change until they have been sent.

    Raises:
        ValueError: it is above the limits, so the other side would hang up.
    """
    if not arrays:
        if len(header) > limits.header_bytes:
            raise ValueError(limits.excess(len(header), 0, 0))
        return [PREFIX.pack(MAGIC, len(header), 0, 0) + header]
    lengths = [a.nbytes for a in arrays]
    body_bytes = sum(n + -n % ALIGNMENT for n in lengths)
    if excess := limits.excess(len(header), len(lengths), body_bytes):
        raise ValueError(excess)
    prefix = PREFIX.pack(MAGIC, len(header), len(lengths), body_bytes)
    pieces: list[Buffer] = [prefix + struct.pack(f"<{len(lengths)}Q", *lengths) + header]
    for array, length in zip(arrays, lengths, strict=True):
        if length:
            pieces.append(array.data.cast("B"))
        if padding := -length % ALIGNMENT:
            pieces.append(_PADDING[:padding])
    return pieces


def new_buffer(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] of unspecified content."""
    return np.empty(num_bytes, np.uint8)


class _Assembly:
    """A large frame that is being received in place."""

    __slots__ = ("body", "filled", "header", "lengths", "num_bytes", "targets")

    def __init__(self, header_bytes: int, lengths: Sequence[int], body: np.ndarray) -> None:
        self.header, self.body, self.lengths = new_buffer(header_bytes).data, body, lengths
        self.num_bytes = header_bytes + len(body)
        self.targets = [view for view in (body.data, self.header) if view.nbytes]  # the last is filled first
        self.filled = 0

    def advance(self, num_bytes: int) -> bool:
        """Take note that so many bytes have been written to the last target. True: the frame is complete."""
        self.filled += num_bytes
        if self.filled == self.targets[-1].nbytes:
            self.targets.pop()
            self.filled = 0
        return not self.targets


class FrameParser:
    """Cuts frames out of a stream: write into `get_buffer()`, then tell `advance` how much.

    It never raises: `failure` says what was wrong with a stream, whose later bytes are then ignored. `is_blocked`: the next frame
    waits for `reserve`; call `unblock` once there is room, and neither of the other two before.
    """

    def __init__(
        self,
        limits: FrameLimits,
        allocate: Callable[[int], np.ndarray] = new_buffer,
        reserve: Callable[[int], bool] = lambda num_bytes: True,
        release: Callable[[int], None] = lambda num_bytes: None,
    ) -> None:
        """`allocate` makes the bodies of at least `LARGE_BYTES`: uint8 [n].

        `reserve` is asked before any frame that does not fit into the receive buffer is allocated (header and body, in bytes),
        and `release` told the same number when it is complete.
        """
        self.limits = limits
        self.failure = ""
        self.is_blocked = False
        self._allocate, self._reserve, self._release = allocate, reserve, release
        # Every frame of up to LARGE_BYTES fits, with its prefix and lengths, however it lies.
        self._received = new_buffer(max(RECEIVE_BYTES, PREFIX.size + 8 * limits.buffers + LARGE_BYTES))
        self._view = self._received.data
        self._end = 0
        self._lengths: tuple[int, ...] | None = None  # of the first frame, once they have arrived and add up
        self._assembly: _Assembly | None = None

    @property
    def is_midway(self) -> bool:
        """Whether a frame has begun and not ended."""
        return self._end > 0 or self._assembly is not None

    @property
    def is_assembling(self) -> bool:
        """Whether a large frame has begun, for which room has been reserved."""
        return self._assembly is not None

    @property
    def frame_bytes(self) -> int:
        """Size of the frame that is arriving, as far as it is known."""
        return self._end if self._assembly is None else self._assembly.num_bytes

    def get_buffer(self) -> memoryview:
        """Memory for the next bytes of the stream; never empty."""
        if self._assembly is not None:
            return self._assembly.targets[-1][self._assembly.filled :]
        return self._view[self._end :]

    def advance(self, num_bytes: int) -> list[Frame]:
        """`num_bytes` have been written to the beginning of `get_buffer()`. Returns the frames that they complete."""
        if self.failure:
            return []
        if self._assembly is None:
            self._end += num_bytes
            return self._cut()
        return [self._assembled(self._assembly)] if self._assembly.advance(num_bytes) else []

    def unblock(self) -> list[Frame]:
        """The room that was asked for has been reserved."""
        return self._cut(is_reserved=True)

    def close(self) -> None:
        """Release what a half frame has reserved, when the stream has ended."""
        if self._assembly is not None:
            self._release(self._assembly.num_bytes)
            self._assembly = None
        self.failure = self.failure or "the stream has ended"

    def _cut(self, is_reserved: bool = False) -> list[Frame]:
        frames: list[Frame] = []
        view, start, end = self._view, 0, self._end
        self.is_blocked = False
        while end - start >= PREFIX.size:
            magic, header_bytes, num_buffers, body_bytes = PREFIX.unpack_from(view, start)
            if magic != MAGIC:
                self.failure = f"a frame begins with {MAGIC!r}, not {magic!r}"
                break
            if excess := self.limits.excess(header_bytes, num_buffers, body_bytes):
                self.failure = excess
                break
            at = start + PREFIX.size + 8 * num_buffers
            if at > end:
                break
            if self._lengths is None and not self._read_lengths(start, num_buffers, body_bytes):
                break
            stop = at + header_bytes + body_bytes
            if stop <= end or header_bytes + body_bytes <= LARGE_BYTES:
                if stop > end:
                    break
                frames.append(self._small(at, at + header_bytes, stop))
                start = stop
            else:
                if not is_reserved and not self._reserve(header_bytes + body_bytes):
                    self.is_blocked = True
                    break
                self._begin(header_bytes, body_bytes, at, end)  # takes all that is there, and needs more
                start = end
            self._lengths = None
        if start > 0:
            view[: end - start] = view[start:end]
        self._end = end - start
        return frames

    def _read_lengths(self, start: int, num_buffers: int, body_bytes: int) -> bool:
        lengths = struct.unpack_from(f"<{num_buffers}Q", self._view, start + PREFIX.size) if num_buffers else ()
        if sum(n + -n % ALIGNMENT for n in lengths) != body_bytes:
            self.failure = "a frame whose buffer lengths do not add up"
            return False
        self._lengths = lengths
        return True

    def _small(self, header_at: int, body_at: int, stop: int) -> Frame:
        header = bytes(self._view[header_at:body_at])
        if not self._lengths:
            return header, ()
        size = stop - body_at
        body = self._allocate(size) if size >= LARGE_BYTES else new_buffer(size)
        body[:] = self._received[body_at:stop]
        return header, _split(body, self._lengths)

    def _begin(self, header_bytes: int, body_bytes: int, at: int, end: int) -> None:
        body = self._allocate(body_bytes) if body_bytes >= LARGE_BYTES else new_buffer(body_bytes)
        assembly = self._assembly = _Assembly(header_bytes, self._lengths or (), body)
        while at < end:
            part = min(end - at, assembly.targets[-1].nbytes)
            assembly.targets[-1][:part] = self._view[at : at + part]
            assembly.advance(part)
            at += part

    def _assembled(self, assembly: _Assembly) -> Frame:
        self._assembly = None
        self._release(assembly.num_bytes)
        return assembly.header, _split(assembly.body, assembly.lengths)


def _split(body: np.ndarray, lengths: Sequence[int]) -> list[np.ndarray]:
    if len(lengths) == 1:
        return [body[: lengths[0]]]
    parts, at = [], 0
    for length in lengths:
        parts.append(body[at : at + length])
        at += length + -length % ALIGNMENT
    return parts
