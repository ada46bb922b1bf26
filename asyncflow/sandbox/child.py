"""The process's own end: its pipes, the next question, and an error's traceback. Imports are few: it must start quickly."""

from __future__ import annotations

import contextlib
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn, TypeVar

import msgspec

from asyncflow.errors import UserError
from asyncflow.sandbox.frames import BEGUN, TOKEN_BYTES, frame
from asyncflow.user_file import CannotImport, is_of_user, traces_of, words_of

MAX_TRACE = 8000  # characters of a traceback that an answer carries
MessageT = TypeVar("MessageT")


class OwnerPipes:
    """The owner's two pipes, out of reach of the code that runs here: its prints go to stderr and its `input()` finds nothing."""

    def __init__(self) -> None:
        requests, replies = os.dup(0), os.dup(1)  # not inheritable by what that code runs
        nothing = os.open(os.devnull, os.O_RDONLY)
        os.dup2(nothing, 0)
        os.close(nothing)
        os.dup2(2, 1)
        self._requests, self._replies = os.fdopen(requests, "rb"), os.fdopen(replies, "wb")
        self.descriptors = requests, replies
        self._replies.write(BEGUN)
        self._replies.flush()

    def receive(self, decoder: msgspec.msgpack.Decoder[MessageT]) -> tuple[bytes, MessageT] | None:
        """The next message and its token, None at the end of the pipe."""
        head = self._requests.read(TOKEN_BYTES + 4)
        if len(head) < TOKEN_BYTES + 4:
            return None
        return head[:TOKEN_BYTES], decoder.decode(self._requests.read(int.from_bytes(head[TOKEN_BYTES:], "big")))

    def send(self, token: bytes, reply: msgspec.Struct) -> None:
        """Answer the question of this token."""
        self._replies.write(token + frame(reply))
        self._replies.flush()


def why_not_built(error: BaseException, options: Mapping[str, Any]) -> str:
    """Reason why an object of the user's is not there, from what importing its code or building it has raised."""
    if isinstance(error, CannotImport):
        return f"cannot be imported: {error}"
    if isinstance(error, UserError):
        return f"cannot be built: {str(error).removeprefix('it: ')}"
    return f"cannot be built with the options {dict(options)!r:.200}: {words_of(error)}"


def end_with(work: Callable[[], None]) -> NoReturn:
    """Do the fork's work, then end the process: its parent alone runs the code after the fork. Status 1 where the work raises."""
    status = 1
    try:
        work()
        status = 0
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except BaseException as error:
        with contextlib.suppress(BaseException):
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
    finally:
        with contextlib.suppress(BaseException):
            sys.stderr.flush()
        os._exit(status & 0xFF)


def trace_of(error: BaseException) -> str:
    """The traceback of an error, from the user's own file on, if it went through one; the end of it, if it is long."""
    traces = [*traces_of(error)]
    first = next((trace for trace in traces if is_of_user(trace)), traces[0] if traces else None)
    try:
        lines = traceback.format_exception(type(error), error, first)
    except Exception:  # as above
        lines = traceback.format_tb(first)
    return "".join(lines)[-MAX_TRACE:].encode(errors="replace").decode()
