"""An arena: large arrays in memory whose pages have been touched before, and that another process may read.

    Arena  --allocate-->  uint8 array  --the last view of it goes-->  its range is free, its pages are kept for the next one

A page that has never been touched costs several times a copy into it, since the kernel must find and clear it. So freed ranges keep
their pages, up to `keep_bytes`; what is above goes back to the system.

A file-backed arena (in /dev/shm) can be read by a process of the same user that is told an `ArenaPlace`: it copies the bytes, and
then looks whether the range's generation is still what it was. A generation is random, and cleared before its range is used again.
So bytes that changed under the reader are noticed. Loads and stores stay in order on x86-64; elsewhere the time that the
interpreter takes from one to the other stands in for a barrier.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import secrets
import stat
import threading
import weakref
from collections import deque
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np

from asyncflow.types import RunError

_PAGE = mmap.PAGESIZE
_HEADER_BYTES = 64  # keeps the arrays aligned to cache lines; the first word is the generation
_MAP_NORESERVE, _MADV_POPULATE_WRITE = 0x4000, 23  # of Linux; the mmap module does not name them


class ArenaPlace(msgspec.Struct, array_like=True, frozen=True):
    """Place of an array in an arena's file, in bytes, and the generation that the word at `header` must have."""

    offset: int
    num_bytes: int
    header: int
    generation: int


