"""Workers that Ray places: on this machine, or over the nodes of a cluster. The only file that imports it.

    RayCluster (driver) --placement group of each pool--> Ray --> HostActor (of each worker, on some node): ray_host.py
               |  node, start, kill                                 |  spawns, and holds the control pipe of
               +<------------- what it prints, its end -------------+ child.py: the worker, in a process of its own

consumes: worker specs; each worker's output and end, as its host tells
waits for: room in the cluster, `start_seconds` at most; then for the workers' words
is unblocked by: Ray; a worker's output or end; the loss of a host, with its node perhaps

Ray places and supervises: samples travel by the transfer queue, weights by weight sync, and a worker itself knows nothing of Ray.
One that dies is started again as `local` does it, by its host, or by another one if that is gone too: Ray itself retries nothing.

Workers on the driver's own node are as those of `local`: they come through the private socket. Those on others come through
`queue.listen`, with the run's key. The first trainer writes the model into the run's folder, and publishes weights beside the
driver: it stays on the driver's node. The others may be elsewhere if told so, where the folder is seen: they write checkpoints.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import importlib.util
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Final, NoReturn

import msgspec

from asyncflow.cluster.base import OWN_DEVICES, Settle, WorkerSpec
from asyncflow.cluster.ray_guard import PATIENCE
from asyncflow.cluster.ray_host import Host, Letter, write_private
from asyncflow.cluster.ray_plan import Wish, options_of, pool_of
from asyncflow.cluster.supervised import SupervisedCluster, WorkerProcess
from asyncflow.config import Config, load
from asyncflow.devices import COUNTED_AS
from asyncflow.run_dir import CONFIG_FILE, JOB_FILE, KEY_FILE
from asyncflow.types import RunError, UserError

log = logging.getLogger(__name__)

LOCAL_CPUS: Final = 1024
"""What a cluster that is started here says it has: workers share the cores, as those of `local` do."""
_LOOPBACK_ONLY: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_ALONE: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    _LOOPBACK_ONLY: "0",  # all doors on 127.0.0.1, as Ray has it where it knows no clusters
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # who takes too much memory is the kernel's to end, as with `local`
}
"""The environment of a cluster that is started here: nobody else reaches it, and nothing runs in it that this run does not use."""
JOIN_SECONDS: Final = 10.0
OBJECT_STORE_BYTES: Final = 80 << 20  # Ray's smallest: nothing travels through it
HOST_SECONDS: Final = 30.0
LOST_STATUS: Final = 1  # of a worker whose host is gone
UNAVAILABLE_SECONDS: Final = 60.0  # so long a host may be out of reach or hang, and its worker lives on; more than LISTEN_SECONDS
ASK_SECONDS: Final = 1.0  # between looks at what is waited for

_NODE_LABEL: Final = "ray.io/node-id"

_was_imported_alone = False  # whether this process has Ray with the settings above


class HostActor(Host):
    """A host, as Ray runs it."""

    def node(self) -> str:
        """Ray's id of the node that it is on."""
        return str(_ray().get_runtime_context().get_node_id())


@dataclass(slots=True, eq=False)
class _Pool:
    """A placement group, who is in it still, and which of its bundles are nobody's any more."""

    group: Any
    members: set[str]
    name: str = ""
    bundles: Sequence[Mapping[str, float]] = ()
    free: list[int] = field(default_factory=list)

    def take(self, needs: Mapping[str, float]) -> int | None:
        """The number of a free bundle of just these needs; None if there is none. It is no longer free."""
        number = next((number for number in self.free if self.bundles[number] == needs), None)
        if number is not None:
            self.free.remove(number)
        return number


@dataclass(slots=True, eq=False)
class _Place:
    """A worker's bundle of a placement group, and its host."""

    spec: WorkerSpec
    pool: _Pool
    bundle: int
    needs: Mapping[str, float]
    host: Any = None
    has_begun: bool = False
    apart: Mapping[str, str] = field(default_factory=dict)
    """What its environment has instead, since its pool lies on several nodes."""


