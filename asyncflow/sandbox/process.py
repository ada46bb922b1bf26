"""The owner's end of a process that can be killed.

consumes: questions, each with a deadline
waits for: the answer
is unblocked by: the answer, the process's end, or the deadline

A process is ended by SIGKILL, with everything in its session; what it started outside of that is its own to end (`forked.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from typing import Any, cast

import msgspec
import psutil

from asyncflow.sandbox import guard
from asyncflow.sandbox.frames import BEGUN, MAX_FRAME_BYTES, TOKEN_BYTES
from asyncflow.types import RunError
from asyncflow.waits import PROCESS, waiting

LAST_WORDS_BYTES = 4096
DRAIN_SECONDS = 0.2  # for the pipes of a process that has ended: somebody outside its group may hold them open
NUM_LOOKS = 60  # at a process that may be stopped, in the seconds that it has for an answer
KILL_SECONDS = 5.0  # SIGKILL to the end of the process; longer only if the kernel is stuck


class ProcessEnded(Exception):
    """The process ended before it answered."""


class SandboxProcess(asyncio.SubprocessProtocol):
    """The owner's end of one process. Several questions may be under way; an answer finds its question by the token."""

    def __init__(self, replies: Any, what: str) -> None:
        """`replies`: the union of the answers' types. `what` the process is called in messages."""
        loop = asyncio.get_running_loop()
        self.ended: asyncio.Future[int] = loop.create_future()  # the exit status, minus the signal's number if one ended it
        self._decoder, self._what = msgspec.msgpack.Decoder(replies), what
        self._asked: dict[bytes, asyncio.Future[Any]] = {}  # by token
        self._received = bytearray()
        self._last_words = bytearray()
        self._open_pipes = {1, 2}
        self.is_alive = True
        self.has_begun = False  # with the user's code, which has no part in an end before that
        self.is_garbled = False  # sent what is no answer
        self.is_replaced = False  # by its owner, which has another in its place

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """See asyncio's `SubprocessProtocol.connection_made`."""
        self._process = cast(asyncio.SubprocessTransport, transport)
        self._stdin = cast(asyncio.WriteTransport, self._process.get_pipe_transport(0))
        self.pid = self._process.get_pid()

    @property
    def last_words(self) -> str:
        """Text that the process printed since it was last asked, at most 4 KiB, ready to be appended to a message."""
        text = self._last_words.decode(errors="replace").strip()
        return f"; its last words: {text}" if text else ""

    @property
    def last_line(self) -> str:
        """The end of the last words, for a message of one sentence."""
        lines = self._last_words.decode(errors="replace").strip().splitlines()
        return f"; its last words: {lines[-1]:.300}" if lines else ""

    @property
    def end(self) -> str:
        """End of the process, in words."""
        status = self.ended.result()
        return f"was killed by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    @property
    def kind_of_end(self) -> str:
        """`memory` or `exited`. Nobody here kills a process that may still answer, so a SIGKILL is the kernel's, and its reason is
        memory."""
        return "memory" if self.ended.result() == -signal.SIGKILL and not self.is_garbled else "exited"

    @property
    def is_stopped(self) -> bool:
        """Whether something keeps it from running (SIGSTOP)."""
        with contextlib.suppress(psutil.Error):
            return psutil.Process(self.pid).status() == psutil.STATUS_STOPPED
        return False

    async def ask(self, question: bytes, seconds: float, *, counts_stops: bool = True) -> Any:
        """Send a frame and wait for the answer. Raises `TimeoutError`, or `ProcessEnded` if the process ends first. Without
        `counts_stops` the seconds in which it is stopped do not count, up to as many."""
        loop = asyncio.get_running_loop()
        if not self.is_alive:
            await asyncio.shield(self.ended)
            raise ProcessEnded
        if not self._asked:
            self._last_words.clear()
        reply, token = loop.create_future(), os.urandom(TOKEN_BYTES)
        self._asked[token] = reply
        self._stdin.write(token + question)
        # A timer, not asyncio.timeout: an answer that came in time counts even where this loop was too busy to look.
        timer = loop.call_later(seconds if counts_stops else 2 * seconds, _settle, reply, TimeoutError())
        if not counts_stops:
            self._look(reply, seconds / NUM_LOOKS, NUM_LOOKS)
        try:
            with waiting(PROCESS, seconds=seconds, process=self._what, pid=self.pid):
                return await reply
        finally:
            timer.cancel()
            del self._asked[token]

    def _look(self, reply: asyncio.Future[Any], every: float, left: int) -> None:
        """Settle the reply when the process has not been stopped in so many looks, one `every` so many seconds."""
        if not left:
            _settle(reply, TimeoutError())
        elif not reply.done():
            left -= 0 if self.is_stopped else 1
            asyncio.get_running_loop().call_later(every, self._look, reply, every, left)

    async def kill(self) -> None:
        """SIGKILL the process group and wait for the end. Raises `RunError` if the kernel does not deliver."""
        if self.is_alive:  # an id that is free again may name a stranger
            self._kill_all()
        try:
            async with asyncio.timeout(KILL_SECONDS):
                await asyncio.shield(self.ended)
        except TimeoutError as error:
            raise RunError(f"{self._what} {self.pid} is still there {KILL_SECONDS:g} s after SIGKILL") from error

    def pipe_data_received(self, fd: int, data: bytes) -> None:
        """See asyncio's `SubprocessProtocol.pipe_data_received`."""
        if fd == 2:
            self._last_words += data
            del self._last_words[:-LAST_WORDS_BYTES]
            return
        self._received += data
        head = TOKEN_BYTES + 4
        while len(self._received) >= head:
            end = head + min(int.from_bytes(self._received[TOKEN_BYTES:head], "big"), MAX_FRAME_BYTES)
            if len(self._received) < end:
                return
            token = bytes(self._received[:TOKEN_BYTES])
            if self._received[:head] == BEGUN:
                self.has_begun = True
                del self._received[:head]
                continue
            try:
                reply = self._decoder.decode(self._received[head:end])
            except msgspec.DecodeError:  # only code that wrote into pipes it was not given can bring this about
                self.is_garbled = True
                self._kill_all()
                return
            del self._received[:end]
            if token in self._asked:  # else the answer of a question before, which had given itself one
                _settle(self._asked[token], reply)

    def pipe_connection_lost(self, fd: int, exc: Exception | None) -> None:
        """See asyncio's `SubprocessProtocol.pipe_connection_lost`."""
        self._open_pipes.discard(fd)
        if not self.is_alive and not self._open_pipes:
            self._finish()

    def process_exited(self) -> None:
        """See asyncio's `SubprocessProtocol.process_exited`."""
        self.is_alive = False
        self._kill_all()  # what was started there and left behind
        if self._open_pipes:
            asyncio.get_running_loop().call_later(DRAIN_SECONDS, self._finish)
        else:
            self._finish()

    def _finish(self) -> None:
        if self.ended.done():
            return
        status = self._process.get_returncode()
        assert status is not None, "the event loop reported an end without a status"
        self.ended.set_result(status)
        self._process.close()
        for reply in self._asked.values():
            _settle(reply, ProcessEnded())

    def _kill_all(self) -> None:
        # The process leads its own session, so its id names that, also after its own end while others are left in it.
        guard.kill_sessions({self.pid})


def _settle(reply: asyncio.Future[Any], outcome: Any) -> None:
    if reply.done():
        return
    if isinstance(outcome, Exception):
        reply.set_exception(outcome)
    else:
        reply.set_result(outcome)
