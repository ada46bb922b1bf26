"""The mains of the worker processes. Each one connects to the run's driver, builds its engine, runs its loop, and ends with it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AbstractContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from asyncflow.cluster.remote_node import own_address, remote_node
from asyncflow.config import Config
from asyncflow.control.critic_versions import CriticVersions
from asyncflow.control.modes import Periodic
from asyncflow.control.signal import Signal
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.base import CriticEngine, LogProbEngine, RolloutEngine, TrainEngine
from asyncflow.loops.algorithm1 import probed, publish, train
from asyncflow.loops.context import LoopContext, ResponseScoring
from asyncflow.loops.critic import add_values, publish_critic, train_critic
from asyncflow.loops.episode import EpisodePlayer
from asyncflow.loops.evaluation import is_evaluator, position_of
from asyncflow.loops.rollout import FIRST, EngineVersion, Rollout, ServedWeights
from asyncflow.loops.samples import EVALUATE_TASK
from asyncflow.loops.tasks import reference, reward, serve
from asyncflow.rewards.base import Sample, Score
from asyncflow.run.factories import make_algorithm, make_schedule, make_storage, shape_of_evaluation, unit_options
from asyncflow.run.helper_devices import generating_device
from asyncflow.run.in_worker.connection import RunConnection, background, called_by, connected, next_attempt
from asyncflow.run.in_worker.engines import (
    base_sum,
    critic_engine,
    critic_weight_sync,
    first_tensors,
    reference_engine,
    rollout_engine,
    tensors_of,
    train_engine,
    weight_sync,
)
from asyncflow.run.in_worker.episodes import capture_endpoint, environments, episode_player
from asyncflow.run.in_worker.scoring import scoring
from asyncflow.run.models.model_files import copy_tokenizer
from asyncflow.run.services.cores import following_threads, lend
from asyncflow.run.services.rendezvous import meet_at_driver
from asyncflow.run.state.driver_state import TRAINER_DIR, VERSIONS_DIR, version_of
from asyncflow.run.state.resume import CRITIC_FINGERPRINTS
from asyncflow.run.state.saving import CheckpointWriter
from asyncflow.run_dir import CRITIC_DIR, RunDir
from asyncflow.telemetry.batches import BatchLog, StepLogs
from asyncflow.telemetry.fingerprints import FingerprintLog, fingerprints_file
from asyncflow.telemetry.spans import Recorder, SharedLane
from asyncflow.telemetry.tokens import TokenLog
from asyncflow.transfer_queue.node import serve_unit
from asyncflow.transport import Arena
from asyncflow.types import Array, HeldWeights, RunError
from asyncflow.weight_sync.base import WeightReceiver, WeightSender

if TYPE_CHECKING:
    from asyncflow.engines.train.helpers import Helpers


class ToClose(Protocol):
    """An engine, or an end of the weight sync."""

    async def close(self) -> None:
        """Free what it holds."""


async def rollout_worker(name: str, run_dir: Path) -> None:
    """Generates, and scores unless another worker does, until the run stops; an evaluator, by its name, evaluations alone."""

    def device(config: Config) -> str:
        return generating_device(config, name)

    engine: RolloutEngine | None = None
    has: EngineVersion | None = FIRST
    while True:
        async with connected(name, run_dir, device) as run, scoring(run, name) as score:
            model, place = Path(run.job.model), device(run.config)
            if engine is None:
                run.reporter.recorder.enter("load")
                engine = await asyncio.to_thread(rollout_engine, run.config, model, run.job.max_context, place)
            receiver, tokenizer = weight_sync(run, place, receives=True).receiver(name), CheckpointTokenizer(model)
            weights = ServedWeights(receiver, partial(first_tensors, run.config, model), has)
            async with environments(run, name) as pool, capture_endpoint(pool) as endpoint:
                episodes = None if pool is None else episode_player(run, engine, pool, tokenizer, endpoint)
                await roll_out(run, engine, weights, score, tokenizer.decode, episodes, evaluates=is_evaluator(name))
            has = weights.has
            reset: Callable[[], Awaitable[None]] | None = getattr(engine, "reset", None)
            if reset is None or not await run.handover.stays():
                break
        await reset()  # with the engine it stays for the attempt that follows
        await next_attempt(run_dir, run.job, run.config.run.stall_timeout_seconds)
    await engine.close()


async def roll_out(
    run: RunConnection,
    engine: RolloutEngine,
    weights: ServedWeights,
    score: Callable[[Sample], Awaitable[Score]],
    decode: Callable[[Array], str],
    episodes: EpisodePlayer | None = None,
    *,
    evaluates: bool = False,
) -> None:
    """A rollout worker's work, or an evaluator's, with what was built for it; the receiver is closed at the end."""
    task, schedule, shape = "rollout", make_schedule(run.config), run.shape
    if evaluates:
        task, schedule, shape = EVALUATE_TASK, Periodic(), shape_of_evaluation(run.config, run.job.num_held_out)
    following, why = following_threads(run.config, run.cores, "rollout", engine)
    run.reporter.why_not_deterministic = why or engine.why_not_deterministic
    await run.reporter.flush()  # what a checkpoint holds depends on it
    context = replace(loop_context(run), schedule=schedule, shape=shape)
    by_worker = ResponseScoring(score if run.config.reward.place == "rollout" else None, decode, _sample_filter(run))
    async with background(*following):
        await Rollout(context, engine, weights, by_worker, task, episodes, run.config.episodes_at_once).run()
    await leave(run, weights.receiver)


async def unit_worker(name: str, run_dir: Path) -> None:
    """Serve as a storage unit of the run's queue, until it is ended: it outlives the workers that write and read there. Raises
    `RunError` if the driver goes first.

    It listens where others find it: by TLS if the driver does, at the address by which this machine reaches it.
    """
    called, number = called_by(run_dir), int(name.partition("/")[2])
    config, folder = called.config, Path(called.job.weights_dir)
    own = folder / f"unit-{number}-{uuid.uuid4().hex[:8]}"  # of this attempt: the files of the one before may still be there
    options, node = unit_options(config), remote_node()
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

    async with connected(name, run_dir, device) as run, scoring(run, name) as score:
        await score_groups(run, score, CheckpointTokenizer(Path(run.job.model)).decode)


async def score_groups(run: RunConnection, score: Callable[[Sample], Awaitable[Score]], decode: Callable[[Array], str]) -> None:
    """A reward worker's work, with what was built for it."""
    work = reward(ResponseScoring(score, decode, _sample_filter(run)), run.shape)
    at_once = run.config.reward.num_workers + 1  # of each lease there is a row at least: every process has one, and another waits
    await serve("reward", loop_context(run), work, at_once=at_once)
    await leave(run)


