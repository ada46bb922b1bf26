"""Helpers of a trainer: threads that take passes beside the compute thread, on cores that nobody else uses.

consumes: passes of the round that is computed
waits for: such passes, and the leave to compute (`allow`)
is unblocked by: the compute thread, with the next round; the driver, when cores become free (run/cores.py)

    passes of a round --+--> compute thread: the engine's own sums --------+
                        +--> helper: sums of its own, same weights --------+--> one sum, before the update

Whoever is free takes the next pass, and a helper looks at its leave before each one: a core is given back within a pass. With exact
sums no bit depends on who took what: each helper computes with as many threads as the engine itself, a pass leaves no trace of its
company, and exact sums leave none of their order.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

import torch

from asyncflow.engines.train.passes import Passes
from asyncflow.threads import end_at_exit

T = TypeVar("T")


class Helpers:
    """Threads, one for each of `passes`; each computes with `num_threads`. `on_pass` is told of each pass that a helper has
    computed, in the helper's thread: start and end in seconds of CLOCK_MONOTONIC."""

    def __init__(self, passes: Sequence[Passes], num_threads: int) -> None:
        self.passes = passes
        self._num_threads = num_threads
        self.on_pass: Callable[[float, float], None] = lambda start, end: None
        self._turn = threading.Condition()
        self._allowed = 0
        self._is_closed = False
        self._left: list[int] = []  # numbers of the passes that nobody has taken, the next one last
        self._taken = 0  # passes that helpers compute
        self._work: Callable[[Passes, int], None] = lambda passes, number: None
        self._error: BaseException | None = None
        for number, own in enumerate(passes):
            arguments = (number, own, num_threads)
            thread = threading.Thread(target=self._serve, args=arguments, name=f"train-helper-{number}", daemon=True)
            end_at_exit(thread, self.close)
            thread.start()

    @property
    def allowed(self) -> int:
        """Number of helpers that may take a pass now."""
        return self._allowed

    def allow(self, count: int) -> None:
        """Let so many helpers take passes from now on. Called from any thread."""
        with self._turn:
            self._allowed = min(count, len(self.passes))
            self._turn.notify_all()

    def compute(self, count: int, by: Callable[[Passes, int], T], own: Passes) -> list[T]:
        """Compute `by` for passes 0 to `count` - 1, here with `own` and in the helpers with theirs. Returns the results in order.

        Raises the first error, when nobody computes any more.
        """
        results: dict[int, T] = {}

        def work(passes: Passes, number: int) -> None:
            results[number] = by(passes, number)

        with self._turn:
            self._work, self._left, self._error = work, [*reversed(range(1, count))], None
            self._turn.notify_all()
        number = 0 if count else None
        try:
            while number is not None:
                work(own, number)
                number = self._next()
        finally:
            with self._turn:
                self._left.clear()
                self._turn.wait_for(lambda: not self._taken)
        if self._error is not None:
            raise self._error
        return [results[number] for number in range(count)]

    @contextmanager
    def sharing(self) -> Iterator[None]:
        """Context in which the calling thread computes with the cores of the allowed helpers, too: they compute nothing then.

        For what has the same bits with any number of threads, such as an update: elementwise operations, and exact sums.
        """
        torch.set_num_threads(self._num_threads * (1 + self._allowed))
        try:
            yield
        finally:
            torch.set_num_threads(self._num_threads)

    def close(self) -> None:
        """End the threads."""
        with self._turn:
            self._is_closed = True
            self._turn.notify_all()

    def _next(self) -> int | None:
        with self._turn:
            return self._left.pop() if self._left and self._error is None else None

    def _serve(self, number: int, own: Passes, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # counts for the thread that sets it
        while True:
            with self._turn:
                self._turn.wait_for(lambda: self._is_closed or (self._left and number < self._allowed))
                if self._is_closed:
                    return
                work, taken = self._work, self._left.pop()
                self._taken += 1
            error: BaseException | None = None
            began = time.monotonic()
            try:
                work(own, taken)
            except BaseException as caught:  # raised in the compute thread
                error = caught
            self.on_pass(began, time.monotonic())
            with self._turn:
                self._taken -= 1
                if error is not None and self._error is None:
                    self._error = error
                    self._left.clear()
                self._turn.notify_all()
            del work, error