class _Process:
    """A `WorkerProcess` at the other end of its host."""

    stdin = None  # the host has it

    def __init__(self, host: Any, pid: int, log: Path, give_up: Callable[[], Awaitable[None]], *, is_here: bool) -> None:
        """`give_up` ends the host, and the worker with it."""
        self.pid, self.is_here = pid, is_here
        self.returncode: int | None = None
        self._host, self._give_up = host, give_up
        self._following = asyncio.create_task(self._follow(log))
        self._killing: asyncio.Task[None] | None = None

    async def wait(self) -> int:
        """The exit status, when it has ended and all that it has printed is in its log."""
        return await asyncio.shield(self._following)

    def kill(self) -> None:
        if self._killing is None:
            self._killing = asyncio.create_task(self._kill())

    async def _kill(self) -> None:
        try:
            async with asyncio.timeout(HOST_SECONDS):
                await self._tell_to_kill()
        except TimeoutError:  # it hangs
            await self._give_up()

    async def _tell_to_kill(self) -> None:
        errors = _ray().exceptions
        while self.returncode is None:
            try:
                await self._host.kill.remote()
            except errors.ActorUnavailableError:  # it lives on, out of reach: it may not have been told
                await asyncio.sleep(ASK_SECONDS)
            except errors.RayError:
                return
            else:
                return

    async def _follow(self, log: Path) -> int:
        errors, now = _ray().exceptions, asyncio.get_running_loop().time
        heard_at = now()
        with log.open("ab", buffering=0) as file:
            while self.returncode is None:
                try:
                    async with asyncio.timeout(UNAVAILABLE_SECONDS):
                        output, self.returncode = await self._host.listen.remote()
                    heard_at = now()
                except (TimeoutError, errors.RayError) as error:
                    is_unavailable = isinstance(error, errors.ActorUnavailableError)
                    if is_unavailable and now() - heard_at < UNAVAILABLE_SECONDS:
                        await asyncio.sleep(ASK_SECONDS)  # the network may come back, and its worker with it
                        continue
                    why = _first_sentence(error)
                    if not isinstance(error, errors.RayError):
                        why = f"it has not answered for {UNAVAILABLE_SECONDS:g} s"
                    if is_unavailable or isinstance(error, TimeoutError):  # it may come back, and is somebody else's then
                        await self._give_up()
                    output, self.returncode = f"its host is gone: {why}\n".encode(), LOST_STATUS
                file.write(output)
        return self.returncode


