"""Policy versions: which are published, and which worker serves which.

A version is a step count: version v is what v committed steps have made. Version 0 is the model that the run started from: every
worker has it from the same files. A resumed run from version `first` begins when the trainer has published that
version, and those before it that are still needed. The last `max_staleness` + 1 versions are kept, so that rows that are due under
an older one can be made again when their worker has died: one of those that are past it is called back.

A worker may join at any time, with what is needed then, and be asked to leave: it is granted nothing more, and nobody counts on it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import chain

import msgspec

from asyncflow import waits
from asyncflow.attestation import FIRST_PROBES, NO_PROBING, PROBE_EVERY, Attestation, Probing, fault_of, fault_of_probe
from asyncflow.control.schedule import Progress, Schedule
from asyncflow.control.signal import Signal
from asyncflow.control.worker_pool import WorkerPool
from asyncflow.transport import client_name, remote
from asyncflow.weight_sync.base import Manifest


class Target(msgspec.Struct, frozen=True):
    """The version that a worker is to serve. `manifest` is None for version 0, the worker's own files. `place`, from 0, among the
    `num_workers` of the run: by both a step's prompts are shared."""

    version: int
    manifest: Manifest | None
    place: int = 0
    num_workers: int = 1


class PolicyVersions:
    """Version line of a model. Implements `Fleet`. `is_silent(worker)`: nothing was heard of it for so long that its rows are
    given to others."""

    def __init__(
        self,
        schedule: Schedule,
        progress: Progress,
        signal: Signal,
        clock: Callable[[], float],
        workers: WorkerPool,
        *,
        first: int = 0,
        probing: Probing = NO_PROBING,
    ) -> None:
        self.workers = workers
        self.published = -1 if first else 0
        self._serving: dict[str, int] = {}
        self._installing: dict[str, int] = {}
        self.stale: dict[str, str] = {}  # workers whose weights could not be brought up to date, and why
        self.stale_since: dict[str, float] = {}  # by `PolicyVersions`'s clock
        self.step_seconds: float | None = None
        self.install_seconds: float | None = None
        self.attested: dict[str, float] = {}  # share of the last version given that a worker's engine has shown to have
        self.called_for = -1
        self.has_been_served = False  # by any worker, even if it has gone
        self.is_stopping = False
        self.is_silent: Callable[[str], bool] = lambda worker: False
        self.on_published: Callable[[Manifest], None] = lambda manifest: None
        self.kept_elsewhere: Callable[[], Sequence[Manifest]] = tuple  # for workers of other `PolicyVersions`
        self.on_installed: Callable[[int], None] = lambda version: None
        self.on_stale: Callable[[str, str], None] = lambda worker, why: None
        self.on_unattested: Callable[[str], None] = lambda worker: None
        self._schedule, self._progress, self._signal, self._clock, self._first = schedule, progress, signal, clock, first
        self._kept: dict[int, Manifest] = {}
        self._targets: dict[str, Manifest] = {}  # of a worker's last target: it may not be kept any more when that is installed
        self._published_at: float | None = None
        self._granted_at: dict[str, float] = {}
        self.probing = probing
        self._probes_left: dict[str, int] = {}  # installs of a worker that are to be probed yet; not there: `FIRST_PROBES`
        self._probed: tuple[int, list[int]] = (0, [])  # what was answered last, by `probe_ids`

    # -- the trainer's ------------------------------------------------------------------------------------------------------

    @remote
    async def probe_ids(self, version: int) -> list[int]:
        """Token ids of the probe that the trainer is to compute with a version that it will publish; none: nobody compares it.

        Compared are the first versions that a worker's process installs, and all where its engine cannot sum up all its weights.
        Each of the trainer's ranks that asks is answered the same.
        """
        if version != self._probed[0]:
            is_wanted = version % PROBE_EVERY == 0 or any(
                self._probes_left.get(worker, FIRST_PROBES) for worker in self.workers.working
            )
            self._probed = version, self.probing.token_ids if is_wanted else []
        return self._probed[1]

    @remote
    async def retained(self) -> list[int]:
        """Versions that are to stay beside the last ones: asked where weights are kept, before any are written over (see
        `WeightSender.retain`)."""
        return sorted(manifest.version for manifest in self.kept_elsewhere())

    @remote
    async def publish(self, manifest: Manifest) -> None:
        """Take note of a version that the trainer has published. Versions only rise; anything else is a `ValueError`."""
        if manifest.version <= self.published:
            raise ValueError(f"version {manifest.version} was published after version {self.published}")
        self.published, self._kept[manifest.version] = manifest.version, manifest
        for version in [v for v in self._kept if v < manifest.version - self._schedule.max_staleness]:
            del self._kept[version]
        if manifest.version >= self._first:
            now = self._clock()
            if self._published_at is not None:
                self.step_seconds = now - self._published_at
            self._published_at = now
        self.on_published(manifest)
        self._signal.notify()

    # -- a rollout worker's -------------------------------------------------------------------------------------------------

    @remote
    async def join(self) -> Target | None:
        """The version that a worker starts with: the newest one, unless rows are left that only an older one may generate.

        None: the run is stopping, or the worker is to leave.
        """
        worker = client_name.get()
        await self._signal.until(lambda: self._is_over_for(worker) or self._has_weights(), waits.JOINING)
        if self._is_over_for(worker):
            return None
        behind = self._behind()
        # Of those that begin, one with the older version is enough.
        version = self.published if behind is None or behind in self.installing.values() else behind
        self._installing[worker] = version
        self._signal.notify()
        return self._as_target(worker, version)

    @remote
    async def next_target(self, serving: int) -> Target | None:
        """Wait until the calling worker is to serve another version than this one, and say which. None: the run is stopping, or
        the worker is to leave: it ends what it has, unless `stopped` is told first.

        It may be fetched at once; `may_install` says when it is to be installed. One that was stale for another version's sake is
        told that what it serves is what it is to serve.
        """
        worker = client_name.get()

        def has_target() -> bool:
            return self._has_weights() and (self._target(serving) != serving or worker in self.stale)

        await self._signal.until(lambda: self._is_over_for(worker) or has_target(), waits.TARGET, serving=serving)
        return None if self._is_over_for(worker) else self._as_target(worker, self._target(serving))

    @remote
    async def may_install(self, version: int, serving: int) -> bool:
        """Wait until the calling worker may install its target. False: it has another target by now, or none at all."""
        worker = client_name.get()

        def is_over() -> bool:
            return self._is_over_for(worker) or self._target(serving) != version

        def is_granted() -> bool:
            return version <= serving or self._schedule.may_install(version, self._progress, self)

        await self._signal.until(lambda: is_over() or is_granted(), waits.INSTALL_LEAVE, version=version)
        if is_over():
            return False
        self._grant(worker, version)
        return True

    @remote
    async def installed(self, version: int, attested: Attestation | None = None) -> str:
        """Let the calling worker serve this version from now on, unless what its engine has `attested` is not the version's.

        Returns what is wrong then: the worker is stale, and takes no prompts. "": it serves.
        """
        worker = client_name.get()
        target = self._targets.get(worker)
        promised = target if target is not None and target.version == version else self._kept.get(version)
        fault = self._fault(worker, promised, attested) if promised is not None else ""
        if version:
            shown = 0.0 if fault or promised is None or attested is None else attested.share_seen(promised.sums)
            self.attested[worker] = shown
        else:
            self.attested.pop(worker, None)
        if fault:
            self._refuse(worker, fault)
            return fault
        if version and promised is not None and promised.sums and (attested is None or attested.tells_nothing):
            self.on_unattested(worker)
        self._serving[worker], self.has_been_served = version, True
        self.stale.pop(worker, None)
        self.stale_since.pop(worker, None)
        self._installing.pop(worker, None)
        if (granted_at := self._granted_at.pop(worker, None)) is not None:  # else it has just begun, which takes longer
            self.install_seconds = self._clock() - granted_at
        self.on_installed(version)
        self._signal.notify()
        return ""

    def _fault(self, worker: str, promised: Manifest, attested: Attestation | None) -> str:
        """Description of what a worker generates with, if that is not what was promised, as far as its engine can tell."""
        given = attested or Attestation(None)
        if promised.probe is not None:
            left = self._probes_left.get(worker, FIRST_PROBES) - 1
            self._probes_left[worker] = 0 if given.log_probs is None else max(left, not given.is_whole)
        fault = fault_of(given, promised.version, promised.sums, promised.base) if promised.sums else ""
        if not fault and promised.probe is not None:
            fault = fault_of_probe(given, promised.version, promised.probe, self.probing.tolerance)
        return fault

    @remote
    async def failed(self, why: str) -> None:
        """The calling worker could not get the weights that it is to serve: it takes no prompts until it has."""
        self._refuse(client_name.get(), why)

    def _refuse(self, worker: str, why: str) -> None:
        self._granted_at.pop(worker, None)
        self._installing.pop(worker, None)
        self.stale[worker] = why
        self.stale_since.setdefault(worker, self._clock())
        self.on_stale(worker, why)
        self._signal.notify()

    @remote
    async def stopped(self) -> None:
        """Wait until the run is stopping."""
        await self._signal.until(lambda: self.is_stopping, waits.RUN_ENDS)

    # -- the driver's -------------------------------------------------------------------------------------------------------

    def resize(self, size: int) -> tuple[list[str], list[str]]:
        """Have so many workers, see `WorkerPool.resize`. Those that are to leave are told so."""
        coming, going = self.workers.resize(size)
        self._signal.notify()
        return coming, going

    def never_came(self, workers: Sequence[str]) -> None:
        """Remove workers that were to join and could not be started, so that nothing waits for them."""
        self.workers.never_came(workers)
        self._signal.notify()

    def left(self, worker: str) -> None:
        """Forget a worker that was to leave and has left."""
        self.workers.left(worker)
        self.forget(worker)

    def admit(self) -> str:
        """Have one more worker, which the run has not started. Returns its name."""
        return self.workers.admit()

    def dismiss(self, guest: str) -> None:
        """Forget such a worker, which has gone."""
        self.workers.dismiss(guest)
        self.forget(guest)

    def died(self, worker: str, is_final: bool) -> None:
        """Take note of a worker's death. `is_final`: it is not started again."""
        if is_final:
            self.workers.failed.add(worker)
        self.forget(worker)

    def forget(self, worker: str) -> None:
        """Forget a worker that has gone: nothing is waited for or kept on its behalf."""
        states = (self._serving, self._installing, self._targets, self.stale, self.stale_since, self._granted_at, self.attested)
        for state in (*states, self._probes_left):
            state.pop(worker, None)
        self._signal.notify()

    def call_for(self, version: int) -> None:
        """See `Fleet.called_for`."""
        self.called_for = max(self.called_for, version)
        self._signal.notify()

    async def all_serve(self, version: int) -> None:
        """Wait until every worker of the run serves this version, or a later one; those that are not started again do not count."""

        def is_served() -> bool:
            late = (w for w in self.workers.working if self._serving.get(w, -1) < version or w in self.stale)
            return self.published >= version and not any(late)

        await self._signal.until(is_served, waits.ALL_SERVE, version=version)

    async def has_published(self, version: int) -> None:
        """Wait until this version, or a later one, is published."""
        await self._signal.until(lambda: self.published >= version, waits.PUBLISHED, version=version)

    @property
    def serving(self) -> dict[str, int]:
        """The version that each living worker serves. One that says nothing any more is left out until it does, and so is one
        that is to leave; so they are from `installing`."""
        return {worker: version for worker, version in self._serving.items() if self._is_counted_on(worker)}

    @property
    def published_seconds(self) -> float | None:
        """Seconds since the newest version was published; None before there was one."""
        return None if self._published_at is None else self._clock() - self._published_at

    def of_worker(self, worker: str) -> tuple[int | None, int | None, str]:
        """The version that a worker serves, the one that it installs (None: none), and why it has no weights to serve, if so."""
        return self._serving.get(worker), self._installing.get(worker), self.stale.get(worker, "")

    @property
    def share_attested(self) -> float | None:
        """Share of the versions given to workers that their engines have shown to have, after their last installs; None where none
        is promised. A worker that serves version 0, its own files, has been given none yet."""
        given = [share for worker, share in self.attested.items() if self._is_counted_on(worker)]
        if self.newest is None or not self.newest.sums or not given:
            return None
        return sum(given) / len(given)

    @property
    def generating(self) -> dict[str, int]:
        """See `Fleet`."""
        return {worker: version for worker, version in self.serving.items() if worker not in self.stale}

    @property
    def installing(self) -> dict[str, int]:
        """See `Fleet`."""
        return {worker: version for worker, version in self._installing.items() if self._is_counted_on(worker)}

    @property
    def newest(self) -> Manifest | None:
        """Manifest that was published last; None before there is one."""
        return self._kept.get(self.published)

    def kept(self, versions: Iterable[int]) -> list[Manifest]:
        """Manifests of these versions, oldest first; without versions that are not kept, and without version 0, the workers' own
        files."""
        return [self._kept[version] for version in sorted(versions) if version in self._kept]

    def num_healthy(self, patience_seconds: float) -> int:
        """Number of the run's workers that serve, or will soon. Others are not started again, or have been for so long without the
        weights that they are to have.

        One that is silent may come back any moment; if nobody else can do its work, the run's watchdog notices.
        """
        stale = {worker for worker, since in self.stale_since.items() if self._clock() - since >= patience_seconds}
        return sum(worker not in stale for worker in self.workers.working)

    def stop(self) -> None:
        """Stop the run: nothing more is granted."""
        self.is_stopping = True
        self._signal.notify()

    def _has_weights(self) -> bool:
        """Whether there is a version to be had: without staleness the one before is written over by the one that is on its way."""
        is_coming = not self._schedule.max_staleness and self.published < self._progress.committed
        return self.published >= self._first and not is_coming

    def _is_over_for(self, worker: str) -> bool:
        return self.is_stopping or worker in self.workers.leaving

    def _is_counted_on(self, worker: str) -> bool:
        return worker not in self.workers.leaving and not self.is_silent(worker)

    def _as_target(self, worker: str, version: int) -> Target:
        if (manifest := self._kept.get(version)) is not None:
            self._targets[worker] = manifest
        return Target(version, manifest, self.workers.place(worker), max(1, len(self.workers.working)))

    def _grant(self, worker: str, version: int) -> None:
        self._installing[worker] = version
        self._granted_at[worker] = self._clock()
        self._signal.notify()

    def _target(self, serving: int) -> int:
        """Version that a worker with this one is to serve next: the newest, unless rows that no worker holds need another one
        first."""
        behind = self._behind()
        if behind is not None and behind < serving:
            return behind
        ahead = self._progress.oldest_unleased(serving + 1)
        return self.published if ahead is None else min(self.published, ahead)

    def _behind(self) -> int | None:
        """The version that rows in nobody's hands need, if no worker that takes prompts serves it, or is about to; else None.

        Nobody counts on weights that are still to be fetched, of one that begins or that lags: they may be long in coming.
        """
        needed = self._progress.oldest_unleased(0)
        if needed is None or needed >= self.published or (needed and needed not in self._kept):
            return None
        granted = (version for worker, version in self.installing.items() if worker in self._granted_at)
        return needed if needed not in chain(self.generating.values(), granted) else None