async def train_worker(name: str, run_dir: Path) -> None:
    """Trains until the run stops, then saves the model."""
    async with connected(name, run_dir, lambda config: config.train.device) as run:
        spans = run.reporter.recorder
        spans.enter("load")
        meet_at_driver(run.rendezvous, run.job.door)
        engine = await asyncio.to_thread(train_engine, run)
        if (rank := engine.data_parallel_rank) is None:
            spans.waiting("leader")
            async with background(*_lending(run, "trainer", engine)):
                await engine.follow(make_algorithm(run.config), partial(_call_state, spans))
            return
        sender = None
        if rank == 0:
            base = await asyncio.to_thread(base_sum, run.config, Path(run.job.model))
            sender = weight_sync(run, run.config.train.device, base=base).sender(uuid.uuid4().hex)
        async with _with_threads(run, "trainer", engine), background(*_lending(run, "trainer", engine)):
            saving = await train_steps(run, engine, sender)
        with spans.busy("save"), RunDir(run_dir).saving_model(is_first=rank == 0) as folder:
            await engine.save(folder)
            if rank == 0:
                copy_tokenizer(Path(run.job.model), folder)
        spans.waiting("checkpoint")
        await saving.written()
        await leave(run, sender, engine)


async def leave(run: RunConnection, *ends: ToClose | None) -> None:
    """Wait for the run's end, when the worker has nothing left to do, and close what is its own of these."""
    run.reporter.recorder.waiting("stop")
    for end in ends:
        if end is not None:
            await end.close()