class RayCluster(SupervisedCluster):
    """See `Cluster`, and the module's head. Raises `UserError` for options that are none, or where Ray is not installed."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        super().__init__(run_dir)
        self._options = options_of(options)
        if importlib.util.find_spec("ray") is None:
            raise UserError("cluster=ray needs Ray, which is not installed: pip install 'asyncflow-rl[ray]'")
        self._run_id = uuid.uuid4().hex[:12]
        self._scratch: Path | None = None  # of a cluster that was started for this run
        self._guard: asyncio.subprocess.Process | None = None  # its owner
        self._node = ""  # the driver's
        self._head = ""  # the address of the process that knows the cluster: functions of Ray that ask it wait for it for ever
        self._is_ours = False  # whether this object has connected the process to Ray
        self._places: dict[str, _Place] = {}
        self._pools: list[_Pool] = []
        self._is_stopping = False  # nobody is placed any more
        self._is_over = False  # Ray is asked nothing any more: without a cluster, its functions would start one
        self._at_work: set[asyncio.Future[None]] = set()  # calls of `start` and `end` that ask Ray
        self._environment_before: dict[str, str | None] = {}  # of a cluster that was started for this run

    async def start(self, workers: Sequence[WorkerSpec]) -> None:
        config = load(self._run_dir / CONFIG_FILE)
        pools = {name: [spec for spec in workers if pool_of(spec) == name] for name in self._options.in_order(workers, config)}
        for name, specs in pools.items():
            self._options.check(name, len(specs), config)
        with self._working():
            if not self._node:
                self._check_open()
                await self._connect()
                self._options = msgspec.structs.replace(self._options, address=self._head)  # known for `auto`, too, from now on
            for name in self._options.in_order(workers, config):
                await self._reserve(name, pools[name], config)
            await self._look_apart([spec for specs in pools.values() for spec in specs if spec.apart])
            await super().start(workers)

    async def end(self, name: str, grace_seconds: float) -> bool:
        with self._working():
            is_in_time = await super().end(name, grace_seconds)
            if (place := self._places.pop(name, None)) is not None:  # else the run is over
                await self._leave(place)
        return is_in_time

    async def stop(self, grace_seconds: float, settle: Settle | None = None) -> list[str]:
        self._is_stopping = True
        try:
            late = await super().stop(grace_seconds, settle)
            places, self._places = self._places, {}
            await asyncio.gather(*(self._leave(place) for place in places.values()))
            if self._at_work:  # their workers have ended: they have only to leave
                await asyncio.wait(self._at_work, timeout=HOST_SECONDS)
        finally:
            self._is_over = True
            await self._disconnect()
        return late

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        """Ray is needed meanwhile."""
        done = asyncio.get_running_loop().create_future()
        self._at_work.add(done)
        try:
            yield
        finally:
            self._at_work.discard(done)
            done.set_result(None)

    def _check_open(self) -> None:
        if self._is_stopping:
            raise RunError("the run is ending: nobody is placed on its Ray cluster any more")

    async def _check_head(self) -> None:
        if not await _answers(self._head):
            raise ConnectionError(f"the head of the Ray cluster at {self._head} does not answer")

    def pids(self) -> dict[str, int]:
        """See `Cluster`: of those on this machine."""
        running = {name: child.process for name, child in self._children.items() if child.process.returncode is None}
        return {name: process.pid for name, process in running.items() if getattr(process, "is_here", False)}

    async def _spawn(self, spec: WorkerSpec, log: Path) -> WorkerProcess:
        """On a host of its own. Where a worker is to be started again and cannot be, it has died once more."""
        place, seconds = self._places[spec.name], self._options.start_seconds
        try:
            async with asyncio.timeout(seconds):
                return await self._spawn_at(place, log)
        except (TimeoutError, ConnectionError, _ray().exceptions.RayError) as error:
            is_late = isinstance(error, TimeoutError)
            why = f"it could not be started on Ray within {seconds:g} s" if is_late else _first_sentence(error)
            if not place.has_begun:
                if self._places.pop(spec.name, None) is not None:
                    await self._leave(place)
                raise RunError(f"worker {spec.name} could not be started: {why}") from error
            if not isinstance(error, ConnectionError):
                self._give_back(place)
            with log.open("a") as file:
                print(why, file=file)
            return _NeverBegan()

    async def _spawn_at(self, place: _Place, log: Path) -> _Process:
        await self._check_head()
        if not (place.has_begun and place.spec.outlives_others):  # who ends with the run still needs those
            self._check_open()
        try:
            host = place.host = place.host or self._new_host(place)
            is_abroad = await host.node.remote() != self._node
        except _ray().exceptions.RayError:  # gone since the worker's last life
            self._give_back(place)
            host = place.host = self._new_host(place)
            is_abroad = await host.node.remote() != self._node
        sees_run = await self._sees_run(host)
        letter = Letter(
            name=place.spec.name,
            entry=place.spec.entry,
            run_dir=str(self._run_dir.absolute() if is_abroad else self._run_dir),
            cwd=os.getcwd(),
            run_id=self._run_id,
            is_abroad=is_abroad,
            environment=self._environment(place, is_abroad=is_abroad),
            files=self._files() if is_abroad and not sees_run else {},
        )
        pid = await host.start.remote(msgspec.msgpack.encode(letter))
        place.has_begun = True
        return _Process(host, pid, log, partial(self._give_up, place, host), is_here=not is_abroad)

    def _environment(self, place: _Place, *, is_abroad: bool) -> dict[str, str]:
        forwarded, own = dict(os.environ), {**place.spec.environment, **place.apart}
        if is_abroad:
            forwarded = self._options.forwarded(forwarded)
        if place.needs.keys() & {*COUNTED_AS.values()}:
            own[OWN_DEVICES] = "1"
            if "LOCAL_RANK" in own:
                own["LOCAL_RANK"] = "0"
        return forwarded | own

    async def _sees_run(self, host: Any) -> bool:
        """Whether a host sees the run's folder."""
        if (sees_run := self._options.shares_files) is not None:
            return sees_run
        job_file = self._run_dir.absolute() / JOB_FILE
        digest = hashlib.sha256(job_file.read_bytes()).hexdigest() if job_file.exists() else ""
        return bool(await host.sees.remote(str(job_file), digest))

    async def _look_apart(self, specs: Sequence[WorkerSpec]) -> None:
        """Tell workers of one pool that do their work together whether they are on several nodes.

        Raises `UserError` where one of them is on a node that does not see the run's folder, `RunError` where one says nothing.
        """
        places = [self._places[spec.name] for spec in specs]
        if self._options.trainers != "anywhere" or len(places) < 2:
            return
        try:
            async with asyncio.timeout(self._options.start_seconds):
                nodes = await asyncio.gather(*(place.host.node.remote() for place in places))
                there = [(place, node) for place, node in zip(places, nodes, strict=True) if node != self._node]
                see = await asyncio.gather(*(self._sees_run(place.host) for place, _ in there))
        except (TimeoutError, _ray().exceptions.RayError) as error:
            raise RunError(f"the hosts of trainers have not all said where they are: {_first_sentence(error)}") from error
        for (place, _), sees_run in zip(there, see, strict=True):
            if not sees_run:
                raise UserError(
                    f"{place.spec.name} would be on a node that does not see {self._run_dir.absolute()}, where trainers write "
                    "checkpoints: share it, or leave cluster.trainers out, and all trainers stay on this machine"
                )
        for place, node in zip(places, nodes, strict=True) if there else ():
            place.apart = {**place.spec.apart, "LOCAL_WORLD_SIZE": str(nodes.count(node))}

    def _files(self) -> dict[str, bytes]:
        """What a worker reads of the run's folder."""
        return {name: (self._run_dir / name).read_bytes() for name in (CONFIG_FILE, JOB_FILE, KEY_FILE)}

    async def _reserve(self, name: str, specs: Sequence[WorkerSpec], config: Config) -> None:
        """A bundle for each of these workers of one pool: one that another has left, or else of a new placement group.

        Raises `UserError` when there is no room, `RunError` when the head of the cluster does not answer, or the run is ending.
        """
        wanted = [self._options.wish(name, spec) for spec in specs]
        why_here, group = self._options.why_here(name, config), None
        deadline = asyncio.get_running_loop().time() + self._options.start_seconds
        try:
            while wanted:
                try:
                    await self._check_head()  # else Ray's functions wait for it
                except ConnectionError as error:
                    raise RunError(str(error)) from error
                self._check_open()
                if left := self._take_free(name, wanted):  # they may come free at any time, of those who leave meanwhile
                    self._remove(group)
                    wanted, group = [each for each in wanted if each not in left], None
                    continue
                if group is None:
                    group = self._new_group(name, wanted, config)
                is_there = await _in_thread(group.wait, ASK_SECONDS)
                self._check_open()
                if is_there:
                    pool = _Pool(group, set(), name, [bundle for _, bundle in wanted])
                    self._pools.append(pool)
                    group = None
                    for number, (spec, bundle) in enumerate(wanted):
                        self._take(pool, number, spec, bundle)
                    return
                if asyncio.get_running_loop().time() > deadline:
                    self._say_no_room(name, [bundle for _, bundle in wanted], why_here)
        except ValueError as error:  # an amount of a kind of which it knows more than `options_of`
            raise UserError(
                f"Ray has no such workers as {name} with {wanted[0][1]}: {_first_sentence(error)}; change cluster.resources.{name}"
            ) from error
        finally:
            self._remove(group)

    def _say_no_room(self, name: str, bundles: Sequence[Mapping[str, float]], why_here: str) -> NoReturn:
        free = {kind: count for kind, count in _ray().available_resources().items() if kind in bundles[0]}
        raise UserError(
            f"the Ray cluster has had no room for {len(bundles)} {name} worker(s) of {bundles[0]} each for "
            f"{self._options.start_seconds:g} s{why_here and f', and {why_here}'}; free, on all its nodes, is {free}: "
            f"start fewer workers, or change cluster.resources or cluster.placement"
        )

    def _take_free(self, name: str, wanted: Sequence[Wish]) -> list[Wish]:
        """Give workers what others of their pool have left. Returns who has got something."""
        placed = []
        for spec, bundle in wanted:
            for pool in self._pools:
                if pool.name == name and (number := pool.take(bundle)) is not None:
                    self._take(pool, number, spec, bundle)
                    placed.append((spec, bundle))
                    break
        return placed

    def _take(self, pool: _Pool, number: int, spec: WorkerSpec, bundle: Mapping[str, float]) -> None:
        pool.members.add(spec.name)
        self._places[spec.name] = place = _Place(spec, pool, number, bundle)
        place.host = self._new_host(place)

    def _new_group(self, name: str, wanted: Sequence[Wish], config: Config) -> Any:
        return _ray().util.placement_group(
            [bundle for _, bundle in wanted],
            strategy=self._options.strategy(name),
            bundle_label_selector=self._options.labels(name, wanted, config, {_NODE_LABEL: self._node}),
        )

    def _remove(self, group: Any) -> None:
        """A placement group that nobody needs any more, or None."""
        if group is not None and not self._is_over:
            with contextlib.suppress(_ray().exceptions.RayError, RuntimeError):
                _ray().util.remove_placement_group(group)

    def _new_host(self, place: _Place) -> Any:
        ray, needs = _ray(), dict(place.needs)
        strategy = ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(place.pool.group, place.bundle)
        actor = ray.remote(HostActor).options(
            num_cpus=needs.pop("CPU", 0),
            num_gpus=needs.pop("GPU", 0),
            memory=needs.pop("memory", None),
            resources=needs,
            max_restarts=0,
            max_task_retries=0,
            max_concurrency=4,
            scheduling_strategy=strategy,
        )
        return actor.remote()

    def _give_back(self, place: _Place) -> None:
        """End a worker's host."""
        if place.host is not None:
            with contextlib.suppress(_ray().exceptions.RayError, RuntimeError, ValueError):
                _ray().kill(place.host)
            place.host = None

    async def _give_up(self, place: _Place, host: Any) -> None:
        """A host that does not answer is ended, and with it its worker, whose control pipe it has. The next life has another."""
        if place.host is not host or self._is_over or not await _answers(self._head):
            return
        if place.host is host and not self._is_over:
            self._give_back(place)

    async def _leave(self, place: _Place) -> None:
        """Its worker has ended for good."""
        if place.host is not None and not self._is_over:
            with contextlib.suppress(TimeoutError, _ray().exceptions.RayError):
                async with asyncio.timeout(HOST_SECONDS):
                    await place.host.leave.remote()
        if self._is_over or not await _answers(self._head) or self._is_over:
            return
        self._give_back(place)
        pool = place.pool
        pool.members.discard(place.spec.name)
        pool.free.append(place.bundle)
        if not pool.members:
            self._pools = [each for each in self._pools if each is not pool]
            self._remove(pool.group)

    async def _connect(self) -> None:
        """Be a driver of Ray's, in a cluster that is there, or in one that is started for this run."""
        address, loaded = self._options.address, sys.modules.get("ray")
        if loaded is None or not loaded.is_initialized():
            if address:
                if not await _answers(address):  # Ray itself would try for minutes
                    raise UserError(f"nobody answers at cluster.address={address}: start the cluster first, by ray start --head")
                if os.environ.get("RAY_AUTH_MODE") == "disabled":
                    log.warning("RAY_AUTH_MODE=disabled: whoever reaches the Ray cluster at %s runs code on it", address)
                for name, value in {"RAY_AUTH_MODE": "token", **PATIENCE}.items():  # Ray reads them when it is imported
                    os.environ.setdefault(name, value)
            else:
                address = await self._begin_cluster()
            ray = _ray()
            try:
                with _own_signals():
                    ray.init(address, log_to_driver=False, configure_logging=False, namespace=f"asyncflow-{self._run_id}")
            except Exception as error:  # Ray's own are of many kinds
                raise UserError(f"the Ray cluster at {address} cannot be joined: {_first_sentence(error)}") from error
            self._is_ours = True
        context = _ray().get_runtime_context()
        self._node, self._head = context.get_node_id(), context.gcs_address

    async def _begin_cluster(self) -> str:
        """Have a process of its own start Ray, see ray_guard.py. Returns its address."""
        global _was_imported_alone
        if "ray" in sys.modules and os.environ.get(_LOOPBACK_ONLY) != "0" and not _was_imported_alone:
            raise UserError(
                "this process had imported Ray before the run, with settings for other machines: call ray.init before the run, "
                "which then uses that cluster, or leave the import to the run"
            )
        self._scratch = Path(tempfile.mkdtemp(prefix="asyncflow-ray-"))
        write_private(self._scratch, {"token": _token().encode()})
        own = {**_ALONE, **PATIENCE, "RAY_AUTH_TOKEN_PATH": str(self._scratch / "token")}
        self._environment_before = {name: os.environ.get(name) for name in [*own, "RAY_AUTH_TOKEN"]}
        os.environ.pop("RAY_AUTH_TOKEN", None)
        os.environ.update(own)
        _was_imported_alone = True  # it is from now on
        words = self._run_dir / "logs" / "ray.log"
        words.parent.mkdir(exist_ok=True)
        with words.open("ab") as errors:
            self._guard = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "asyncflow.cluster.ray_guard", str(self._scratch),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        assert self._guard.stdout is not None
        try:
            async with asyncio.timeout(self._options.start_seconds):
                address = (await self._guard.stdout.readline()).decode().strip()
        except TimeoutError as error:
            raise RunError(f"Ray did not start within {self._options.start_seconds:g} s; more in {words}") from error
        if not address:
            raise RunError(f"Ray has ended instead of starting; more in {words}")
        return address

    async def _disconnect(self) -> None:
        if self._is_ours:
            _ray().shutdown()  # it waits some seconds for a head that is gone, no more
            self._is_ours = False
        if (guard := self._guard) is not None and guard.stdin is not None:
            guard.stdin.close()
            try:
                async with asyncio.timeout(HOST_SECONDS):
                    await guard.wait()
            except TimeoutError:
                guard.kill()
                await guard.wait()
        if self._scratch is not None:
            shutil.rmtree(self._scratch, ignore_errors=True)
        before, self._environment_before = self._environment_before, {}
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


