"""Connection of a worker process to its run, and the run's services as it sees them.

    its run's folder -> Called: configuration, job, where the driver is -> a peer of the driver -> Connection

consumes: the run's folder, written by the driver before it starts anybody
waits for: the driver's answer; on another machine, the model's files
is unblocked by: the driver
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.cluster.base import OWN_DEVICES
from asyncflow.cluster.remote_node import remote_node
from asyncflow.config import Config, load
from asyncflow.control.critic_versions import CriticVersions
from asyncflow.control.ledger import LedgerService
from asyncflow.control.policy_versions import PolicyVersions
from asyncflow.devices import kind_of
from asyncflow.loops.evaluation import EVALUATORS, is_evaluator
from asyncflow.loops.samples import Shape
from asyncflow.run.factories import shape_of
from asyncflow.run.models.model_files import ModelFiles, model_here
from asyncflow.run.services.cores import FreeCores
from asyncflow.run.services.desk import TrainDesk
from asyncflow.run.services.handover import Handover
from asyncflow.run.services.rendezvous import Rendezvous
from asyncflow.run.state.saving import CheckpointCoordinator
from asyncflow.run_dir import CONFIG_FILE, JOB_FILE, KEY_FILE, RunDir, control_socket
from asyncflow.telemetry.hub import Hub, Reporter, driver_clock
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.directory import Places, remote_directory
from asyncflow.transport import Credentials, Peer, proxy
from asyncflow.types import RunError, UserError
from asyncflow.waits import NEXT_ATTEMPT, waiting

EVALUATORS_VERSIONS = f"versions/{EVALUATORS}"
"""The service of theirs; the rollout workers' and the trainer's is `versions`."""
CRITIC_VERSIONS = "versions/critic"
"""The service of the critic, and of the workers that compute values by it."""
_LOOK_SECONDS = 0.02


def model_begun_with(run_dir: Path) -> Path:
    """Folder of the model that a run began with. Raises `UserError` when the run does not say, or it is gone."""
    try:
        model = Path(msgspec.json.decode((run_dir / JOB_FILE).read_bytes(), type=JobFile).model)
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{run_dir / JOB_FILE} does not say which model the run began with: {error}") from error
    initial = RunDir(run_dir).initial_model  # the run's folder may have been moved
    model = initial if initial.is_dir() else model
    if not (model / "config.json").is_file():
        raise UserError(f"the model that the run began with, {model}, is not there any more")
    return model


class JobFile(msgspec.Struct, frozen=True):
    """Facts that the driver has found out and the workers need beside the configuration."""

    model: str
    max_context: int
    weights_dir: str
    launch: str = ""  # of torchrun, if it has started the trainers
    began: int = 0  # the step that the run's first attempt began with: more than 0 in a fork
    first: int = 0  # the step that this attempt begins with: committed before, in earlier attempts
    checkpoint: str = ""  # the folder that it goes on from
    door: str = ""  # where workers on other machines find the driver, if there are any
    num_held_out: int = 0  # prompts of each evaluation
    memory: str = ""  # folder of the checkpoints in shared memory, if there are any

    @property
    def saved(self) -> int | None:
        """Version with which the run begins, if that is not in a checkpoint in shared memory alone."""
        return None if self.memory and Path(self.checkpoint).is_relative_to(self.memory) else self.first


def launch_in(job_file: Path) -> str:
    """The launch of torchrun that a run's trainers come from."""
    return msgspec.json.decode(job_file.read_bytes(), type=JobFile).launch


@dataclass(frozen=True, slots=True)
class RunConnection:
    """A worker's view of its run."""

    config: Config
    job: JobFile
    shape: Shape
    queue: TransferQueueClient
    ledger: LedgerService
    versions: PolicyVersions
    critic_versions: CriticVersions
    saves: CheckpointCoordinator
    reporter: Reporter
    rendezvous: Rendezvous
    desk: TrainDesk
    cores: FreeCores
    handover: Handover


@asynccontextmanager
async def connected(
    name: str,
    run_dir: Path,
    device: Callable[[Config], str],
    make_queue: Callable[[Places], TransferQueueClient] = TransferQueueClient,
) -> AsyncIterator[RunConnection]:
    """Connect to the driver of a run directory."""
    called, clock = called_by(run_dir), asyncio.get_running_loop().time
    peer, job = await Peer.connect(called.hub, name, credentials=called.credentials), called.job
    if (node := remote_node()) is not None:
        model = await model_here(proxy(ModelFiles, peer, "model"), Path(job.model), node.files / "model")
        job = msgspec.structs.replace(job, model=str(model))
        clock = await driver_clock(proxy(Hub, peer, "hub"), clock)
    config, credentials = called.config, called.credentials
    joining = joined(peer, name, config, job, device(config), credentials=credentials, clock=clock, make_queue=make_queue)
    async with joining as run:
        yield run