class Arena:
    """Buffers out of one large sparse mapping, freed when nothing refers to them. May be used from any thread."""

    def __init__(self, capacity_bytes: int, path: Path | None = None, *, keep_bytes: int = 18 << 20) -> None:
        """Anonymous without a `path`; else a new file there (mode 0600), which `close` removes.

        The capacity is address space: memory is taken as it is used. `keep_bytes` of freed memory are kept.
        """
        self.path = None if path is None else path.absolute()  # clients are told it
        self.capacity_bytes = capacity_bytes + -capacity_bytes % _PAGE
        self.keep_bytes = keep_bytes
        self._fd = -1
        self._pid = os.getpid()
        if path is None:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
            self._map = mmap.mmap(-1, self.capacity_bytes, flags)
            with contextlib.suppress(OSError):  # a kernel without huge pages
                self._map.madvise(mmap.MADV_HUGEPAGE)
        else:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            os.ftruncate(self._fd, self.capacity_bytes)
            self._map = mmap.mmap(self._fd, self.capacity_bytes)
        self._words = np.frombuffer(self._map, np.uint64)
        self._address = self._words.__array_interface__["data"][0]
        self._lock = threading.Lock()
        self._returned: deque[tuple[int, int]] = deque()  # ranges whose arrays have gone, not yet free
        self._free = _Ranges()
        self._free.add(0, self.capacity_bytes)
        self._kept = _Ranges()  # the free ranges whose pages are still there
        self._used: dict[int, int] = {}  # start -> end
        self._used_starts: list[int] = []

    @property
    def used_bytes(self) -> int:
        """Bytes in ranges that an array lives in, whole pages."""
        self._settle()
        return sum(end - start for start, end in self._used.items())

    @property
    def kept_bytes(self) -> int:
        """Bytes in free ranges whose pages have been kept."""
        self._settle()
        return self._kept.num_bytes

    def allocate(self, num_bytes: int) -> np.ndarray:
        """uint8 [num_bytes] of unspecified content, aligned to 64 bytes.

        Where neither the arena nor the machine has room for it, it is an ordinary array.
        """
        header = _HEADER_BYTES if self.path is not None else 0
        size = num_bytes + header
        size += -size % _PAGE
        if os.getpid() != self._pid:
            return np.empty(num_bytes, np.uint8)
        with self._lock:
            self._drain()
            start = self._take(size) if num_bytes else None
        if start is None:
            self._settle()
            return np.empty(num_bytes, np.uint8)
        if header:
            self._words[start // 8] = secrets.randbits(64) | 1
        # The base of this array is no array, so numpy makes it, and nothing behind it, the base of every view.
        array = np.frombuffer(self._map, np.uint8, num_bytes, start + header)
        finalizer = weakref.finalize(array, self._finalize, start, start + size)
        finalizer.atexit = False  # the mapping goes with the process
        self._settle()
        return array

    def locate(self, array: np.ndarray) -> ArenaPlace | None:
        """Place of a C-contiguous array in the arena's file; None if it is not in it."""
        if self.path is None or not array.flags.c_contiguous:
            return None
        offset = array.__array_interface__["data"][0] - self._address
        if not 0 <= offset < self.capacity_bytes:
            return None
        with self._lock:
            i = bisect.bisect_right(self._used_starts, offset) - 1
            start = self._used_starts[i] if i >= 0 else -1
            is_inside = i >= 0 and offset + array.nbytes <= self._used[start]
        return ArenaPlace(offset, array.nbytes, start, int(self._words[start // 8])) if is_inside else None

    def close(self) -> None:
        """Remove the file. Arrays that are still referred to stay valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            if self.path is not None:
                self.path.unlink(missing_ok=True)

    def _finalize(self, start: int, end: int) -> None:
        # The garbage collector may run this in any thread and at any time, also inside a method that holds the lock. A forked
        # child has the arrays but not the arena, whose file is its parent's.
        if os.getpid() == self._pid:
            self._returned.append((start, end))
            self._settle()

    def _settle(self) -> None:
        while self._returned and self._lock.acquire(blocking=False):
            try:
                self._drain()
            finally:
                self._lock.release()

    def _drain(self) -> None:
        while self._returned:
            start, end = self._returned.popleft()
            if self.path is not None:
                self._words[start // 8] = 0
            del self._used[start]
            del self._used_starts[bisect.bisect_left(self._used_starts, start)]
            self._free.add(start, end)
            self._kept.add(start, end)
            while (excess := self._kept.num_bytes - self.keep_bytes) > 0:
                first, last = self._kept.oldest()
                last = min(last, first + excess + -excess % _PAGE)
                self._kept.remove(first, last)
                self._map.madvise(mmap.MADV_DONTNEED if self.path is None else mmap.MADV_REMOVE, first, last - first)

    def _take(self, size: int) -> int | None:
        """A free range; None where there is no room."""
        start = self._kept.best_fit(size)
        if start is None:
            start = self._free.best_fit(size)
            if start is None or (self.path is not None and not self._is_backed(start, size)):
                return None
        self._kept.remove(start, start + size)
        self._free.remove(start, start + size)
        self._used[start] = start + size
        bisect.insort(self._used_starts, start)
        return start

    def _is_backed(self, start: int, size: int) -> bool:
        # A store into a mapped page that the file system has no room for would kill the process; this is an error instead.
        if self._fd < 0:
            return False
        try:
            os.posix_fallocate(self._fd, start, size)
        except OSError:
            return False
        with contextlib.suppress(OSError):  # all pages in one call, half the price of one by one; older kernels do without
            self._map.madvise(_MADV_POPULATE_WRITE, start, size)
        return True


class _Ranges:
    """A set of [start, end) ranges, neighbours merged, the oldest first."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._ends: dict[int, int] = {}
        self._starts: dict[int, int] = {}

    def oldest(self) -> tuple[int, int]:
        return next(iter(self._ends.items()))

    def add(self, start: int, end: int) -> None:
        self.num_bytes += end - start
        if start in self._starts:  # a range that ends here
            before = self._starts.pop(start)
            del self._ends[before]
            start = before
        if end in self._ends:
            after = self._ends.pop(end)
            del self._starts[after]
            end = after
        self._ends[start], self._starts[end] = end, start

    def remove(self, start: int, end: int) -> None:
        """Remove what of [start, end) is in the set."""
        overlaps = [(s, e) for s, e in self._ends.items() if s < end and start < e]
        for s, e in overlaps:
            del self._ends[s], self._starts[e]
            self.num_bytes -= e - s
            if s < start:
                self.add(s, start)
            if end < e:
                self.add(end, e)

    def best_fit(self, size: int) -> int | None:
        """Start of the smallest range of at least that size, the lowest of equals. Linear: merged ranges are few."""
        fits = [(e - s, s) for s, e in self._ends.items() if e - s >= size]
        return min(fits)[1] if fits else None


class ArenaReader:
    """Another process's arena file, mapped read-only."""

    def __init__(self, path: Path) -> None:
        """Raises `RunError` if the file cannot be read or is not this user's."""
        try:
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError as error:
            raise RunError(f"the arena {path} of the other side cannot be read: {error.strerror}") from error
        try:
            status = os.fstat(fd)
            if status.st_uid != os.getuid() or not stat.S_ISREG(status.st_mode) or not status.st_size:
                raise RunError(f"the arena {path} is not a file of this user")
            self._bytes = np.frombuffer(mmap.mmap(fd, 0, access=mmap.ACCESS_READ), np.uint8)
        finally:
            os.close(fd)

    def copy(self, place: ArenaPlace, allocate: Callable[[int], np.ndarray]) -> np.ndarray:
        """uint8 [num_bytes], a copy in a buffer that `allocate` makes.

        Raises:
            LookupError: the range has been freed meanwhile.
            ValueError: there is no such place.
        """
        end, size = place.offset + place.num_bytes, len(self._bytes)
        if place.offset < 0 or place.num_bytes < 0 or end > size or not 0 <= place.header <= size - 8 or place.header % 8:
            raise ValueError(f"no such place in the arena: {place}")
        array = allocate(place.num_bytes)
        array[:] = self._bytes[place.offset : end]
        generation = self._bytes[place.header : place.header + 8].view(np.uint64)
        if int(generation[0]) != place.generation:
            raise LookupError("the rows were dropped while they were being read")
        return array


_received_lock = threading.Lock()
_received: Arena | None = None


def receive_buffer(num_bytes: int) -> np.ndarray:
    """uint8 [num_bytes] for what this process receives, from an arena that its clients share."""
    global _received
    with _received_lock:
        if _received is None:
            _received = Arena(2 << 30)
    return _received.allocate(num_bytes)
