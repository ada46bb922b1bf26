"""The mains of the worker processes. Each one connects to the run's driver, builds its engine, runs its loop, and ends with it."""

from __future__ import annotations

import asyncio
import shutil
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import msgspec

from asyncflow.build.model_files import ModelFiles, model_here
from asyncflow.build.prepare import TOKENIZER_FILES, make_algorithm, reward_pool, shape_of, train_engine_options
from asyncflow.build.resume import TRAINER_DIR, VERSIONS_DIR, version_of
from asyncflow.build.saving import Saves, Saving, checkpoints_of
from asyncflow.cluster.abroad import abroad
from asyncflow.config import Config, load
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.base import FrozenOptions, LogProbEngine, RolloutEngine, TrainEngine
from asyncflow.engines.rollout import ROLLOUT_ENGINES
from asyncflow.engines.train import LOG_PROB_ENGINES, TRAIN_ENGINES
from asyncflow.registry import build
from asyncflow.registry import load as load_named
from asyncflow.rewards.base import Sample
from asyncflow.rewards.delays import delayed
from asyncflow.run_dir import CONFIG_FILE, JOB_FILE, KEY_FILE, RunDir, control_socket
from asyncflow.telemetry.fingerprints import FingerprintLog, fingerprints_file
from asyncflow.telemetry.hub import Hub, Reporter, driver_clock
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.directory import Places, remote_directory
from asyncflow.transport import Credentials, Peer, proxy
from asyncflow.types import Array, HeldWeights, UserError
from asyncflow.weight_sync import WEIGHT_SYNCS
from asyncflow.weight_sync.base import WeightReceiver, WeightSender, WeightSync, WeightSyncOptions
from asyncflow.workflows import SCHEDULES
from asyncflow.workflows.board import Board
from asyncflow.workflows.ledger import LedgerService
from asyncflow.workflows.loop import publish, train
from asyncflow.workflows.rollout import Rollout
from asyncflow.workflows.samples import EVALUATION_GROUPS, Shape
from asyncflow.workflows.schedule import Schedule
from asyncflow.workflows.tasks import refer, reward, serve

if TYPE_CHECKING:
    from torch import Tensor


class JobFile(msgspec.Struct, frozen=True):
    """What the driver has found out and the workers need beside the configuration."""

    model: str
    max_context: int
    weights_dir: str
    launch: str = ""  # of torchrun, if it has started the trainers
    first: int = 0  # the step that the run begins with: committed before, in earlier lives
    checkpoint: str = ""  # the folder that it goes on from
    door: str = ""  # where workers on other machines find the driver, if there are any


def launch_in(job_file: Path) -> str:
    """The launch of torchrun that a run's trainers come from."""
    return msgspec.json.decode(job_file.read_bytes(), type=JobFile).launch


@dataclass(frozen=True, slots=True)
class Connection:
    """A worker's view of its run."""

    config: Config
    job: JobFile
    shape: Shape
    queue: TransferQueueClient
    ledger: LedgerService
    board: Board
    saves: Saves
    reporter: Reporter


@asynccontextmanager
async def connected(name: str, run_dir: Path, device: Callable[[Config], str]) -> AsyncIterator[Connection]:
    """Connect to the driver of a run directory."""
    config = _config_of(run_dir)
    job = msgspec.json.decode((run_dir / JOB_FILE).read_bytes(), type=JobFile)
    if (node := abroad()) is None:
        async with joined(await Peer.connect(control_socket(run_dir), name), name, config, job, device(config)) as run:
            yield run
        return
    credentials, clock = Credentials.load(run_dir / KEY_FILE), asyncio.get_running_loop().time
    peer = await Peer.connect(job.door, name, credentials=credentials)
    model = await model_here(proxy(ModelFiles, peer, "model"), Path(job.model), node.files / "model")
    job = msgspec.structs.replace(job, model=str(model), weights_dir=str(node.memory))
    clock = await driver_clock(proxy(Hub, peer, "hub"), clock)
    async with joined(peer, name, config, job, device(config), credentials=credentials, clock=clock) as run:
        yield run


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
) -> AsyncIterator[Connection]:
    """A worker's view of the run behind a peer; reports spans and renews leases in the background. `clock`: the driver's."""
    places = Places(remote_directory(peer), name, peer=peer, credentials=credentials)
    await places.learn()
    places.watch()
    queue, clock = TransferQueueClient(places), clock or asyncio.get_running_loop().time
    reporter = Reporter(proxy(Hub, peer, "hub"), name, clock, device, config.telemetry.flush_seconds)
    try:
        async with _beside(reporter.run(), queue.renew_held()):
            ledger, board, saves = proxy(LedgerService, peer, "ledger"), proxy(Board, peer, "board"), proxy(Saves, peer, "saves")
            yield Connection(config, job, shape_of(config), queue, ledger, board, saves, reporter)
        await reporter.flush()
    finally:  # what it holds is others' to have at once, also where its process goes on
        await places.close()
        await peer.close()


