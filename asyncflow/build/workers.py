"""The mains of the worker processes. Each one connects to the run's driver, builds its engine, runs its loop, and ends with it."""

from __future__ import annotations

import asyncio
import shutil
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import msgspec

from asyncflow.build.driver import control_socket
from asyncflow.build.prepare import TOKENIZER_FILES, make_algorithm, reward_pool, shape_of
from asyncflow.config import Config, load
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.base import LogProbEngine, RolloutEngine, TrainEngine
from asyncflow.engines.rollout import ROLLOUT_ENGINES
from asyncflow.engines.train import LOG_PROB_ENGINES, TRAIN_ENGINES
from asyncflow.registry import build
from asyncflow.rewards.delays import delayed
from asyncflow.telemetry.fingerprints import FINGERPRINTS_FILE, FingerprintLog
from asyncflow.telemetry.hub import Hub, Reporter
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.directory import Places, remote_directory
from asyncflow.transport import Peer, proxy
from asyncflow.weight_sync import WEIGHT_SYNCS
from asyncflow.weight_sync.base import WeightSync
from asyncflow.workflows.board import Board
from asyncflow.workflows.ledger import LedgerService
from asyncflow.workflows.loop import refer, train
from asyncflow.workflows.rollout import Rollout
from asyncflow.workflows.samples import EVALUATION_GROUPS, Shape

CONFIG_FILE = "config.yaml"
JOB_FILE = "job.json"


class JobFile(msgspec.Struct, frozen=True):
    """What the driver has found out and the workers need beside the configuration."""

    model: str
    max_context: int
    weights_dir: str


@dataclass(frozen=True, slots=True)
class Connection:
    """A worker's view of its run."""

    config: Config
    job: JobFile
    shape: Shape
    queue: TransferQueueClient
    ledger: LedgerService
    board: Board
    reporter: Reporter


@asynccontextmanager
async def connected(name: str, run_dir: Path, device: Callable[[Config], str]) -> AsyncIterator[Connection]:
    """Connect to the driver; reports spans and renews leases in the background."""
    config = load(run_dir / CONFIG_FILE)
    job = msgspec.json.decode((run_dir / JOB_FILE).read_bytes(), type=JobFile)
    shape, peer = shape_of(config), await Peer.connect(control_socket(run_dir), name)
    places = Places(remote_directory(peer), name, peer=peer)
    await places.learn()
    places.watch()
    queue = TransferQueueClient(places)
    reporter = Reporter(proxy(Hub, peer, "hub"), name, time.monotonic, device(config), config.telemetry.flush_seconds)
    async with _beside(reporter.run(), queue.renew_held()):
        ledger, board = proxy(LedgerService, peer, "ledger"), proxy(Board, peer, "board")
        yield Connection(config, job, shape, queue, ledger, board, reporter)
    await reporter.flush()
    await places.close()
    await peer.close()


async def rollout_worker(name: str, run_dir: Path) -> None:
    """Generates and scores until the run stops."""
    async with connected(name, run_dir, lambda config: config.rollout.device) as run:
        run.reporter.recorder.enter("load")
        tokenizer, pool, delays = CheckpointTokenizer(Path(run.job.model)), reward_pool(run.config, name), run.config.reward.delays
        try:
            await pool.start()
            engine = await asyncio.to_thread(_rollout_engine, run)
            run.reporter.is_deterministic, run.reporter.reward_failures = engine.is_deterministic, pool.failures
            receiver = _weight_sync(run).receiver()
            loop = Rollout(
                run.queue,
                run.board,
                engine,
                receiver,
                delayed(pool.score, mean_seconds=delays.mean_seconds, salt=delays.salt) if delays.mean_seconds else pool.score,
                tokenizer.decode,
                run.shape,
                run.reporter.recorder,
                _sample_filter(run),
            )
            await loop.run()
            run.reporter.recorder.waiting("stop")
            await receiver.close()
            await engine.close()
        finally:
            await pool.close()