@dataclass(frozen=True, slots=True)
class Called:
    """Contents of the run's folder that a worker reads: `hub` is where the driver is, `job.weights_dir` a private folder of this
    machine."""

    config: Config
    job: JobFile
    hub: str | Path
    credentials: Credentials | None


def called_by(run_dir: Path) -> Called:
    """Configuration, job and address of the run that has started this worker's process."""
    config = config_of(run_dir)
    job = msgspec.json.decode((run_dir / JOB_FILE).read_bytes(), type=JobFile)
    credentials = Credentials.load(run_dir / KEY_FILE) if job.door else None
    if (node := remote_node()) is None:
        return Called(config, job, control_socket(run_dir), credentials)
    return Called(config, msgspec.structs.replace(job, weights_dir=str(node.memory)), job.door, credentials)


@asynccontextmanager
async def joined(
    peer: Peer,
    name: str,
    config: Config,
    job: JobFile,
    device: str,
    *,
    credentials: Credentials | None = None,
    clock: Callable[[], float] | None = None,
    make_queue: Callable[[Places], TransferQueueClient] = TransferQueueClient,
) -> AsyncIterator[RunConnection]:
    """A worker's view of the run behind a peer; reports spans and renews leases in the background. `clock`: the driver's."""
    places = Places(remote_directory(peer), name, peer=peer, credentials=credentials)
    await places.learn()
    places.watch()
    queue, clock = make_queue(places), clock or asyncio.get_running_loop().time
    reporter = Reporter(proxy(Hub, peer, "hub"), name, clock, device, config.telemetry.flush_seconds)
    try:
        async with background(reporter.run(), queue.renew_held()):
            ledger, saves = proxy(LedgerService, peer, "ledger"), proxy(CheckpointCoordinator, peer, "saves")
            versions = proxy(PolicyVersions, peer, EVALUATORS_VERSIONS if is_evaluator(name) else "versions")
            of_critic, rendezvous = proxy(CriticVersions, peer, CRITIC_VERSIONS), proxy(Rendezvous, peer, "rendezvous")
            desk, shape, cores = proxy(TrainDesk, peer, "desk"), shape_of(config), proxy(FreeCores, peer, "cores")
            parts = versions, of_critic, saves, reporter, rendezvous, desk, cores, proxy(Handover, peer, "handover")
            yield RunConnection(config, job, shape, queue, ledger, *parts)
        await reporter.flush()
    finally:  # what it holds is others' to have at once, also where its process goes on
        await places.close()
        await peer.close()


async def next_attempt(run_dir: Path, over: JobFile, deadline_seconds: float) -> None:
    """Wait until the driver of the attempt that follows the one that is `over` listens at the same place. Raises `RunError` at the
    deadline."""
    try:
        with waiting(NEXT_ATTEMPT, seconds=deadline_seconds):
            async with asyncio.timeout(deadline_seconds):
                while not control_socket(run_dir).exists() or called_by(run_dir).job.weights_dir == over.weights_dir:
                    await asyncio.sleep(_LOOK_SECONDS)
    except TimeoutError as error:
        raise RunError(f"no other attempt of the run in {run_dir} has begun within {deadline_seconds:g} s") from error


def config_of(run_dir: Path) -> Config:
    """Configuration of a run, which lies in `run_dir` here, wherever it does on the driver's machine."""
    config = load(run_dir / CONFIG_FILE)
    if os.environ.get(OWN_DEVICES):
        config = _unnumbered(config)
    if config.run_dir == run_dir:
        return config
    return config.changed(run={"dir": run_dir.parent, "name": run_dir.name})


def _unnumbered(config: Config) -> Config:
    """Configuration with devices by kind alone, `cuda` for `cuda:1`: their numbers are those of a machine all of whose devices are
    seen."""

    def by_kind(device: str | None) -> dict[str, Any]:
        return {"device": device and kind_of(device)}

    train = by_kind(config.train.device) | {"critic": by_kind(config.train.critic.device)}
    model = config.reward.model and by_kind(config.reward.model.device)
    generating, held_out = by_kind(config.rollout.device), by_kind(config.eval.device)
    return config.changed(rollout=generating, train=train, reward={"model": model}, eval=held_out)


@asynccontextmanager
async def background(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines in the background of a block; the failure of one ends the block."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine) for coroutine in coroutines]
        yield
        for task in running:
            task.cancel()