async def rollout_worker(name: str, run_dir: Path) -> None:
    """Generates, and scores unless another worker does, until the run stops."""
    async with connected(name, run_dir, lambda config: config.rollout.device) as run, _scoring(run, name) as score:
        run.reporter.recorder.enter("load")
        engine = await asyncio.to_thread(_rollout_engine, run)
        receiver = _weight_sync(run, run.config.rollout.device).receiver(name)
        original = partial(_tensors, Path(run.job.model))
        await roll_out(run, engine, receiver, original, score, CheckpointTokenizer(Path(run.job.model)).decode)


async def roll_out(
    run: Connection,
    engine: RolloutEngine,
    receiver: WeightReceiver,
    original: Callable[[], Mapping[str, Tensor]],
    score: Callable[[Sample], Awaitable[float]],
    decode: Callable[[Array], str],
) -> None:
    """A rollout worker's work, with what was built for it, which is closed at the end."""
    run.reporter.why_not_deterministic = engine.why_not_deterministic
    loop = Rollout(
        run.queue,
        run.board,
        _schedule(run),
        engine,
        receiver,
        original,
        score if run.config.reward.place == "rollout" else None,
        decode,
        run.shape,
        run.reporter.recorder,
        _sample_filter(run),
    )
    await loop.run()
    run.reporter.recorder.waiting("stop")
    await receiver.close()
    await engine.close()


async def reward_worker(name: str, run_dir: Path) -> None:
    """Scores until the run stops."""
    async with connected(name, run_dir, lambda config: "cpu") as run, _scoring(run, name) as score:
        await score_groups(run, score, CheckpointTokenizer(Path(run.job.model)).decode)


async def score_groups(run: Connection, score: Callable[[Sample], Awaitable[float]], decode: Callable[[Array], str]) -> None:
    """A reward worker's work, with what was built for it."""
    work = reward(score, decode, _sample_filter(run), run.shape)
    await serve("reward", run.queue, run.ledger, work, run.reporter.recorder)
    run.reporter.recorder.waiting("stop")


async def train_worker(name: str, run_dir: Path) -> None:
    """Trains until the run stops, then saves the model."""
    async with connected(name, run_dir, lambda config: config.train.device) as run:
        spans = run.reporter.recorder
        spans.enter("load")
        engine = await asyncio.to_thread(_train_engine, run)
        if (rank := engine.data_parallel_rank) is None:
            spans.waiting("leader")
            await engine.follow(make_algorithm(run.config), spans.busy)
            return
        sender = _weight_sync(run, run.config.train.device).sender(uuid.uuid4().hex) if rank == 0 else None
        saving = await train_steps(run, engine, sender)
        with spans.busy("save"), RunDir(run_dir).saving_model(is_first=rank == 0) as folder:
            await engine.save(folder)
            if rank == 0:
                copy_tokenizer(Path(run.job.model), folder)
        spans.waiting("checkpoint")
        await saving.written()
        spans.waiting("stop")
        if sender is not None:
            await sender.close()
        await engine.close()


async def train_steps(run: Connection, engine: TrainEngine, sender: WeightSender | None) -> Saving:
    """A leading trainer's work, with what was built for it; the first one of them has a `sender`.

    Returns when the last checkpoint is staged; it is yet to be written.
    """
    first, last, settings = run.job.first, run.config.run.steps, run.config.checkpoint
    saving = Saving(
        run.saves,
        checkpoints_of(run.config),
        settings,
        engine,
        run.reporter.recorder,
        first=first,
        last=last,
        is_first=sender is not None,
    )
    if run.job.checkpoint:
        await _go_on(run, engine, sender)
    rank, has_log = engine.data_parallel_rank or 0, run.config.telemetry.fingerprints
    fingerprints = FingerprintLog(run.config.run_dir / fingerprints_file(rank) if has_log else None)
    version = await train(
        run.queue,
        run.ledger,
        run.board,
        _schedule(run),
        engine,
        make_algorithm(run.config),
        sender,
        run.shape,
        run.reporter.recorder,
        fingerprints,
        saving,
        first,
    )
    await saving.save(version)
    return saving


async def _go_on(run: Connection, engine: TrainEngine, sender: WeightSender | None) -> None:
    """Be where the run's checkpoint was written. The rollout workers get its weights, and older ones that are still needed."""
    folder, spans = Path(run.job.checkpoint), run.reporter.recorder
    with spans.busy("load_state", version=run.job.first):
        await engine.load_state(folder / TRAINER_DIR)
    with spans.busy("publish", version=run.job.first):
        for path in sorted((folder / VERSIONS_DIR).glob("*")) if sender is not None else ():
            weights = HeldWeights(_tensors(path) if (path / "model.safetensors").stat().st_size else {})
            await publish(version_of(path), weights, sender, run.board)
        await publish(run.job.first, await engine.export_weights(), sender, run.board)


async def reference_worker(name: str, run_dir: Path) -> None:
    """Adds the reference's log-probs to complete groups until the run stops."""
    async with connected(name, run_dir, lambda config: config.train.device) as run:
        run.reporter.recorder.enter("load")
        engine = await asyncio.to_thread(_reference_engine, run)
        await add_log_probs(run, engine)


