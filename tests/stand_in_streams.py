"""Streams and events of the stand-in device (tests/stand_in.py): what may be relied on, and what may not be yet.

The numbers of the stand-in are computed at once. What is late on an accelerator is made late here, or is refused:

* bytes that a copy with `non_blocking=True` brings to the host are NaN (or -1) there, until something has waited for the
  copy: an event that was recorded behind it, its stream, or the device;
* an operation that reads what another stream has written, or writes what another stream reads or writes, is refused, unless its
  stream has waited for that one (`wait_stream`, `wait_event`), or the host has, before it began the operation;
* pinned memory that the host changes while it is copied to the device is found when that copy is waited for.

Every operation has a number in its stream. What comes before what is known as in a vector clock (Lamport, Commun. ACM 21(7), 1978;
Mattern 1989): a stream knows up to which number its next operation comes after each other stream; the host, which numbers are done.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

Clock = dict[int, int]
"""By stream, the number of an operation: it, and all before it."""


class RaceError(RuntimeError):
    """Two operations whose order nothing has made sure of, one of which writes."""


@dataclass
class _Accesses:
    """The newest accesses to a piece of memory on the device: by stream, the operation's number and name."""

    written: dict[int, tuple[int, str]] = field(default_factory=dict)
    read: dict[int, tuple[int, str]] = field(default_factory=dict)


@dataclass
class _Late:
    """Work that is told of, or done, when somebody has waited for it. `spoil`: what it may have done by any moment before."""

    stream: int
    number: int
    finish: Callable[[], None]
    spoil: Callable[[], object]


class Work:
    """Work on the device: its order, and what of it is done as far as the host knows."""

    def __init__(self) -> None:
        self.waited: Counter[str] = Counter()
        self._lock = threading.RLock()
        self._done: Clock = {}
        self._memory: dict[int, _Accesses] = {}
        self._late: list[_Late] = []
        self._pinned: set[int] = set()

    def access(self, operation: Any, read: Iterable[Tensor], written: Iterable[Tensor], new: Iterable[Tensor] = ()) -> int:
        """An operation on the current stream, which touches the memory of these tensors. Returns its number. Raises `RaceError`."""
        with self._lock:
            stream, name = current_stream(), str(operation)
            stream.number += 1
            for tensor in new:
                self._memory[_place(tensor)] = _Accesses()
            for tensor in read:
                accesses = self._of(tensor)
                self._check(stream, name, "reads", accesses.written, "writes")
                accesses.read[stream.name] = stream.number, name
            for tensor in (*written, *new):
                accesses = self._of(tensor)
                self._check(stream, name, "writes", accesses.written, "writes")
                self._check(stream, name, "writes", accesses.read, "reads")
                accesses.written[stream.name] = stream.number, name
            return stream.number

    def later(self, finish: Callable[[], None], spoil: Callable[[], object] = lambda: None) -> None:
        """`finish` is called when somebody has waited for the current stream's newest operation, and `spoil` before that, again
        and again."""
        with self._lock:
            stream = current_stream()
            self._late.append(_Late(stream.name, stream.number, finish, spoil))
            spoil()

    def pin(self, tensor: Tensor) -> Tensor:
        """A tensor of the host, whose memory is pinned from now on."""
        with self._lock:
            self._pinned.add(_place(tensor))
        return tensor

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor of the host lies in pinned memory."""
        return _place(tensor) in self._pinned

    def finish(self, clock: Clock) -> None:
        """The host has waited for all of this."""
        with self._lock:
            self._done = joined(self._done, clock)
            over = [each for each in self._late if each.number <= self._done.get(each.stream, 0)]
            self._late = [each for each in self._late if each not in over]
            for each in over:
                each.finish()
            for each in self._late:
                each.spoil()

    def finish_all(self) -> None:
        """The host has waited for the device."""
        with self._lock:
            self.finish({stream.name: stream.number for stream in _STREAMS})

    def _of(self, tensor: Tensor) -> _Accesses:
        return self._memory.setdefault(_place(tensor), _Accesses())

    def _check(self, stream: Stream, name: str, does: str, others: dict[int, tuple[int, str]], did: str) -> None:
        for other, (number, operation) in others.items():
            if other != stream.name and number > max(self._done.get(other, 0), stream.after.get(other, 0)):
                raise RaceError(
                    f"{name} on stream {stream.name} {does} what {operation} on stream {other} {did}, and has not waited for it"
                )


class Stream:
    """In place of `torch.Stream`: operations in their order."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.name, self.number = next(_names), 0
        self.after: Clock = {}
        self._outer: list[Stream] = []
        _STREAMS.append(self)

    @property
    def clock(self) -> Clock:
        """All that is done when this stream's newest operation is."""
        return joined(self.after, {self.name: self.number})

    def wait_stream(self, other: Stream) -> None:
        self.after = joined(self.after, other.clock)

    def wait_event(self, event: Event) -> None:
        self.after = joined(self.after, event.clock)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        WORK.waited["stream"] += 1
        WORK.finish(self.clock)

    def __enter__(self) -> Stream:
        self._outer.append(current_stream())
        _here.stream = self
        return self

    def __exit__(self, *error: Any) -> None:
        _here.stream = self._outer.pop()


class Event:
    """In place of `torch.Event`: a place in a stream."""

    def __init__(self, device: Any = None, **options: Any) -> None:
        self.clock: Clock = {}

    def record(self, stream: Stream | None = None) -> None:
        self.clock = (stream or current_stream()).clock

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def synchronize(self) -> None:
        WORK.waited["event"] += 1
        WORK.finish(self.clock)


def joined(*clocks: Clock) -> Clock:
    """What comes after all of these."""
    return {name: max(clock.get(name, 0) for clock in clocks) for name in set().union(*clocks)}


def current_stream(device: Any = None) -> Stream:
    """The stream that this thread's operations go to: the same one for all threads, unless told."""
    return getattr(_here, "stream", _DEFAULT)


def synchronize(device: Any = None) -> None:
    """In place of `torch.accelerator.synchronize`."""
    WORK.waited["device"] += 1
    WORK.finish_all()


def copy_to_host(operation: Any, target: Tensor, numbers: Tensor) -> None:
    """A copy of numbers on the device that nobody has waited for."""
    WORK.access(operation, [numbers], [])

    def arrive() -> None:
        target.copy_(numbers)

    WORK.later(arrive, partial(target.fill_, math.nan if target.is_floating_point() else -1))


def copy_from_host(source: Tensor, operation: Any) -> None:
    """A copy to the device has begun that nobody has waited for, from pinned memory."""
    before = _bytes(source).clone()

    def check() -> None:
        if not torch.equal(before, _bytes(source)):
            raise RaceError(f"pinned memory of shape {tuple(source.shape)} was changed on the host while {operation} copied it")

    if WORK.is_pinned(source):  # else it is copied once more before the call returns
        WORK.later(check)


def install() -> None:
    """Have PyTorch give these where it is asked for streams, events and pinned memory."""
    empty = torch.empty

    def maybe_pinned(*size: Any, pin_memory: bool = False, **options: Any) -> Tensor:
        made = empty(*size, **options)
        return WORK.pin(made) if pin_memory else made

    torch.Stream, torch.Event, torch.empty = Stream, Event, maybe_pinned  # type: ignore[misc,assignment]
    torch.accelerator.current_stream, torch.accelerator.synchronize = current_stream, synchronize  # type: ignore[assignment]


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


_names = itertools.count()
_here = threading.local()
_STREAMS: Final[list[Stream]] = []
WORK: Final = Work()
_DEFAULT: Final = Stream()
