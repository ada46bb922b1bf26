"""The mains of the worker processes. Each one connects to the run's driver, builds its engine, runs its loop, and ends with it."""

from __future__ import annotations

import asyncio
import os
import shutil
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, cast

import msgspec
import numpy as np

from asyncflow.build.model_files import ModelFiles, model_here
from asyncflow.build.parts import (
    critic_options,
    make_algorithm,
    make_storage,
    reward_pool,
    shape_of,
    train_engine_options,
    unit_options,
)
from asyncflow.build.prepare import TOKENIZER_FILES
from asyncflow.build.rendezvous import Rendezvous, meet_at_driver
from asyncflow.build.resume import CRITIC_FINGERPRINTS, TRAINER_DIR, VERSIONS_DIR, version_of
from asyncflow.build.saving import Saves, Saving, checkpoints_of
from asyncflow.cluster.abroad import abroad, own_address
from asyncflow.cluster.base import OWN_DEVICES
from asyncflow.config import Config, CriticConfig, RewardModelConfig, RolloutConfig, TrainConfig, load
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.base import ClassifierEngine, CriticEngine, FrozenOptions, LogProbEngine, RolloutEngine, TrainEngine
from asyncflow.engines.rollout import ROLLOUT_ENGINES
from asyncflow.engines.train import CLASSIFIER_ENGINES, CRITIC_ENGINES, LOG_PROB_ENGINES, TRAIN_ENGINES
from asyncflow.registry import build
from asyncflow.registry import load as load_named
from asyncflow.rewards.base import Sample, Score
from asyncflow.rewards.delays import Scoring, delayed
from asyncflow.rewards.fallback import with_fallback
from asyncflow.rewards.model import by_model, together
from asyncflow.run_dir import CONFIG_FILE, CRITIC_DIR, JOB_FILE, KEY_FILE, RunDir, control_socket
from asyncflow.telemetry.batches import BatchLog, StepLogs
from asyncflow.telemetry.fingerprints import FingerprintLog, fingerprints_file
from asyncflow.telemetry.hub import Hub, Reporter, driver_clock
from asyncflow.telemetry.spans import SharedLane
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.directory import Places, remote_directory
from asyncflow.transfer_queue.node import serve_unit
from asyncflow.transport import Arena, Credentials, Peer, proxy
from asyncflow.types import Array, HeldWeights, RunError, UserError
from asyncflow.weight_sync import WEIGHT_SYNCS
from asyncflow.weight_sync.base import WeightReceiver, WeightSender, WeightSync, WeightSyncOptions
from asyncflow.workflows import SCHEDULES
from asyncflow.workflows.board import Board
from asyncflow.workflows.critic import Version, add_values, train_critic
from asyncflow.workflows.evaluation import position_of
from asyncflow.workflows.ledger import LedgerService
from asyncflow.workflows.loop import publish, train
from asyncflow.workflows.rollout import Rollout
from asyncflow.workflows.samples import Shape
from asyncflow.workflows.schedule import Schedule
from asyncflow.workflows.tasks import refer, reward, serve

if TYPE_CHECKING:
    from torch import Tensor


S = TypeVar("S", RolloutConfig, TrainConfig, CriticConfig, RewardModelConfig)


class JobFile(msgspec.Struct, frozen=True):
    """What the driver has found out and the workers need beside the configuration."""

    model: str
    max_context: int
    weights_dir: str
    launch: str = ""  # of torchrun, if it has started the trainers
    first: int = 0  # the step that the run begins with: committed before, in earlier lives
    checkpoint: str = ""  # the folder that it goes on from
    door: str = ""  # where workers on other machines find the driver, if there are any
    num_held_out: int = 0  # prompts of each evaluation


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
    rendezvous: Rendezvous


@asynccontextmanager
async def connected(name: str, run_dir: Path, device: Callable[[Config], str]) -> AsyncIterator[Connection]:
    """Connect to the driver of a run directory."""
    called, clock = _called(run_dir), asyncio.get_running_loop().time
    peer, job = await Peer.connect(called.hub, name, credentials=called.credentials), called.job
    if (node := abroad()) is not None:
        model = await model_here(proxy(ModelFiles, peer, "model"), Path(job.model), node.files / "model")
        job = msgspec.structs.replace(job, model=str(model))
        clock = await driver_clock(proxy(Hub, peer, "hub"), clock)
    config, credentials = called.config, called.credentials
    async with joined(peer, name, config, job, device(config), credentials=credentials, clock=clock) as run:
        yield run


@dataclass(frozen=True, slots=True)
class _Called:
    """What a worker finds in its run's folder: `hub` is where the driver is, `job.weights_dir` a private folder of this machine."""

    config: Config
    job: JobFile
    hub: str | Path
    credentials: Credentials | None


