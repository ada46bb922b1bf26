"""The cluster contract: start workers, learn of their end, stop them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from asyncflow.types import RunError

RESTART_SECONDS = (0.5, 30.0)
"""The pause before the first restart of a worker, and the longest one: it doubles each time."""

OWN_DEVICES = "ASYNCFLOW_OWN_DEVICES"
"""Set in the environment of a worker that sees no devices but those that it was given, which are then numbered from 0."""


def restart_pause(num_restarts: int) -> float:
    """Seconds before a worker that has been started again so often is started once more."""
    first, most = RESTART_SECONDS
    return min(most, first * 2**num_restarts)


def needs_all(name: str) -> bool:
    """Answer of a run that needs every worker: False."""
    return False


Settle = Callable[[], Awaitable[None]]


class BadEnd(NamedTuple):
    """How a stopped worker has ended that did not end well. `has_failed`: its own code has ended it; False: it was killed."""

    how: str
    has_failed: bool

    @classmethod
    def late(cls, grace_seconds: float) -> BadEnd:
        """End of one that was given so many seconds."""
        return cls(f"did not end within {grace_seconds:g} s and was killed", has_failed=False)


@dataclass(frozen=True, slots=True)
class WorkerSpec:
    """A worker to be started: `entry` is `module:function`, an async function of (name, run directory).

    One that dies is started again up to `max_restarts` times, after a pause. `needs`: devices by kind (`CPU`, `GPU`, `NPU`), for
    a cluster that counts them. `outlives_others`: they need it until they have ended; it never ends by itself.
    `apart`: what its environment has instead where the workers of its pool lie on several machines. `imports`: modules that it
    needs, which a cluster may have imported for several workers at once; none: it wants an interpreter of its own. `device`: what
    PyTorch must find where it is placed, `rollout.device=cuda`, a key of the configuration and a kind; empty: a CPU. `may_stay`:
    its process may work for one attempt of a run after another. `shares`: name of the worker on whose devices it computes; a
    cluster that counts devices gives it a part of those.
    """

    name: str
    entry: str
    environment: Mapping[str, str] = field(default_factory=dict)
    max_restarts: int = 0
    needs: Mapping[str, float] = field(default_factory=dict)
    outlives_others: bool = False
    apart: Mapping[str, str] = field(default_factory=dict)
    imports: tuple[str, ...] = ()
    device: str = ""
    may_stay: bool = False
    shares: str = ""


class WorkerDied(RunError):
    """A worker has ended before it was told to. `has_failed`: by an error of its own, which it might find again; otherwise it was
    killed, or its machine is gone."""

    def __init__(self, why: str, worker: str, *, has_failed: bool) -> None:
        super().__init__(why)
        self.worker, self.has_failed = worker, has_failed


class Cluster(Protocol):
    """Places and ends workers. It moves no samples and no weights."""

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        """Start them all. Called again for those that join later; the name of a worker that has ended may be another's then. Of
        those that were kept by `stop` the processes are taken, where they are alive."""
        ...

    async def wait(self, on_death: Callable[[str, str, bool], None], continues_without: Callable[[str], bool] = needs_all) -> None:
        """Return when every worker has ended well, those that join meanwhile included, but for those that outlive the others.
        `on_death(name, why, is_final)` is told of one that died, and is started again or has been often enough.

        One that has found a mistake of the user's would find it again. If it is one that may be started again, and the run
        `continues_without(name)` it, it is not started again.

        Raises `WorkerDied` with the name and last words of one that was never to be started again, `UserError` with those of any
        other that has found a mistake of the user's.
        """
        ...

    async def end(self, name: str, grace_seconds: float) -> bool:
        """Wait so long for a worker that has been told to leave, then kill it. False: it was killed.

        However it ends from now on is no death: nobody is told, it is not started again, and the others go on.
        """
        ...

    async def stop(self, grace_seconds: float, settle: Settle | None = None, keep: Collection[str] = ()) -> dict[str, BadEnd]:
        """Wait so long for the workers to end, then kill. Returns, by their names, how those ended that were running and did not
        end well.

        `keep`: names of workers whose processes stay, for the next start of workers of these names; only where the cluster has
        such (`WorkerSpec.may_stay`).

        Those that outlive the others are ended after them, at once, when `settle` has returned: others that need them are done
        then.
        """
        ...

    def pids(self) -> dict[str, int]:
        """Process ids by worker name, of those that still run in processes of their own."""
        ...
