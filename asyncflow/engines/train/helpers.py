"""Helpers of a trainer, or a critic: threads that compute beside the compute thread, on cores, or devices, that nobody else uses.

consumes: passes of the round that is computed; pieces of a pass that somebody computes, and of the update (pieces.py)
waits for: these, and the leave to compute (`allow`)
is unblocked by: the compute thread, with a round or a piece; the driver, when cores or devices are free (run/services/cores.py)

    passes of a round --+--> compute thread: the engine's own sums --------+
                        +--> helper: sums of its own, same weights --------+--> one sum, before the update
    pieces of a pass ------> helper without a pass: the sums of that pass

A thread that is free takes the next pass; one that finds none takes pieces of the passes that are left. A helper looks at its
leave before each one: a core is given back within a pass. With exact sums no bit depends on which took what: each helper computes
with as many threads as the engine itself, a pass leaves no trace of its company, exact sums leave none of their order, and a
piece is the same product wherever it is computed. A helper on another device (passes.py) takes passes alone; one of a rank of
several (parallel/many_ranks.py) pieces alone.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor

from asyncflow.engines.train.pieces import Pieces, SharedCall
from asyncflow.threads import end_at_exit

P = TypeVar("P")
T = TypeVar("T")

MOST_WAITING: Final = 4
"""Pieces that wait, for each thread that takes them: enough that it does not run out of them, and few to hold in memory."""
LEAST_WORK: Final = 1 << 24
"""Multiplications in a part of rows, at least: some tenths of a millisecond, in which a thread that waits wakes up."""
ROWS: Final = 16
"""Rows of which a part has a multiple, so that it begins where the processor's vectors do."""
LATE_SECONDS: Final = 0.1
"""Seconds without parts of rows after one that came too late: the machine has other work, and puts threads aside."""
_PAUSE_SECONDS: Final = 0.02
"""Seconds without a piece after which a helper reports those that it has computed."""


class Helpers(Generic[P]):
    """Threads, one for each of `passes`, by which it computes whole ones. Each computes with `num_threads`. `on_pass` is told of
    what a helper has computed, in the helper's thread: start and end in seconds of CLOCK_MONOTONIC, of a pass, or of pieces as if
    they had followed one another. What it raises is raised by `compute`: the one under way, or else the next."""

    def __init__(self, passes: Sequence[P], num_threads: int) -> None:
        self.passes = passes
        self.on_pass: Callable[[float, float], None] = lambda start, end: None
        self._changed = threading.Condition()
        self._allowed: frozenset[int] = frozenset()
        self._is_closed = False
        self._left: list[int] = []  # numbers of the passes that nobody has taken, the next one last
        self._taken: set[int] = set()  # helpers that compute a pass
        self._waiting: deque[tuple[_SharedPieces, Callable[[], object]]] = deque()
        self._is_waiting = False  # whether the compute thread has no pass left
        self._work: Callable[[P, int], None] = lambda passes, number: None
        self._error: BaseException | None = None
        self.late_until = 0.0
        """Time until which rows are not cut (CLOCK_MONOTONIC), after a part of some has come too late."""
        for number, own in enumerate(passes):
            arguments = (number, own, num_threads)
            thread = threading.Thread(target=self._serve, args=arguments, name=f"train-helper-{number}", daemon=True)
            end_at_exit(thread, self.close)
            thread.start()

    @property
    def allowed(self) -> int:
        """Number of helpers that may compute now."""
        return len(self._allowed)

    def allow(self, numbers: Iterable[int]) -> None:
        """Let these helpers compute from now on, counted from 0. Called from any thread."""
        with self._changed:
            self._allowed = frozenset(numbers).intersection(range(len(self.passes)))
            self._changed.notify_all()

    def compute(self, count: int, by: Callable[[P, int], T], own: P) -> list[T]:
        """Compute `by` for passes 0 to `count` - 1, here with `own` and in the helpers with theirs. Returns the results in order.

        Raises the first error, when nobody computes any more.
        """
        results: dict[int, T] = {}

        def work(passes: P, number: int) -> None:
            results[number] = by(passes, number)

        with self._changed:
            self._work, self._left = work, [*reversed(range(1, count))]
            self._changed.notify_all()
        number = 0 if count else None
        try:
            while number is not None:
                work(own, number)
                number = self._next()
        finally:
            with self._changed:
                self._left.clear()
                self._is_waiting = True
            self._take_pieces_until(lambda: not self._taken)
            with self._changed:
                self._is_waiting = False
                error, self._error = self._error, None
        if error is not None:
            raise error
        return [results[number] for number in range(count)]

    def pieces(self, *, cuts_rows: bool = True) -> Pieces:
        """Pieces of one thread, some of which helpers take, or the compute thread while it waits for them. `cuts_rows`: also parts
        of a product's rows, which may still read a weight when nobody waits for them any more."""
        return _SharedPieces(self, cuts_rows)

    def close(self) -> None:
        """End the threads."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _next(self) -> int | None:
        with self._changed:
            return self._left.pop() if self._left and self._error is None else None

    def _takers(self) -> int:
        """Number of threads that have nothing but pieces to compute."""
        return 0 if self._left else self._is_waiting + len(self._allowed - self._taken)

    def _offer(self, of: _SharedPieces, piece: Callable[[], object]) -> bool:
        """Leave a piece to others, if one of them takes it soon."""
        with self._changed:
            if len(self._waiting) >= MOST_WAITING * self._takers():
                return False
            of.num_left += 1
            self._waiting.append((of, piece))
            self._changed.notify_all()
            return True

    def _take_pieces_until(self, is_over: Callable[[], bool]) -> None:
        """Compute pieces, of whomever, until it is over."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or is_over())
                if is_over():
                    return
                of, piece = self._waiting.popleft()
            self._compute_piece(of, piece)

    def _compute_piece(self, of: _SharedPieces, piece: Callable[[], object]) -> None:
        error: BaseException | None = None
        try:
            with torch.no_grad():
                piece()
        except BaseException as caught:  # raised in the thread that has added it
            error = caught
        with self._changed:
            of.num_left -= 1
            of.error = of.error or error
            self._changed.notify_all()

    def _serve(self, number: int, own: P, num_threads: int) -> None:
        torch.set_num_threads(num_threads)  # counts for the thread that sets it
        began = seconds = 0.0  # of the pieces that it has not reported, which are all of `last`
        last: _SharedPieces | None = None

        def has_work() -> bool:
            return self._is_closed or bool(number in self._allowed and (self._left or self._waiting))

        while True:
            with self._changed:
                has_paused = not self._changed.wait_for(has_work, _PAUSE_SECONDS if seconds else None)
                if self._is_closed:
                    return
                taken, of = None, None
                if self._left and not has_paused:
                    taken, work = self._left.pop(), self._work
                    self._taken.add(number)
                elif not has_paused:
                    of, piece = self._waiting.popleft()
            if seconds and of is not last:
                self._report(began, began + seconds)
                seconds = 0.0
            start = time.monotonic()
            if taken is not None:
                self._compute_pass(number, own, work, taken)
                self._report(start, time.monotonic())  # before `compute` may return, so that it is among its step's
                with self._changed:
                    self._taken.discard(number)
                    self._changed.notify_all()
                del work
            elif of is not None:
                self._compute_piece(of, piece)
                began, last = began if seconds else start, of
                seconds += time.monotonic() - start
                del piece

    def _compute_pass(self, number: int, own: P, work: Callable[[P, int], None], taken: int) -> None:
        try:
            work(own, taken)
        except BaseException as error:
            self._fail(error)

    def _report(self, start: float, end: float) -> None:
        try:
            self.on_pass(start, end)
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        """End the round that is under way, or the next one, with an error, which is raised in the compute thread."""
        with self._changed:
            self._error = self._error or error
            self._left.clear()