class _NeverBegan:
    """A process that could not be started."""

    pid, returncode, stdin, is_here = 0, LOST_STATUS, None, False

    async def wait(self) -> int:
        return LOST_STATUS

    def kill(self) -> None:
        """There is nothing to be killed."""


def _ray() -> Any:
    """Imported when it is needed: it takes a second."""
    import ray
    import ray.util.scheduling_strategies

    return ray


async def _in_thread(function: Callable[[float], bool], seconds: float) -> bool:
    """Call it in a thread, and be there when it returns: it may not ask Ray when Ray is gone."""
    call = asyncio.ensure_future(asyncio.to_thread(function, seconds))
    try:
        return await asyncio.shield(call)
    except asyncio.CancelledError:
        await asyncio.wait([call], timeout=HOST_SECONDS)
        raise


def _first_sentence(error: BaseException) -> str:
    cause = getattr(error, "cause", None)  # of what a host has raised: Ray's own text is its traceback
    if isinstance(cause, UserError):
        return str(cause)
    return " ".join(str(error).split()).partition(". ")[0] or type(error).__name__


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Ray puts handlers of its own in place of those by which a run ends in order."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


async def _answers(address: str) -> bool:
    """Whether somebody listens there. True for an address that Ray is to find."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return True
    try:
        async with asyncio.timeout(JOIN_SECONDS):
            _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except (OSError, TimeoutError):
        return False
    writer.close()
    return True


@cache
def _token() -> str:
    """What the processes of clusters that are started for this process's runs show each other. Ray reads it once."""
    return secrets.token_hex(32)


def start(folder: Path) -> None:
    """Start a cluster of one node, reached from this machine alone, with its files in `folder`. Prints its address, and stays until
    standard input ends: Ray's processes end with the one that has started them.
    """
    context = _ray().init(
        "local",
        num_cpus=LOCAL_CPUS,
        include_dashboard=False,
        object_store_memory=OBJECT_STORE_BYTES,
        log_to_driver=False,
        configure_logging=False,
        _temp_dir=str(folder),
    )
    os.write(1, context.address_info["gcs_address"].encode() + b"\n")
    while os.read(0, 4096):
        pass


if __name__ == "__main__":
    start(Path(sys.argv[1]))