def _called(run_dir: Path) -> _Called:
    config = _config_of(run_dir)
    job = msgspec.json.decode((run_dir / JOB_FILE).read_bytes(), type=JobFile)
    credentials = Credentials.load(run_dir / KEY_FILE) if job.door else None
    if (node := abroad()) is None:
        return _Called(config, job, control_socket(run_dir), credentials)
    return _Called(config, msgspec.structs.replace(job, weights_dir=str(node.memory)), job.door, credentials)


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
            rendezvous = proxy(Rendezvous, peer, "rendezvous")
            yield Connection(config, job, shape_of(config), queue, ledger, board, saves, reporter, rendezvous)
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
    score: Callable[[Sample], Awaitable[Score]],
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


async def unit_worker(name: str, run_dir: Path) -> None:
    """Is a storage unit of the run's queue, until it is ended: it outlives who writes and reads there. Raises `RunError` if the
    driver goes first.

    It listens where others find it: by TLS if the driver does, at the address by which this machine reaches it.
    """
    called, number = _called(run_dir), int(name.partition("/")[2])
    config, folder = called.config, Path(called.job.weights_dir)
    own = folder / f"unit-{number}-{uuid.uuid4().hex[:8]}"  # of this life: the files of the one before may still be there
    options, node = unit_options(config), abroad()
    if node is not None and run_dir.is_relative_to(node.files):  # the run's own is not seen here
        options = replace(options, snapshot_dir=None)
    arena = Arena(config.queue.unit_capacity_bytes, own.with_suffix(".arena"))
    await serve_unit(
        called.hub,
        number,
        make_storage(config, number),
        f"tls:{own_address(called.job.door)}:0" if called.job.door else own.with_suffix(".sock"),
        options=options,
        credentials=called.credentials,
        arena=arena,
    )
    raise RunError(f"{name} has lost the driver")


async def reward_worker(name: str, run_dir: Path) -> None:
    """Scores until the run stops."""

    def device(config: Config) -> str:
        return "cpu" if config.reward.model is None else config.reward.model.device

    async with connected(name, run_dir, device) as run, _scoring(run, name) as score:
        await score_groups(run, score, CheckpointTokenizer(Path(run.job.model)).decode)


async def score_groups(run: Connection, score: Callable[[Sample], Awaitable[Score]], decode: Callable[[Array], str]) -> None:
    """A reward worker's work, with what was built for it."""
    work = reward(score, decode, _sample_filter(run), run.shape)
    at_once = run.config.reward.num_workers + 1  # of each lease there is a row at least: every process has one, and another waits
    await serve("reward", run.queue, run.ledger, work, run.reporter.recorder, at_once=at_once)
    run.reporter.recorder.waiting("stop")


async def train_worker(name: str, run_dir: Path) -> None:
    """Trains until the run stops, then saves the model."""
    async with connected(name, run_dir, lambda config: config.train.device) as run:
        spans = run.reporter.recorder
        spans.enter("load")
        meet_at_driver(run.rendezvous, run.job.door)
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
    run_dir = run.config.run_dir
    fingerprints = StepLogs(
        FingerprintLog(run_dir / fingerprints_file(rank) if has_log else None),
        BatchLog(run_dir, run.config.telemetry.keep_batches, rank=rank, first=first),
    )
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


async def critic_worker(name: str, run_dir: Path) -> None:
    """Adds values to complete groups and trains on them until the run stops, then saves the critic."""
    async with connected(name, run_dir, lambda config: config.train.critic.device) as run:
        run.reporter.recorder.enter("load")
        engine = await asyncio.to_thread(_critic_engine, run)
        saving, version = await critic_steps(run, engine)
        with run.reporter.recorder.busy("save"), RunDir(run_dir).saving_model(CRITIC_DIR, version=version) as folder:
            await engine.save(folder)
        run.reporter.recorder.waiting("checkpoint")
        await saving.written()
        run.reporter.recorder.waiting("stop")
        await engine.close()


async def critic_steps(run: Connection, engine: CriticEngine) -> tuple[Saving, int]:
    """A critic worker's work, with what was built for it.

    Returns when the last checkpoint is staged, which is yet to be written, and how many steps the critic has been trained.
    """
    critic = make_algorithm(run.config).critic
    assert critic is not None, "the run has a critic worker"
    first, last, lane = run.job.first, run.config.run.steps, SharedLane(run.reporter.recorder)
    checkpoints, settings = checkpoints_of(run.config), run.config.checkpoint
    saving = Saving(run.saves, checkpoints, settings, engine, lane, first=first, last=last, is_first=False, part=CRITIC_DIR)
    if run.job.checkpoint:
        with lane.busy("load_state", version=first):
            await engine.load_state(Path(run.job.checkpoint) / CRITIC_DIR)
    fingerprints = FingerprintLog(run.config.run_dir / CRITIC_FINGERPRINTS if run.config.telemetry.fingerprints else None)
    version = Version(first)
    async with _beside(add_values(run.queue, run.ledger, engine, run.shape, lane, version)):
        reached = await train_critic(
            run.queue, run.ledger, _schedule(run), engine, critic, run.shape, lane, fingerprints, saving, version
        )
    await saving.save(reached)
    return saving, reached