class _SharedPieces(Pieces):
    """Pieces of a thread, which leaves them to others where there are some that have nothing else to do."""

    def __init__(self, helpers: Helpers[Any], cuts_rows: bool = False) -> None:
        self._helpers, self._cuts_rows = helpers, cuts_rows
        self.num_left = 0
        self.error: BaseException | None = None

    def cut(self, items: Sequence[T]) -> Iterable[list[T]]:
        return ([item] for item in items)

    def parts(self, num_rows: int, work: int) -> list[slice]:
        count = min(num_rows // ROWS, work // LEAST_WORK) if self._cuts_rows else 1
        if count > 1:
            with self._helpers._changed:
                count = min(count, 1 + self._helpers._takers()) if time.monotonic() > self._helpers.late_until else 1
        if count < 2:
            return [slice(0, num_rows)]
        each = -(-num_rows // (count * ROWS)) * ROWS  # the last part, which somebody else has to begin with first, is the smallest
        return [slice(first, end) for first, end in pairwise([*range(0, num_rows - ROWS + 1, each), num_rows])]

    def share(self, call: Callable[[], Tensor]) -> SharedCall:
        return _HelperCall(self._helpers, call)

    def add(self, piece: Callable[[], object]) -> None:
        if not self._helpers._offer(self, piece):
            piece()

    def end(self) -> None:
        self._helpers._take_pieces_until(lambda: not self.num_left)
        error, self.error = self.error, None
        if error is not None:
            raise error


class _HelperCall(SharedCall):
    """Call that a thread leaves to others, and that an idle one makes if it comes to it in time."""

    def __init__(self, helpers: Helpers[Any], call: Callable[[], Tensor]) -> None:
        self._helpers, self._is_begun = helpers, False
        self._call: Callable[[], Tensor] | None = call  # None: nobody makes it any more
        self._result: Tensor | None = None
        helpers._offer(_SharedPieces(helpers), self._make)

    def take(self, seconds: float) -> Tensor | None:
        with self._helpers._changed:
            if self._is_begun:
                self._helpers._changed.wait_for(lambda: self._result is not None, seconds)
                if self._result is None:
                    self._helpers.late_until = time.monotonic() + LATE_SECONDS
            self._call = None  # with the rows that it reads: it may stand among the pieces that wait for long
            return self._result

    def _make(self) -> None:
        with self._helpers._changed:
            if (call := self._call) is None:
                return
            self._is_begun = True
            self._helpers._changed.notify_all()
        self._result = call()