@asynccontextmanager
async def _with_threads(run: RunConnection, pool: str, engine: object) -> AsyncIterator[None]:
    """An engine uses the threads that its pool is dealt."""
    following, why = following_threads(run.config, run.cores, pool, engine)
    run.reporter.why_not_deterministic = run.reporter.why_not_deterministic or why
    async with background(*following):
        yield


def _lending(run: RunConnection, pool: str, engine: object) -> list[Coroutine[Any, Any, None]]:
    """Coroutine that lends cores, or devices, to an engine's helpers; none where it has no helpers."""
    helpers: Helpers[Any] | None = getattr(engine, "helpers", None)
    return [] if helpers is None else [lend(run.cores, pool, helpers, run.reporter.recorder)]


def _call_state(spans: Recorder, call: str) -> AbstractContextManager[None]:
    """State of a trainer's lane during a call that it follows: gathering weights is no work on a step, see `Publishing`."""
    return spans.held("publish") if call == "gather" else spans.busy(call)


async def train_steps(run: RunConnection, engine: TrainEngine, sender: WeightSender | None) -> CheckpointWriter:
    """A leading trainer's work, with what was built for it; the first one of them has a `sender`.

    Returns when the last checkpoint is staged; it is yet to be written.
    """
    first, spans = run.job.first, run.reporter.recorder
    saving = CheckpointWriter(run.config, run.saves, engine, spans, run.job, is_first=sender is not None)
    if run.job.checkpoint:
        await _go_on(run, engine, sender)
    rank, has_log = engine.data_parallel_rank or 0, run.config.telemetry.fingerprints
    run_dir = run.config.run_dir
    fingerprints = StepLogs(
        *([FingerprintLog(run_dir / fingerprints_file(rank))] if has_log else []),
        BatchLog(run_dir, run.config.telemetry.keep_batches, rank=rank, first=first),
        TokenLog(run.reporter.keep_tokens, run.shape.is_sampled),
    )
    version = await train(loop_context(run), engine, make_algorithm(run.config), sender, fingerprints, saving, first)
    await saving.save(version)
    return saving


async def _go_on(run: RunConnection, engine: TrainEngine, sender: WeightSender | None) -> None:
    """Be where the run's checkpoint was written. The rollout workers get its weights, and older ones that are still needed."""
    folder, spans = Path(run.job.checkpoint), run.reporter.recorder
    with spans.busy("load_state", version=run.job.first):
        await engine.load_state(folder / TRAINER_DIR)
    with spans.held("publish"):
        for path in sorted((folder / VERSIONS_DIR).glob("*")) if sender is not None else ():
            weights = HeldWeights(tensors_of(path) if (path / "model.safetensors").stat().st_size else {})
            await publish(version_of(path), weights, sender, run.versions)
        probe = await probed(engine, loop_context(run), run.job.first)
        if run.job.first == run.job.began:  # a fork generates its first step with the weights that it begins with
            for version in range(make_schedule(run.config).interval(run.job.first).high, run.job.first):
                await publish(version, await engine.export_weights(), sender, run.versions, probe)
        await publish(run.job.first, await engine.export_weights(), sender, run.versions, probe)


async def reference_worker(name: str, run_dir: Path) -> None:
    """Adds the reference's log-probs to complete groups until the run stops."""
    async with connected(name, run_dir, lambda config: config.train.device) as run:
        run.reporter.recorder.enter("load")
        engine = await asyncio.to_thread(reference_engine, run.config, Path(run.job.model))
        async with _with_threads(run, "reference", engine):
            await add_log_probs(run, engine)


async def add_log_probs(run: RunConnection, engine: LogProbEngine) -> None:
    """A reference worker's work, with what was built for it, which is closed at the end."""
    await serve("reference", loop_context(run), reference(engine, run.shape))
    await leave(run, engine)


