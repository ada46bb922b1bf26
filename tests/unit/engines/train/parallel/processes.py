"""Processes that stand for devices: started once, each a rank, which run a test module's functions together.

    ranks = Processes(4)                         # a module's fixture; torch and transformers are imported once for all of them
    ranks.run(function, *arguments, size=2)      # function(*arguments) on the first two; [what rank 0 returned, what rank 1 did]

A function is one of a module's own; arguments and results can be pickled. It finds the environment of a worker: RANK, WORLD_SIZE
and a new store for `init_process_group`, whose loopback is set. What it raises, `run` raises; a rank that says nothing in time, or
that dies, is a failure with its number, and the next call has new processes: one failure is not that of every test after it.
"""

from __future__ import annotations

import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from asyncflow.engines.base import RANKS_STORE
from tests.forked import context
from tests.patience import patience


class RankFailed(AssertionError):
    """What a rank said at last."""


class Processes:
    """Ranks 0 .. n-1. One that starts processes itself is no daemon: it ends when it is closed."""

    def __init__(self, number: int, *, daemon: bool = True) -> None:
        self._number, self._daemon = number, daemon
        self._folder = tempfile.TemporaryDirectory()
        self._number_of_stores = 0
        self._start()

    def run(self, function: Callable[..., Any], *arguments: Any, size: int | None = None, seconds: float = 100.0) -> list[Any]:
        """Call the function on the first `size` ranks, by default all; its results by rank. Raises `RankFailed`."""
        return [self._checked(*answer) for answer in self.answers(function, *arguments, size=size, seconds=seconds)]

    def answers(
        self, function: Callable[..., Any], *arguments: Any, size: int | None = None, seconds: float = 100.0
    ) -> list[tuple[bool, Any]]:
        """As `run`, but for each rank whether it returned, and what: its result, or the name, text and traceback of an error."""
        if self._are_lost:
            self._end()
            self._start()
        ends = self._ends[:size]
        self._number_of_stores += 1
        for rank, end in enumerate(ends):
            environment = {
                "RANK": rank,
                "LOCAL_RANK": rank,
                "WORLD_SIZE": len(ends),
                "LOCAL_WORLD_SIZE": len(ends),
                RANKS_STORE: f"file://{self._folder.name}/{self._number_of_stores}",
            }
            end.send(({name: str(value) for name, value in environment.items()}, function, arguments))
        deadline = time.monotonic() + patience(seconds)
        answers = []
        for rank, end in enumerate(ends):
            try:
                if not end.poll(max(0.0, deadline - time.monotonic())):
                    self._are_lost = True  # its answer may still come, and would be taken for the next call's
                    answers.append((False, ("silence", f"rank {rank} has said nothing for {seconds} s", "")))
                else:
                    answers.append(end.recv())
            except (EOFError, ConnectionError):
                self._are_lost = True
                answers.append((False, ("death", f"rank {rank} has died", "")))
        return answers

    def close(self) -> None:
        """End the processes: with SIGTERM, for their coverage, and with SIGKILL if they wait for others."""
        self._end()
        self._folder.cleanup()

    def _start(self) -> None:
        makes = context()
        self._ends: list[Connection] = []
        self.processes = []
        self._are_lost = False
        for rank in range(self._number):
            here, there = makes.Pipe()
            process = makes.Process(target=_serve, args=(there,), name=f"rank {rank}", daemon=self._daemon)
            process.start()
            there.close()
            self._ends.append(here)
            self.processes.append(process)

    def _end(self) -> None:
        for process in self.processes:
            process.terminate()
        deadline = time.monotonic() + patience(5.0)
        for process in self.processes:
            process.join(max(0.0, deadline - time.monotonic()))
            process.kill()
            process.join()

    @staticmethod
    def _checked(has_returned: bool, answer: Any) -> Any:
        if not has_returned:
            raise RankFailed("\n".join(answer))
        return answer


def end_itself() -> None:
    """As a machine does that loses its power."""
    os.kill(os.getpid(), signal.SIGKILL)


def _serve(end: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    while True:
        try:
            environment, function, arguments = end.recv()
        except EOFError:
            return
        os.environ.update(environment)
        try:
            answer = True, function(*arguments)
        except BaseException as error:
            answer = False, (type(error).__name__, str(error), traceback.format_exc())
        end.send(answer)
