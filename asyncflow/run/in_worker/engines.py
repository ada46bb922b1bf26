"""Engines that the configuration names, built in the process that works with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from asyncflow.attestation import CRITIC_DTYPE
from asyncflow.config import Config
from asyncflow.devices import kind_of
from asyncflow.engines.base import CriticEngine, LogProbEngine, RolloutEngine, TrainEngine
from asyncflow.engines.rollout import ROLLOUT_ENGINES
from asyncflow.engines.train import CRITIC_ENGINES, LOG_PROB_ENGINES, OUTSIDE, TRAIN_ENGINES
from asyncflow.model_folder import read_json
from asyncflow.registry import build
from asyncflow.registry import load as load_named
from asyncflow.run.factories import (
    critic_options,
    make_schedule,
    max_retained,
    train_engine_options,
    weights_need_key,
)
from asyncflow.run.helper_devices import helper_devices, num_critic_helpers
from asyncflow.run.in_worker.connection import RunConnection
from asyncflow.run_dir import CRITIC_DIR, KEY_FILE
from asyncflow.types import LoraSpec, UserError
from asyncflow.weight_sync import WEIGHT_SYNCS
from asyncflow.weight_sync.base import WeightSync, WeightSyncOptions

if TYPE_CHECKING:
    from torch import Tensor


def rollout_engine(config: Config, model: Path, max_context: int, device: str) -> RolloutEngine:
    """Loads the model, in the calling thread, to generate on `device`. Raises `UserError` for one that it does not compute."""
    chosen, rollout = config.rollout.engine, config.rollout
    options = {
        "model_path": model,
        "num_slots": rollout.num_slots,
        "max_context": max_context,
        "dtype": rollout.dtype,
        "device": device,
        "num_threads": rollout.least_threads,
        "kv_on_install": rollout.kv_on_install,
        **({} if config.environment is None else {"num_parked": config.num_parked}),
        **({} if config.lora is None else {"lora": config.lora}),
    }
    try:
        engine = cast(RolloutEngine, build("rollout engine", chosen.name, chosen.options, ROLLOUT_ENGINES, options))
    except ValueError as error:  # a model that it does not compute: starting it again would not help
        way_out = "; rollout.engine=transformers generates with any" if chosen.name == "slots" else ""
        raise UserError(f"the rollout engine cannot generate with the model {model}: {error}{way_out}") from error
    _print_remark(engine)
    return engine


def _print_remark(engine: object) -> None:
    """Into the worker's log, if the engine found something."""
    if remark := getattr(engine, "remark", ""):
        print(remark, flush=True)


def train_engine(run: RunConnection) -> TrainEngine:
    """Loads the model, in the calling thread."""
    chosen = run.config.train.engine
    arguments: dict[str, Any] = {
        "model_path": Path(run.job.model),
        "options": replace(
            train_engine_options(run.config, read_json(Path(run.job.model) / "config.json")), helpers=helper_devices(run.config)
        ),
    }
    if chosen.name == OUTSIDE:
        arguments["desk"] = run.desk
    engine = cast(TrainEngine, build("train engine", chosen.name, chosen.options, TRAIN_ENGINES, arguments))
    _print_remark(engine)
    return engine


def reference_engine(config: Config, model: Path) -> LogProbEngine:
    """The frozen reference, where it is a task of its own."""
    arguments = {"model_path": model, "options": train_engine_options(config)}
    return cast(LogProbEngine, build("reference engine", "torch", arguments, LOG_PROB_ENGINES))


def critic_engine(config: Config, model: Path, *, is_trained: bool) -> CriticEngine:
    """Train engine of the critic, from its own model, or from the policy's."""
    path = Path(config.train.critic.path or model)
    options = critic_options(config, read_json(path / "config.json") if is_trained else {})
    if is_trained:
        options = replace(options, helpers=(options.device,) * num_critic_helpers(config))
    arguments = {"model_path": path, "options": options}
    engine = cast(CriticEngine, build("critic engine", "torch", arguments, CRITIC_ENGINES))
    _print_remark(engine)
    return engine


def weight_sync(run: RunConnection, device: str, *, receives: bool = False, base: int | None = None) -> WeightSync:
    """The way of the weights, for a worker that sends them or receives them on `device`. `base`: see `WeightSyncOptions`."""
    config = run.config
    # A sender keeps one version more than is needed: the newest is whole while the next one is written. A receiver's machine has
    # one more where there are evaluators: they fetch older versions.
    one_more = not receives or config.eval.num_workers > 0
    kinds = {kind_of(place) for place in (config.train.device, config.rollout.device)}
    return _weight_sync(
        config,
        directory=Path(run.job.weights_dir),
        keep=make_schedule(config).max_staleness + 1 + one_more,
        max_retained=max_retained(config),
        dtype=config.weight_sync.dtype,
        attested_dtype=config.rollout.dtype,
        base=base,
        num_receivers=config.rollout.num_workers,
        listen=config.weight_sync.listen,
        device=device if len(kinds) == 1 else "cpu",
    )


def critic_weight_sync(run: RunConnection) -> WeightSync:
    """The way of the critic's weights to the workers of `plan.values`, for both ends. They travel as they are, so that values are
    those which the critic would compute."""
    config, listen = run.config, run.config.weight_sync.listen
    return _weight_sync(
        config,
        directory=Path(run.job.weights_dir) / CRITIC_DIR,
        keep=2,  # the newest is whole while the next one is written
        attested_dtype=CRITIC_DTYPE,
        num_receivers=config.plan.values.num_workers,
        listen=listen and f"{listen.rpartition(':')[0]}:0",  # the port that it names is the policy's
        device=config.train.critic.device,
    )


def _weight_sync(config: Config, **options: Any) -> WeightSync:
    chosen = config.weight_sync
    key = config.run_dir / KEY_FILE if weights_need_key(config) else None
    of_run = WeightSyncOptions(deadline_seconds=chosen.deadline_seconds, key=key, **options)
    return cast(WeightSync, build("weight sync", chosen.name, chosen.options, WEIGHT_SYNCS, {"options": of_run}))


def first_tensors(config: Config, model: Path) -> Mapping[str, Tensor]:
    """Tensors of version 0, which every rollout worker has from its own files: the model's, or the adapter's over it; none if that
    begins as the base."""
    lora = config.lora
    if lora is None:
        return tensors_of(model)
    read: Callable[[Path, LoraSpec], Mapping[str, Tensor]] = load_named("function", "asyncflow.engines.lora:read_lora")
    return {} if lora.path is None else read(Path(lora.path), lora)


def base_sum(config: Config, model: Path) -> int | None:
    """Sum over the weights that adapters are for (asyncflow/attestation.py); None for a run without adapters."""
    if config.lora is None:
        return None
    add_up: Callable[[Path, str], int] = load_named("function", "asyncflow.engines.lora:sum_of_base")
    return add_up(model, config.rollout.dtype)


def tensors_of(model: Path) -> Mapping[str, Tensor]:
    """The tensors of a model's files, by name."""
    read: Callable[[Path], Mapping[str, Tensor]] = load_named("function", "asyncflow.engines.rollout.decoder_weights:load_tensors")
    return read(model)