async def train_worker(name: str, run_dir: Path) -> None:
    """Trains until the run stops, then saves the model."""
    async with connected(name, run_dir, lambda config: config.train.device) as run:
        spans = run.reporter.recorder
        spans.enter("load")
        engine = await asyncio.to_thread(_train_engine, run)
        sender = _weight_sync(run).sender(uuid.uuid4().hex)
        fingerprints = FingerprintLog(run_dir / FINGERPRINTS_FILE if run.config.telemetry.fingerprints else None)
        await train(run.queue, run.ledger, run.board, engine, make_algorithm(run.config), sender, run.shape, spans, fingerprints)
        with spans.busy("save"):
            await engine.save(run_dir / "model.partial")
            copy_tokenizer(Path(run.job.model), run_dir / "model.partial")
            (run_dir / "model.partial").rename(run_dir / "model")  # whole or not at all
        spans.waiting("stop")
        await sender.close()
        await engine.close()


async def reference_worker(name: str, run_dir: Path) -> None:
    """Adds the reference's log-probs to complete groups until the run stops."""
    async with connected(name, run_dir, lambda config: config.train.device) as run:
        run.reporter.recorder.enter("load")
        engine = await asyncio.to_thread(_reference_engine, run)
        await refer(run.queue, engine, run.shape, run.reporter.recorder)
        run.reporter.recorder.waiting("stop")
        await engine.close()


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


def _rollout_engine(run: Connection) -> RolloutEngine:
    chosen, rollout = run.config.rollout.engine, run.config.rollout
    options = {
        "model_path": Path(run.job.model),
        "num_slots": rollout.num_slots,
        "max_context": run.job.max_context,
        "dtype": rollout.dtype,
        "device": rollout.device,
        "num_threads": rollout.num_threads,
    }
    return cast(RolloutEngine, build("rollout engine", chosen.name, {**options, **chosen.options}, ROLLOUT_ENGINES))


def _train_engine(run: Connection) -> TrainEngine:
    chosen, train = run.config.train.engine, run.config.train
    options = {
        "model_path": Path(run.job.model),
        "learning_rate": train.learning_rate,
        "warmup_steps": train.warmup_steps,
        "betas": train.betas,
        "weight_decay": train.weight_decay,
        "max_grad_norm": train.max_grad_norm,
        "temperature": run.config.rollout.temperature,
        "seed": run.config.run.seed,
        "device": train.device,
        "dtype": train.dtype,
        "log_prob_chunk_tokens": train.log_prob_chunk_tokens,
        "num_threads": train.num_threads,
        "accumulate": train.accumulate,
        "old": train.old,
        "has_reference": make_algorithm(run.config).needs_reference and train.reference == "fused",
        "frozen_dtype": train.frozen_dtype,
        "offload": train.offload,
        "check_shared_prompt": train.check_shared_prompt,
    }
    return cast(TrainEngine, build("train engine", chosen.name, {**options, **chosen.options}, TRAIN_ENGINES))


def _reference_engine(run: Connection) -> LogProbEngine:
    train = run.config.train
    options = {
        "model_path": Path(run.job.model),
        "dtype": train.frozen_dtype or train.dtype,
        "temperature": run.config.rollout.temperature,
        "device": train.device,
        "log_prob_chunk_tokens": train.log_prob_chunk_tokens,
        "num_threads": train.num_threads,
    }
    return cast(LogProbEngine, build("reference engine", "torch", options, LOG_PROB_ENGINES))


def _weight_sync(run: Connection) -> WeightSync:
    options = {"directory": Path(run.job.weights_dir)}
    return cast(WeightSync, build("weight sync", run.config.weight_sync.name, options, WEIGHT_SYNCS))


def _sample_filter(run: Connection) -> Callable[[Mapping[str, Any]], None]:
    """Keeps the first response of the first few prompts of every step and evaluation."""
    shape, count, keep = run.shape, run.config.telemetry.samples_per_step, run.reporter.keep_sample

    def filtered(sample: Mapping[str, Any]) -> None:
        group, number = divmod(sample["row"], 1 << shape.group_bits)
        position = group - EVALUATION_GROUPS if sample["purpose"] == "eval" else group % shape.prompts_per_step
        if number == 0 and position < count:
            keep(sample)

    return filtered
