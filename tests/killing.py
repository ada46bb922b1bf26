"""A process that ends in the middle of a change on the disk, as by `kill -9` or when the power fails."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any


def killed_at(changes: Sequence[tuple[Any, str]], number: int, is_before: bool) -> None:
    """From now on this process ends at the call of this number, counted from 0, of any of `changes` (owner, name): before it is
    made, or right after."""
    count = 0

    def wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            is_it = count == number + 1
            if is_it and is_before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = original(*args, **options)
            if is_it:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return call

    for owner, name in changes:
        setattr(owner, name, wrapped(getattr(owner, name)))


def in_a_process(work: Callable[[], None]) -> int:
    """Do something in a process of its own. Returns how that ended: a status as of `os.waitpid`."""
    pid = os.fork()
    if not pid:
        work()
        os._exit(0)
    return os.waitpid(pid, 0)[1]
