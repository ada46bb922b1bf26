"""The process's own end: its pipes, the next question, and the words of an error. Imports are few: it must start quickly."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator
from types import TracebackType
from typing import BinaryIO, TypeVar

import msgspec

from asyncflow.sandbox.frames import TOKEN_BYTES

MAX_TEXT = 2000  # characters of the user's own words that an answer carries
MAX_TRACE = 8000  # and of a traceback
Message = TypeVar("Message")


def private_pipes() -> tuple[BinaryIO, BinaryIO]:
    """The owner's two pipes, out of reach of the code that runs here: its prints go to stderr and its `input()` finds nothing."""
    requests, replies = os.dup(0), os.dup(1)  # not inheritable by what that code runs
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    os.dup2(2, 1)
    return os.fdopen(requests, "rb"), os.fdopen(replies, "wb")


def receive(requests: BinaryIO, decoder: msgspec.msgpack.Decoder[Message]) -> tuple[bytes, Message] | None:
    """The next message and its token, None at the end of the pipe."""
    head = requests.read(TOKEN_BYTES + 4)
    if len(head) < TOKEN_BYTES + 4:
        return None
    return head[:TOKEN_BYTES], decoder.decode(requests.read(int.from_bytes(head[TOKEN_BYTES:], "big")))


def words_of(error: BaseException, file: str = "") -> str:
    """An error's type, text and place, of one line's length. The place is the last one in the user's `file`, if it went through
    that, or else where it was raised."""
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not hide the error itself
        text = "(its text cannot be shown)"
    places = [(trace.tb_frame.f_code.co_filename, trace.tb_lineno) for trace in _traces(error)]
    of_user = [place for place in places if file and os.path.realpath(place[0]) == os.path.realpath(file)]
    where = " ({}:{})".format(*(of_user or places)[-1]) if places else ""
    return f"{type(error).__name__}: {text[:MAX_TEXT]}{where}".encode(errors="replace").decode()


def trace_of(error: BaseException, file: str = "") -> str:
    """The traceback of an error, from the user's `file` on, if it went through that; the end of it, if it is long."""
    traces = [*_traces(error)]
    paths = [os.path.realpath(trace.tb_frame.f_code.co_filename) for trace in traces]
    first = paths.index(os.path.realpath(file)) if file and os.path.realpath(file) in paths else 0
    try:
        lines = traceback.format_exception(type(error), error, traces[first] if traces else None)
    except Exception:  # as above
        lines = traceback.format_tb(traces[first] if traces else None)
    return "".join(lines)[-MAX_TRACE:].encode(errors="replace").decode()


def _traces(error: BaseException) -> Iterator[TracebackType]:
    trace = error.__traceback__
    while trace is not None:
        yield trace
        trace = trace.tb_next
