"""The process's own end: its pipes, the next question, and the words of an error. Imports are few: it must start quickly."""

from __future__ import annotations

import os
from typing import BinaryIO, TypeVar

import msgspec

from asyncflow.sandbox.frames import TOKEN_BYTES

MAX_TEXT = 2000  # characters of the user's own words that an answer carries
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


def words_of(error: BaseException) -> str:
    """An error's type, text and place, of one line's length."""
    try:
        text = str(error)
    except Exception:  # a broken __str__ must not hide the error itself
        text = "(its text cannot be shown)"
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({trace.tb_frame.f_code.co_filename}:{trace.tb_lineno})" if trace is not None else ""
    return f"{type(error).__name__}: {text[:MAX_TEXT]}{place}".encode(errors="replace").decode()
