"""The process's own end: its pipes, the next question, and an error's traceback. Imports are few: it must start quickly."""

from __future__ import annotations

import os
import traceback
from typing import BinaryIO, TypeVar

import msgspec

from asyncflow.sandbox.frames import TOKEN_BYTES
from asyncflow.user_file import is_of_user, traces_of

MAX_TRACE = 8000  # characters of a traceback that an answer carries
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


def trace_of(error: BaseException) -> str:
    """The traceback of an error, from the user's own file on, if it went through one; the end of it, if it is long."""
    traces = [*traces_of(error)]
    first = next((trace for trace in traces if is_of_user(trace)), traces[0] if traces else None)
    try:
        lines = traceback.format_exception(type(error), error, first)
    except Exception:  # as above
        lines = traceback.format_tb(first)
    return "".join(lines)[-MAX_TRACE:].encode(errors="replace").decode()
