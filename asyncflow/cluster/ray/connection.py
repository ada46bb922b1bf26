"""Being connected to a Ray cluster: to one that is there, or to one that is started for a run. No other file imports Ray in
the driver.

    RayConnection (driver) --joins--> Ray, on this node and others | Ray, on this one alone <--starts-- `start`, below guard.py

consumes: the cluster's address, or none; the environment, which has what Ray is to know
waits for: a cluster that is being started, `start_seconds` at most; an answer of its head; answers of hosts, as long as who asks
is unblocked by: the guard, which tells the address, and ends when the cluster has; the cluster that listens there

Ray takes its settings from the environment of the process when it is imported. What a cluster of our own needs there is taken out
again when the run is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Awaitable, Iterator
from functools import cache
from pathlib import Path
from typing import Any, Final, TypeVar

from asyncflow.cluster.ray.guard import PATIENCE
from asyncflow.cluster.ray.host import write_private
from asyncflow.cluster.ray.requirements import RayOptions
from asyncflow.types import RunError, UserError

log = logging.getLogger(__name__)

T = TypeVar("T")

LOCAL_CPUS: Final = 1024
"""CPUs that a cluster started here says it has: workers share the cores, as those of `local` do."""
HOST_SECONDS: Final = 30.0  # so long a host, or the owner of a cluster of our own, may take to do as it is told
ASK_SECONDS: Final = 1.0  # between looks at what is waited for
JOIN_SECONDS: Final = 10.0
OBJECT_STORE_BYTES: Final = 80 << 20  # Ray's smallest: nothing travels through it

_LOOPBACK_ONLY: Final = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"
_ALONE: Final = {
    "RAY_AUTH_MODE": "token",
    "RAY_USAGE_STATS_ENABLED": "0",
    _LOOPBACK_ONLY: "0",  # all doors on 127.0.0.1, as Ray has it where it knows no clusters
    "RAY_prestart_worker_first_driver": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_memory_monitor_refresh_ms": "0",  # a process with too much memory is the kernel's to end, as with `local`
}
"""The environment of a cluster that is started here: nobody else reaches it, and nothing runs in it that this run does not use."""

_was_imported_alone = False  # whether this process has Ray with the settings above


class RayConnection:
    """Connection of a run's driver to Ray. The output of a cluster of its own goes to `logs/ray.log` in the run's folder."""

    def __init__(self, run_dir: Path, run_id: str) -> None:
        self.node = ""  # Ray's id of the driver's; empty until it is connected
        self.head = ""  # the address of the process that knows the cluster: functions of Ray that ask it wait for it for ever
        self.is_over = False  # Ray is asked nothing any more: without a cluster, its functions would start one
        self._run_dir, self._run_id = run_dir, run_id
        self._is_ours = False  # whether this object has connected the process to Ray
        self._scratch: Path | None = None  # of a cluster that was started for this run
        self._guard: asyncio.subprocess.Process | None = None  # its owner
        self._guard_end: asyncio.Task[int] | None = None
        self._environment_before: dict[str, str | None] = {}  # of what such a cluster has changed in it

    async def connect(self, options: RayOptions) -> None:
        """Be a driver of Ray's, in a cluster that is there, or in one that is started for this run.

        Raises `UserError` where it cannot be joined, or where this process has imported Ray with settings for other machines;
        `RunError` where the one for this run does not start.
        """
        address, loaded = options.address, sys.modules.get("ray")
        if loaded is None or not loaded.is_initialized():
            if address:
                if not await _answers(address):  # Ray itself would try for minutes
                    raise UserError(f"nothing answers at cluster.address={address}: start the cluster first, by ray start --head")
                if os.environ.get("RAY_AUTH_MODE") == "disabled":
                    log.warning("RAY_AUTH_MODE=disabled: everybody who reaches the Ray cluster at %s can run code on it", address)
                for name, value in {"RAY_AUTH_MODE": "token", **PATIENCE}.items():  # Ray reads them when it is imported
                    os.environ.setdefault(name, value)
            else:
                address = await self._begin_cluster(options.start_seconds)
            ray = import_ray()
            try:
                with _own_signals():
                    ray.init(address, log_to_driver=False, configure_logging=False, namespace=f"asyncflow-{self._run_id}")
            except Exception as error:  # Ray's own are of many kinds
                raise UserError(f"the Ray cluster at {address} cannot be joined: {first_sentence(error)}") from error
            self._is_ours = True
        context = import_ray().get_runtime_context()
        self.node, self.head = context.get_node_id(), context.gcs_address

    async def _begin_cluster(self, seconds: float) -> str:
        """Have a process of its own start Ray, see guard.py. Returns its address, after so long at most."""
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
                sys.executable, "-m", "asyncflow.cluster.ray.guard", str(self._scratch),
                stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=errors, start_new_session=True,
            )  # fmt: skip
        self._guard_end = asyncio.create_task(self._guard.wait())
        assert self._guard.stdout is not None
        try:
            async with asyncio.timeout(seconds):
                address = (await self._guard.stdout.readline()).decode().strip()
        except TimeoutError as error:
            raise RunError(f"Ray did not start within {seconds:g} s; more in {words}") from error
        if not address:
            raise RunError(f"Ray has ended instead of starting; more in {words}")
        return address

    async def check_head(self) -> None:
        """Raises `ConnectionError` when the head does not answer."""
        if not await _answers(self.head):
            raise ConnectionError(f"the head of the Ray cluster at {self.head} does not answer")

    async def answer(self, asked: Awaitable[T]) -> T:
        """An answer of Ray, or of a host. Raises `ConnectionError` as soon as the cluster that was started for this run has ended.

        Ray itself would look for it for a minute. An owner that was killed has ended nothing: there may still be workers.
        """
        answer = asyncio.ensure_future(asked)
        try:
            if self._guard_end is not None:
                await asyncio.wait([answer, self._guard_end], return_when=asyncio.FIRST_COMPLETED)
                is_there = answer.done() and answer.exception() is None
                if not is_there and self._guard_end.done() and self._guard_end.result() >= 0:
                    raise ConnectionError("the Ray cluster that was started for this run has ended, of which logs/ray.log tells")
            return await answer
        finally:
            answer.cancel()

    async def may_be_asked(self) -> bool:
        """Whether Ray is there, and is to be asked anything still."""
        return not self.is_over and await _answers(self.head) and not self.is_over

    async def disconnect(self) -> None:
        """Leave the cluster, and end it if it is this run's own. Once more is nothing."""
        self.is_over = True
        if self._is_ours:
            import_ray().shutdown()  # it waits some seconds for a head that is gone, no more
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


def import_ray() -> Any:
    """Ray, imported when it is needed: it takes a second."""
    import ray
    import ray.util.scheduling_strategies

    return ray


def first_sentence(error: BaseException) -> str:
    """Message of an error of Ray's, in short; all of it where it is a mistake of the user's that a host has found."""
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
    """Whether a server listens there. True for an address that Ray is to find."""
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
    """Token by which the processes of clusters that are started for this process's runs know each other. Ray reads it once."""
    return secrets.token_hex(32)


def start(folder: Path) -> None:
    """Start a cluster of one node, reached from this machine alone, with its files in `folder`. Prints its address, and stays until
    standard input ends: Ray's processes end with the one that has started them.
    """
    context = import_ray().init(
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
