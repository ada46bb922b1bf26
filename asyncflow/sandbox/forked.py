"""One piece of work in a process of its own: a fork of the one in which the user's code was built, which ends with the work.

consumes: work, such as scoring a sample
waits for: the child's answer, at most `deadline_seconds`
is unblocked by: the answer, the child's end, too much of output, or the deadline

Whatever the work did, to modules, to globals, to a cache, is gone with the child. So are its temporary files, and processes that it
started: the child has a process group of its own, and a process that left it becomes a child of this one when its parent ends.
What the child prints is kept here, the end of it, as its last words.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import tempfile
import time
from collections.abc import Callable, Set
from typing import Final, Generic, TypeVar

import msgspec

from asyncflow.sandbox.child import end_with
from asyncflow.sandbox.frames import Failed, frame
from asyncflow.sandbox.limits import ProcessLimits, die_with_parent, end_children, limit_memory, limit_output

LAST_WORDS_BYTES: Final = 4096
MAX_ANSWER_BYTES: Final = 1 << 20
LOOK_AGAIN_SECONDS: Final = 0.02  # for the child's end, where the kernel does not tell of it

ReplyT = TypeVar("ReplyT", bound=msgspec.Struct)


def in_child(
    work: Callable[[], ReplyT | Failed],
    reply_type: type[ReplyT],
    limits: ProcessLimits,
    subject: str,
    not_for_child: tuple[int, ...] = (),
    spared: Set[int] = frozenset(),
) -> ReplyT | Failed:
    """Reply of `work`, called in a fork of this process, or why there is none.

    `subject`: what an error names. `not_for_child`: file descriptors that the child does not get.
    `spared`: children of this process that live on; all others are killed at the end. Raises `TimeoutError` if some cannot be."""
    answers, answer = os.pipe()
    words, word = os.pipe()
    own = os.getpid()
    with tempfile.TemporaryDirectory(prefix="asyncflow-sample-", ignore_cleanup_errors=True) as folder:
        child = os.fork()
        if child == 0:
            for descriptor in (answers, words, *not_for_child):
                os.close(descriptor)
            end_with(lambda: _work(work, limits, own, answer, word, folder))
        os.close(answer)
        os.close(word)
        with contextlib.suppress(PermissionError, ProcessLookupError):  # the child does it too: the first of both counts
            os.setpgid(child, child)
        watch = _ChildWatch(child, answers, words, reply_type, limits, subject)
        try:
            return watch.reply()
        finally:
            watch.end()
            end_children(spared)


def _work(work: Callable[[], msgspec.Struct], limits: ProcessLimits, parent: int, answer: int, word: int, folder: str) -> None:
    """Run `work` in the child, under its limits, and write the reply to the descriptor `answer`; prints go to `word`."""
    os.setpgid(0, 0)
    die_with_parent(parent)
    os.dup2(word, 1)
    os.dup2(word, 2)
    limit_memory(limits.memory_bytes)
    limit_output(limits.output_bytes)
    os.environ["TMPDIR"] = tempfile.tempdir = folder
    own = os.getpid()
    reply = frame(work())
    if os.getpid() == own:  # else it is a child that the work forked and that came back: the answer is not its to give
        while reply:
            reply = reply[os.write(answer, reply) :]


class _ChildWatch(Generic[ReplyT]):
    """The parent's view of a child."""

    def __init__(self, child: int, answers: int, words: int, reply_type: type[ReplyT], limits: ProcessLimits, subject: str) -> None:
        self._decoder: msgspec.msgpack.Decoder[ReplyT | Failed] = msgspec.msgpack.Decoder(reply_type | Failed)
        self._child, self._answers, self._words = child, answers, words
        self._limits, self._subject = limits, subject
        self._deadline = time.monotonic() + limits.deadline_seconds
        self._received, self._last_words, self._printed = bytearray(), bytearray(), 0
        self._ended = os.pidfd_open(child) if hasattr(os, "pidfd_open") else None
        os.set_blocking(answers, False)
        os.set_blocking(words, False)
        self._poll = select.poll()
        for descriptor in (answers, words, self._ended):
            if descriptor is not None:
                self._poll.register(descriptor, select.POLLIN)

    def reply(self) -> ReplyT | Failed:
        """The child's answer, or why there is none."""
        while True:
            has_ended = self._wait()
            self._read_words()
            is_whole = self._read_answer()
            if is_whole:
                with contextlib.suppress(msgspec.DecodeError):
                    return self._decoder.decode(memoryview(self._received)[4:])
            if is_whole or len(self._received) > MAX_ANSWER_BYTES:
                return self._failed("invalid", "sent what is no answer")
            if self._printed > self._limits.output_bytes:
                return self._failed("output", f"printed more than {self._limits.output_bytes} bytes and was killed")
            if has_ended:
                return self._death()
            if time.monotonic() >= self._deadline:
                seconds = f"{self._limits.deadline_seconds:g} s"
                return self._failed("timeout", f"gave no answer within {seconds} and was killed")

    def end(self) -> None:
        """Kill what is left of the child's group, and let the child go. Its id is not free before that."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self._child, signal.SIGKILL)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._child, signal.SIGKILL)
        os.waitpid(self._child, 0)
        for descriptor in (self._answers, self._words, self._ended):
            if descriptor is not None:
                os.close(descriptor)

    def _wait(self) -> bool:
        """Wait until there is something to read, the child has ended, or its time is over. Returns whether it has ended."""
        seconds = max(0.0, self._deadline - time.monotonic())
        self._poll.poll(1000 * (seconds if self._ended is not None else min(seconds, LOOK_AGAIN_SECONDS)))
        return os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def _read_answer(self) -> bool:
        """Whether there is a whole frame."""
        self._received += self._read(self._answers, MAX_ANSWER_BYTES)
        length = int.from_bytes(self._received[:4], "big")
        return len(self._received) >= 4 and 4 + min(length, MAX_ANSWER_BYTES) <= len(self._received)

    def _read_words(self) -> None:
        words = self._read(self._words, 1 << 16)
        self._printed += len(words)
        self._last_words = (self._last_words + words)[-LAST_WORDS_BYTES:]

    def _read(self, descriptor: int, most: int) -> bytes:
        try:
            found = os.read(descriptor, most)
        except BlockingIOError:
            return b""
        if not found:  # its end: nothing to be told of any more
            with contextlib.suppress(KeyError):
                self._poll.unregister(descriptor)
        return found

    def _death(self) -> Failed:
        how = os.waitid(os.P_PID, self._child, os.WEXITED | os.WNOWAIT)
        assert how is not None
        if how.si_code == os.CLD_EXITED:
            return self._failed("exited", f"exited with status {how.si_status}")
        # Nobody here has killed it yet, so a SIGKILL is the kernel's, and its reason is memory.
        kind = "memory" if how.si_status == signal.SIGKILL else "exited"
        return self._failed(kind, f"was killed by {signal.Signals(how.si_status).name}")

    def _failed(self, kind: str, what: str) -> Failed:
        self._read_words()
        words = self._last_words.decode(errors="replace").strip()
        return Failed(kind, f"{self._subject}: its process {what}" + (f"; its last words: {words}" if words else ""))