async def add_log_probs(run: Connection, engine: LogProbEngine) -> None:
    """A reference worker's work, with what was built for it, which is closed at the end."""
    await serve("reference", run.queue, run.ledger, refer(engine, run.shape), run.reporter.recorder)
    run.reporter.recorder.waiting("stop")
    await engine.close()


def _config_of(run_dir: Path) -> Config:
    """A run's configuration, which lies in `run_dir` here, wherever it does on the driver's machine."""
    config = load(run_dir / CONFIG_FILE)
    if config.run_dir == run_dir:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir.parent, "name": run_dir.name})})


def copy_tokenizer(source: Path, target: Path) -> None:
    """A saved model needs the tokenizer that its prompts were written with."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


@asynccontextmanager
async def _beside(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines in the background of a block; the failure of one ends the block."""
    async with asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(coroutine) for coroutine in coroutines]
        yield
        for task in running:
            task.cancel()


@asynccontextmanager
async def _scoring(run: Connection, name: str) -> AsyncIterator[Callable[[Sample], Awaitable[float]]]:
    """The reward processes below a worker, which end with it. None are started where another worker scores."""
    pool, delays = reward_pool(run.config, name), run.config.reward.delays
    try:
        if run.config.reward.place == "rollout" or name == "reward":
            await pool.start()
        run.reporter.reward_failures = pool.failures
        yield delayed(pool.score, mean_seconds=delays.mean_seconds, salt=delays.salt) if delays.mean_seconds else pool.score
    finally:
        await pool.close()


def _schedule(run: Connection) -> Schedule:
    chosen = run.config.schedule
    return cast(Schedule, build("schedule", chosen.name, chosen.options, SCHEDULES))


def _tensors(model: Path) -> Mapping[str, Tensor]:
    """Those of a model's files."""
    read: Callable[[Path], Mapping[str, Tensor]] = load_named("function", "asyncflow.engines.rollout.decoder:load_tensors")
    return read(model)


def _rollout_engine(run: Connection) -> RolloutEngine:
    chosen, rollout = run.config.rollout.engine, run.config.rollout
    options = {
        "model_path": Path(run.job.model),
        "num_slots": rollout.num_slots,
        "max_context": run.job.max_context,
        "dtype": rollout.dtype,
        "device": rollout.device,
        "num_threads": rollout.num_threads,
        "kv_on_install": rollout.kv_on_install,
    }
    try:
        return cast(RolloutEngine, build("rollout engine", chosen.name, {**options, **chosen.options}, ROLLOUT_ENGINES))
    except ValueError as error:  # a model that it does not compute: starting it again would not help
        raise UserError(f"the rollout engine cannot generate with the model {run.job.model}: {error}") from error


def _train_engine(run: Connection) -> TrainEngine:
    chosen, arguments = run.config.train.engine, {"model_path": Path(run.job.model), "options": train_engine_options(run.config)}
    return cast(TrainEngine, build("train engine", chosen.name, {**chosen.options, **arguments}, TRAIN_ENGINES))


def _reference_engine(run: Connection) -> LogProbEngine:
    train = run.config.train
    options = FrozenOptions(
        device=train.device,
        dtype=train.frozen_dtype or train.dtype,
        temperature=run.config.rollout.temperature,
        log_prob_chunk_tokens=train.log_prob_chunk_tokens,
        num_threads=train.num_threads,
        offload=train.offload,
    )
    arguments = {"model_path": Path(run.job.model), "options": options}
    return cast(LogProbEngine, build("reference engine", "torch", arguments, LOG_PROB_ENGINES))


def _weight_sync(run: Connection, device: str) -> WeightSync:
    config = run.config
    kinds = {place.partition(":")[0] for place in (config.train.device, config.rollout.device)}
    options = WeightSyncOptions(
        directory=Path(run.job.weights_dir),
        keep=_schedule(run).max_staleness + 1,
        dtype=config.weight_sync.dtype,
        deadline_seconds=config.weight_sync.deadline_seconds,
        num_receivers=config.rollout.num_workers,
        listen=config.weight_sync.listen,
        key=config.run_dir / KEY_FILE if config.weight_sync.needs_key else None,
        device=device if len(kinds) == 1 else "cpu",
    )
    return cast(WeightSync, build("weight sync", config.weight_sync.name, {"options": options}, WEIGHT_SYNCS))


def _sample_filter(run: Connection) -> Callable[[Mapping[str, Any]], None]:
    """Keeps the first response of the first few prompts of every step and evaluation."""
    shape, count, keep = run.shape, run.config.telemetry.samples_per_step, run.reporter.keep_sample

    def filtered(sample: Mapping[str, Any]) -> None:
        group, number = divmod(sample["row"], 1 << shape.group_bits)
        position = group - EVALUATION_GROUPS if sample["purpose"] == "eval" else group % shape.prompts_per_step
        if number == 0 and position < count:
            keep(sample)

    return filtered
