"""The process that scores: builds one scorer, then answers one sample after another until its stdin ends.

consumes: frames on stdin, first a `Setup`, then `Sample`s; answers each with one frame on the stdout it was started with
waits for: the next frame (without end: an idle worker is no fault; the parent holds the deadline of each sample)
is unblocked by: the parent's next frame, or the end of stdin when the parent closes or dies

A frame is a 4-byte big-endian length and a msgpack message. Imports are few: a killed worker's successor must start quickly.
"""

from __future__ import annotations

import functools
import importlib
import math
import numbers
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import msgspec

from asyncflow.rewards.base import Sample
from asyncflow.user_file import import_file

MAX_TEXT = 2000  # characters of a scorer's own words that an answer carries
MAX_FRAME_BYTES = 1 << 28
_PR_SET_PDEATHSIG = 1


class Setup(msgspec.Struct, frozen=True, tag=True):
    """What to build. `memory_bytes`: the address space that scoring may add to what the built scorer already has."""

    scorer: str
    options: dict[str, Any]
    memory_bytes: int


class Ready(msgspec.Struct, frozen=True, tag=True):
    """The scorer is built."""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """The scorer cannot be imported or built; `message` follows "the scorer ..."."""

    message: str


class Scored(msgspec.Struct, frozen=True, tag=True):
    """`reward` is finite."""

    reward: float


class Failed(msgspec.Struct, frozen=True, tag=True):
    """No reward: `kind` is one of raised, memory, invalid."""

    kind: str
    message: str


Reply = Ready | Broken | Scored | Failed
Message = TypeVar("Message", Setup, Sample)


class NoScorer(Exception):
    """Why there is no scorer to be had from a path and its options."""


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes over a pipe. Raises `ValueError` if it is too large for one frame."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes does not fit a frame of {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(4, "big") + payload


def build_scorer(path: str, options: dict[str, Any]) -> Callable[[Sample], Any]:
    """The scorer at `package.module:Name` or `/path/file.py:Name`: a class built with the options, or a function bound to them."""
    place, _, name = path.rpartition(":")
    try:
        module = import_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
    except Exception as error:  # a user's file may raise anything; it is told to the user by the parent
        raise NoScorer(f"cannot be imported: {_words(error)}") from error
    target = getattr(module, name, None)
    if target is None:
        raise NoScorer(f"cannot be imported: {place} has no {name!r}")
    if not isinstance(target, type):
        scorer = functools.partial(target, **options) if callable(target) else target
    else:
        try:
            scorer = target(**options)
        except Exception as error:  # as above
            raise NoScorer(f"cannot be built with the options {options!r:.200}: {_words(error)}") from error
    if not callable(scorer):
        raise NoScorer("cannot be called: it must be a function, or a class with __call__(self, sample)")
    return scorer


def answer(scorer: Callable[[Sample], Any], sample: Sample, path: str) -> Scored | Failed:
    """Call the scorer; whatever it does short of ending the process becomes an answer."""
    try:
        value = scorer(sample)
    except MemoryError:
        value = MemoryError  # the traceback holds what ate the memory: leave this block before saying anything
    except Exception as error:  # the contract: any exception fails the sample, and the sample's owner is told
        return Failed("raised", f"scorer {path} raised {_words(error)}")
    if value is MemoryError:
        return Failed("memory", f"scorer {path} ran out of memory")
    return _checked(value, path)


def _checked(value: Any, path: str) -> Scored | Failed:
    try:
        reward = float(value) if isinstance(value, numbers.Real) else math.nan
    except OverflowError:
        reward = math.inf
    if math.isfinite(reward):
        return Scored(reward)
    shown = f"{value!r:.60}" if isinstance(value, float | str | None) else f"a {type(value).__name__}"
    return Failed("invalid", f"scorer {path} returned {shown}, which is no finite number")


def _words(error: Exception) -> str:
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not hide the error itself
        text = "(its text cannot be shown)"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {text[:MAX_TEXT]}{place}".encode(errors="replace").decode()


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies, also in the middle of C code. Elsewhere the guard does it alone."""
    if sys.platform != "linux":
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before the call
        os._exit(0)


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The parent's two pipes, moved out of the scorer's reach: its prints go to stderr and its `input()` finds nothing."""
    requests, replies = os.dup(0), os.dup(1)  # not inheritable by what the scorer runs
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


def limit_memory(memory_bytes: int) -> None:
    """Let this process add at most `memory_bytes` of address space to what it has now. Linux only: others do not enforce it."""
    if sys.platform != "linux":
        return
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + memory_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


def _receive(requests: BinaryIO, decoder: msgspec.msgpack.Decoder[Message]) -> Message | None:
    """The next message, None at the end of the pipe."""
    head = requests.read(4)
    return decoder.decode(requests.read(int.from_bytes(head, "big"))) if len(head) == 4 else None


def main() -> None:
    """`python -m asyncflow.rewards.worker PARENT_PID`."""
    die_with_parent(int(sys.argv[1]))
    requests, replies = private_pipes()

    def send(reply: Reply) -> None:
        replies.write(frame(reply))
        replies.flush()

    setup = _receive(requests, msgspec.msgpack.Decoder(Setup))
    if setup is None:
        return
    try:
        scorer = build_scorer(setup.scorer, setup.options)
    except NoScorer as reason:
        return send(Broken(str(reason)))
    limit_memory(setup.memory_bytes)
    send(Ready())
    own_pid = os.getpid()
    samples = msgspec.msgpack.Decoder(Sample)
    while (sample := _receive(requests, samples)) is not None:
        reply = answer(scorer, sample, setup.scorer)
        if os.getpid() != own_pid:  # a child that the scorer forked and that came back: the answer is not its to give
            os._exit(0)
        send(reply)


if __name__ == "__main__":
    main()