def _config_of(run_dir: Path) -> Config:
    """A run's configuration, which lies in `run_dir` here, wherever it does on the driver's machine."""
    config = load(run_dir / CONFIG_FILE)
    if os.environ.get(OWN_DEVICES):
        config = _unnumbered(config)
    if config.run_dir == run_dir:
        return config
    return config.model_copy(update={"run": config.run.model_copy(update={"dir": run_dir.parent, "name": run_dir.name})})


def _unnumbered(config: Config) -> Config:
    """With devices by kind alone, `cuda` for `cuda:1`: their numbers are those of a machine all of whose devices are seen."""

    def changed(section: S) -> S:
        return section.model_copy(update={"device": section.device.partition(":")[0]})

    train = changed(config.train).model_copy(update={"critic": changed(config.train.critic)})
    model = config.reward.model and changed(config.reward.model)
    reward = config.reward.model_copy(update={"model": model})
    return config.model_copy(update={"rollout": changed(config.rollout), "train": train, "reward": reward})


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
async def _scoring(run: Connection, name: str) -> AsyncIterator[Callable[[Sample], Awaitable[Score]]]:
    """The reward processes below a worker, which end with it. None are started where another worker scores."""
    config, delays = run.config.reward, run.config.reward.delays
    failures: Counter[str] = Counter()
    scorings: list[Scoring] = []
    async with AsyncExitStack() as stack:
        is_here = config.place == "rollout" or name == "reward"
        if config.parts and is_here:
            pool = reward_pool(run.config, name)
            stack.push_async_callback(pool.close)
            await pool.start()
            failures = pool.failures
            scorings.append(pool.score)
        if config.model is not None and is_here:
            run.reporter.recorder.enter("load")
            engine = await asyncio.to_thread(_reward_model, config.model)
            stack.push_async_callback(engine.close)
            scorings.append(by_model(_computing(engine, run, config.model), config.model.path, failures))
        run.reporter.reward_failures = failures
        weights = [part.weight for part in config.parts.values()] + ([] if config.model is None else [config.model.weight])
        score = scorings[0] if len(scorings) == 1 and config.model is None else _all_of(scorings, weights)
        if config.value_on_failure is not None:
            score = with_fallback(score, value=config.value_on_failure, attempts=config.max_attempts, num_parts=len(weights))
        yield delayed(score, mean_seconds=delays.mean_seconds, salt=delays.salt) if delays.mean_seconds else score


def _all_of(scorings: Sequence[Scoring], weights: Sequence[float]) -> Scoring:
    """Reward processes, if there are any, and then the model."""
    return together(scorings, weights, [len(weights) - 1, 1] if len(scorings) == 2 else [len(weights)])


def _reward_model(model: RewardModelConfig) -> ClassifierEngine:
    options = {"model_path": Path(model.path), "device": model.device, "dtype": model.dtype, "num_threads": model.num_threads}
    return cast(ClassifierEngine, build("reward model engine", "torch", options, CLASSIFIER_ENGINES))


def _computing(engine: ClassifierEngine, run: Connection, model: RewardModelConfig) -> Callable[[Sample], Awaitable[float]]:
    """The model's logit of a sample: of its own token ids, if the model has the policy's tokenizer, or else of the text."""
    files = [(Path(folder) / "tokenizer.json") for folder in (run.job.model, model.path)]
    has_same = files[1].is_file() and files[0].read_bytes() == files[1].read_bytes()
    if model.template is None and has_same:
        return lambda sample: engine.score(np.array([*sample.prompt_ids, *sample.token_ids], np.int64))
    tokenizer, template = CheckpointTokenizer(Path(model.path)), model.template or "{prompt}{response}"

    async def compute(sample: Sample) -> float:
        before, _, after = template.partition("{response}")
        text = before.replace("{prompt}", sample.prompt) + sample.response + after.replace("{prompt}", sample.prompt)
        return await engine.score(tokenizer.encode(text))

    return compute


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


def _critic_engine(run: Connection) -> CriticEngine:
    path = run.config.train.critic.path or run.job.model
    arguments = {"model_path": Path(path), "options": critic_options(run.config)}
    return cast(CriticEngine, build("critic engine", "torch", arguments, CRITIC_ENGINES))


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
        position = position_of(group, run.job.num_held_out) if sample["purpose"] == "eval" else group % shape.numbers_per_step
        if number == 0 and position < count:
            keep(sample)

    return filtered
