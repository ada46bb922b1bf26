"""Messages between the owner of a process and the process: a 4-byte big-endian length and a msgpack message.

Before each goes a token: a question's is drawn at random, and its answer has the same. Code that gets hold of the pipe can so
answer the questions that it was asked, but no other. `BEGUN` comes first.
"""

from __future__ import annotations

import msgspec

MAX_FRAME_BYTES = 1 << 28
TOKEN_BYTES = 8
BEGUN = bytes(TOKEN_BYTES + 4)
"""An empty message of a process that has all of AsyncFlow's own code that it needs, and nothing of the user's yet."""


class Broken(msgspec.Struct, frozen=True, tag=True):
    """Something of the user's cannot be imported or built; `message` follows its name."""

    name: str
    message: str


class Failed(msgspec.Struct, frozen=True, tag=True):
    """Failure in the place of an answer. `kind` is one of raised, timeout, exited, memory, output, invalid; `trace`: the
    traceback of what was raised."""

    kind: str
    message: str
    trace: str = ""


def frame(message: msgspec.Struct) -> bytes:
    """The message as it goes over a pipe. Raises `ValueError` if it is too large for one frame."""
    payload = msgspec.msgpack.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        raise ValueError(f"a message of {len(payload)} bytes does not fit a frame of {MAX_FRAME_BYTES}")
    return len(payload).to_bytes(4, "big") + payload
