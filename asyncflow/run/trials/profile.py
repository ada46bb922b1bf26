"""`asyncflow check --profile`: a layer of a run's model under the run's layout, and what is beside training, as spans.

    config -> its folder <name>-profile -> a process per rank: profile_rank        -> spans of each -> spans.jsonl, trace.json
                                        -> then one process: profile_tasks (tasks_profile.py)

consumes: a configuration
waits for: its ranks, until the deadline
is unblocked by: their end
"""

from __future__ import annotations

import asyncio
import os
import time
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

import msgspec

from asyncflow.cluster.base import WorkerSpec
from asyncflow.cluster.local import LocalCluster
from asyncflow.config import Config, dump, load
from asyncflow.engines.families import check_layout
from asyncflow.model_folder import read_json
from asyncflow.registry import build
from asyncflow.run.factories import make_algorithm, train_engine_options, weights_need_key
from asyncflow.run.fleet import rollout_worker, trainers
from asyncflow.run.models.model_source import RANDOM, model_folder
from asyncflow.run.preparation.prompts import read_source
from asyncflow.run_dir import CONFIG_FILE, KEY_FILE, RunDir, remove_shared_dir
from asyncflow.telemetry.spans import Recorder
from asyncflow.telemetry.trace import SPANS_FILE, SpanLog, read_spans, write_trace
from asyncflow.transport import Credentials
from asyncflow.types import HeldWeights, Layout, RunError
from asyncflow.weight_sync import WEIGHT_SYNCS
from asyncflow.weight_sync.base import WeightSync, WeightSyncOptions

if TYPE_CHECKING:
    from torch import Tensor

REQUEST_FILE = "profile.json"
MeasureTask = Callable[..., AbstractContextManager[object]]
"""`Recorder.busy`: a context whose time is recorded as that of a task."""


class ProfileRequest(msgspec.Struct, frozen=True):
    """Measurements that a rank is to make, beside the configuration."""

    model: str
    weights_dir: str
    tokens: tuple[int, ...]
    repeats: int


async def profile(config: Config, *, tokens: tuple[int, ...], repeats: int, deadline_seconds: float) -> Path:
    """Measure, and return the folder with `spans.jsonl` and `trace.json`, which is made anew.

    `tokens`: packed tokens of the micro-batches that are tried.

    Raises:
        UserError: the configuration names no model that can be trained, or the folder is not one of a run.
        RunError: a rank has failed, or they have not ended within `deadline_seconds`.
    """
    folder = RunDir(config.run.dir / f"{config.run.name}-profile")
    folder.check(may_overwrite=True)
    folder.claim(dump(config))
    is_to_make = config.model.path.startswith(RANDOM)
    model = await model_folder(config, read_source(config, "train") if is_to_make else None, folder.path)
    check_layout(read_json(model / "config.json"), config.layout)
    if weights_need_key(config):
        Credentials.create(folder.path / KEY_FILE)
    weights_dir = folder.make_weights_dir()
    request = ProfileRequest(str(model.resolve()), str(weights_dir), tokens, repeats)
    (folder.path / REQUEST_FILE).write_bytes(msgspec.json.encode(request))
    try:
        ranks = trainers(config, "asyncflow.run.trials.profile:profile_rank", weights_dir)
        tasks = replace(
            rollout_worker(config, "rollout/0"), entry="asyncflow.run.trials.tasks_profile:profile_tasks", max_restarts=0
        )
        async with asyncio.timeout(deadline_seconds):
            for workers in (ranks, [tasks]):  # one after the other: nothing is measured beside something else
                await _until_ended(folder.path, workers)
    except TimeoutError as error:
        raise RunError(
            f"the profile had not ended within {deadline_seconds:g} s: take fewer tokens, or a smaller layout "
            f"({folder.path / 'logs'} has what its ranks said)"
        ) from error
    finally:
        remove_shared_dir(weights_dir)
    _join_spans(folder.path, [worker.name for worker in (*ranks, tasks)])
    write_trace(folder.path)
    return folder.path


async def _until_ended(run_dir: Path, workers: list[WorkerSpec]) -> None:
    cluster = LocalCluster(run_dir)
    try:
        await cluster.start(workers)
        await cluster.wait(lambda name, why, is_final: None)
    finally:
        await cluster.stop(0.0)  # workers that have not ended wait for one that has failed


def profiled_model(folder: Path) -> Path:
    """Folder of the model that a profile is of, from the profile's folder."""
    return Path(msgspec.json.decode((folder / REQUEST_FILE).read_bytes(), type=ProfileRequest).model)


async def profile_rank(name: str, run_dir: Path) -> None:
    """The main of a rank."""
    from asyncflow.engines.train.profile import Amount, profile_layer

    config = load(run_dir / CONFIG_FILE)
    request = msgspec.json.decode((run_dir / REQUEST_FILE).read_bytes(), type=ProfileRequest)
    log, algorithm = SpanLog(spans_of(run_dir, name)), make_algorithm(config)
    recorder = Recorder(name, time.monotonic, log.append, config.train.device)
    recorder.enter("between")
    measure = partial(recorder.busy, layout=layout_name(config.layout))
    pieces = config.train.responses_per_micro_batch or config.rollout.group_size
    weights = profile_layer(
        Path(request.model),
        train_engine_options(config),
        algorithm,
        has_reference=algorithm.needs_reference,
        amount=Amount(tokens=request.tokens, num_responses=pieces, repeats=request.repeats),
        measure=measure,
    )
    if os.environ["RANK"] == "0":
        await time_weights(config, run_dir, Path(request.weights_dir), weights, request.repeats, measure)
    recorder.flush()
    log.close()


def layout_name(layout: Layout) -> str:
    """Name of the layout, as spans have it."""
    return f"dp{layout.dp}-tp{layout.tp}-pp{layout.pp}"


async def time_weights(
    config: Config, run_dir: Path, weights_dir: Path, weights: Mapping[str, Tensor], repeats: int, measure: MeasureTask
) -> None:
    """Publish weights and fetch them, by the run's weight sync, in one process."""
    options = WeightSyncOptions(
        directory=weights_dir / "weights",
        dtype=config.weight_sync.dtype,
        deadline_seconds=config.weight_sync.deadline_seconds,
        key=run_dir / KEY_FILE if weights_need_key(config) else None,
    )
    chosen = config.weight_sync
    sync = cast(WeightSync, build("weight sync", chosen.name, chosen.options, WEIGHT_SYNCS, {"options": options}))
    sender, receiver = sync.sender(uuid.uuid4().hex), sync.receiver("rollout/0")
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    for version in range(repeats + 2):  # the first two make files
        with measure("publish" if version > 1 else "warm_up", bytes=num_bytes, version=version):
            manifest = await sender.publish(version, HeldWeights(weights))
        with measure("fetch" if version > 1 else "warm_up", bytes=num_bytes, version=version):
            await receiver.fetch(manifest)
    await receiver.close()
    await sender.close()


def spans_of(run_dir: Path, name: str) -> Path:
    """File with the spans of one process, until they are joined."""
    return run_dir / f"spans-{name.replace('/', '-')}.jsonl"


def _join_spans(run_dir: Path, names: list[str]) -> None:
    """Join the ranks' span files into one."""
    spans = [span for name in names for span in read_spans(spans_of(run_dir, name))]
    log = SpanLog(run_dir / SPANS_FILE)
    for span in sorted(spans, key=lambda span: span.start):
        log.append(span)
    log.close()
    for name in names:
        spans_of(run_dir, name).unlink()