async def critic_worker(name: str, run_dir: Path) -> None:
    """Trains on complete groups, and adds values to them unless other workers do, until the run stops, then saves the critic."""
    async with connected(name, run_dir, lambda config: config.train.critic.device) as run:
        run.reporter.recorder.enter("load")
        engine = await asyncio.to_thread(partial(critic_engine, run.config, Path(run.job.model), is_trained=True))
        sender = critic_weight_sync(run).sender(uuid.uuid4().hex) if run.config.plan.values.num_workers else None
        async with _with_threads(run, "critic", engine), background(*_lending(run, "critic", engine)):
            saving, version = await critic_steps(run, engine, sender)
        with run.reporter.recorder.busy("save"), RunDir(run_dir).saving_model(CRITIC_DIR, version=version) as folder:
            await engine.save(folder)
        run.reporter.recorder.waiting("checkpoint")
        await saving.written()
        await leave(run, sender, engine)


async def critic_steps(run: RunConnection, engine: CriticEngine, sender: WeightSender | None) -> tuple[CheckpointWriter, int]:
    """A critic worker's work, with what was built for it: a `sender`, where other workers add the values.

    Returns when the last checkpoint is staged, which is yet to be written, and how many steps the critic has been trained.
    """
    critic = make_algorithm(run.config).critic
    assert critic is not None, "the run has a critic worker"
    first, lane = run.job.first, SharedLane(run.reporter.recorder)
    saving = CheckpointWriter(run.config, run.saves, engine, lane, run.job, is_first=False, part=CRITIC_DIR)
    versions = CriticVersions(Signal(), first) if sender is None else run.critic_versions
    published = partial(publish_critic, engine=engine, sender=sender, versions=versions, spans=lane)
    if run.job.checkpoint:
        with lane.busy("load_state", version=first):
            await engine.load_state(Path(run.job.checkpoint) / CRITIC_DIR)
        await published(first)
    has_log = run.config.telemetry.fingerprints
    fingerprints = StepLogs(*([FingerprintLog(run.config.run_dir / CRITIC_FINGERPRINTS)] if has_log else []))
    context = replace(loop_context(run), spans=lane)
    async with background(*([add_values(context, engine, versions)] if sender is None else [])):
        reached = await train_critic(context, engine, critic, fingerprints, saving, published, first)
    await saving.save(reached)
    return saving, reached


async def values_worker(name: str, run_dir: Path) -> None:
    """Adds values to complete groups, by a copy of the critic, until the run stops."""
    async with connected(name, run_dir, lambda config: config.train.critic.device) as run:
        run.reporter.recorder.enter("load")
        engine = await asyncio.to_thread(partial(critic_engine, run.config, Path(run.job.model), is_trained=False))
        async with _with_threads(run, "values", engine):
            await compute_values(run, engine, critic_weight_sync(run).receiver(name))


async def compute_values(run: RunConnection, engine: CriticEngine, receiver: WeightReceiver) -> None:
    """Work of a values worker, with what was built for it, which is closed at the end."""
    run.reporter.recorder.waiting("rows")
    await add_values(loop_context(run), engine, run.critic_versions, receiver)
    await leave(run, receiver, engine)


def loop_context(run: RunConnection) -> LoopContext:
    """Context of the worker's loops."""
    schedule, published_dtype = make_schedule(run.config), run.config.weight_sync.dtype
    return LoopContext(run.queue, run.ledger, run.versions, schedule, run.shape, run.reporter.recorder, published_dtype)


def _sample_filter(run: RunConnection) -> Callable[[Mapping[str, Any]], None]:
    """Keeps the first response of the first few prompts of every step and evaluation, and all of a step's first prompt."""
    shape, keep = run.shape, run.reporter.keep_sample

    def filtered(sample: Mapping[str, Any]) -> None:
        if sample["purpose"] != "eval":
            is_kept = shape.is_sampled(sample["row"])
        else:
            group, number = divmod(sample["row"], 1 << shape.group_bits)
            is_kept = number == 0 and position_of(group, run.job.num_held_out) < shape.samples_per_step
        if is_kept:
            keep(sample)

    return filtered
