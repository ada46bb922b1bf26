"""Values that follow from the configuration before anything is started, and the parts that it names."""

from __future__ import annotations

import hashlib
import inspect
import re
import socket
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields as fields_of
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, get_type_hints

import msgspec

from asyncflow.algorithms import ALGORITHMS
from asyncflow.algorithms.base import Algorithm, Critic
from asyncflow.algorithms.off_policy import check_correction, default_correction
from asyncflow.attestation import NO_PROBING, Probing, new_probing
from asyncflow.config import Config, TrainConfig
from asyncflow.control import SCHEDULES
from asyncflow.control.ledger import TaskPlan, UpdatePlan
from asyncflow.control.schedule import Schedule
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.devices import CPU, kind_of
from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.rollout import ROLLOUT_ENGINE_WHYS
from asyncflow.engines.train import OUTSIDE
from asyncflow.environments import ENVIRONMENTS, TURN_FORMATS
from asyncflow.environments.base import TurnFormat
from asyncflow.environments.pool import EnvironmentPool
from asyncflow.loops.episode import EpisodeLimits
from asyncflow.loops.samples import SELECT_TASK, UPDATE_TASK, VALUES_TASK, Shape, schema
from asyncflow.model_folder import read_json
from asyncflow.options import misfit
from asyncflow.registry import build, load, resolve
from asyncflow.rewards import REWARDS
from asyncflow.rewards.base import RewardPart
from asyncflow.rewards.pool import RewardPool
from asyncflow.run.helper_devices import num_passing
from asyncflow.run_dir import SNAPSHOTS_DIR
from asyncflow.sandbox.limits import ProcessLimits
from asyncflow.settings import Choice
from asyncflow.transfer_queue import STORAGES
from asyncflow.transfer_queue.sampler.checks import check_sampler
from asyncflow.transfer_queue.schema import Schema
from asyncflow.transfer_queue.storage.base import QueueOwner, Storage
from asyncflow.transfer_queue.unit import UnitOptions
from asyncflow.types import Layout, UserError, group_bits_for
from asyncflow.weight_sync import WEIGHT_SYNC_FACTS, WEIGHT_SYNCS
from asyncflow.weight_sync.base import WeightSyncFacts

NO_FIELDS: Final[Mapping[str, Any]] = {}
PASS_TOKENS_CPU: Final = 1024
"""Tokens of a pass on a CPU, for models of more than 128 hidden elements. Not swept: a product gains little above some 900."""
PASS_TOKENS: Final = 8192
"""Tokens of a pass on an accelerator: from some thousand on, matrix products do not wait for memory (docs/passes.md)."""
PASS_ENGINES: Final = ("torch", "deepspeed", "megatron")
"""Train engines that make passes of several micro-batches."""
CANDIDATES = 10
"""Times a step's prompts: so many a step may go through to find those whose rewards vary, unless it is told otherwise."""
TRAINED = ("normaliser", "advantages", "loss")
"""Members that every algorithm, and its critic, must have."""
MAY_BE_LEFT_OUT = (
    "is_zero_without_advantages", "needs_reference_ahead", "waits_for_batch", "critic", "held_steps", "wants_varied_groups",
    "needs_turns",
)  # fmt: skip
"""Members that an algorithm of the user's own may lack."""


def group_bits_of(config: Config) -> int:
    """Bits of a row's number in its group, for which no part of the run is imported."""
    return group_bits_for(max(config.rollout.group_size, config.eval.samples_per_prompt))


def shape_of(config: Config) -> Shape:
    """The run's fixed numbers."""
    prompts = config.train.prompts_per_step
    most = (config.train.max_candidates or CANDIDATES * prompts) if make_algorithm(config).wants_varied_groups else None
    return Shape(
        prompts_per_step=prompts,
        group_size=config.rollout.group_size,
        group_bits=group_bits_of(config),
        seed=config.sampling_seed,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        rows_per_micro_batch=config.train.responses_per_micro_batch or config.rollout.group_size,
        epochs=config.train.epochs,
        mini_batches=config.train.mini_batches,
        has_reward_parts=config.reward.has_parts,
        skips_zero_advantages=skips_zero_advantages(config),
        max_candidates=most,
        oversampling=config.train.oversampling,
        max_turns=None if config.environment is None else config.episodes.max_turns,
        top_p=config.rollout.top_p,
        top_k=config.rollout.top_k,
        min_p=config.rollout.min_p,
        stop=config.rollout.stop,
        samples_per_step=config.telemetry.samples_per_step,
    )


def shape_of_evaluation(config: Config, num_prompts: int) -> Shape:
    """Shape of an evaluation, as an evaluator sees it: the evaluators share all of its groups."""
    return replace(
        shape_of(config),
        prompts_per_step=num_prompts * (1 + config.eval.greedy),
        group_size=config.eval.samples_per_prompt,
        max_candidates=None,
    )


def task_plan(config: Config) -> TaskPlan:
    """The tasks of a step, for the ledger."""
    tasks, prompts = tasks_before_training(config), config.train.prompts_per_step
    chosen_by = SELECT_TASK if SELECT_TASK in tasks else ""
    if VALUES_TASK in tasks:
        return TaskPlan(tasks, ("train", UPDATE_TASK), by_step=(VALUES_TASK,), chosen_by=chosen_by, num_members=prompts)
    return TaskPlan(tasks, chosen_by=chosen_by, num_members=prompts)


def skips_zero_advantages(config: Config) -> bool:
    """Whether rows without advantages are left out, if the algorithm allows it. A process from outside has a loss of its own: it
    is given all rows, unless it is to be given fewer."""
    asked = config.train.skip_zero_advantages
    return config.train.engine.name != OUTSIDE if asked == "auto" else asked


def leaves_out_equal_rewards(config: Config) -> bool:
    """Whether a group whose rewards are all equal is left out of the policy's training, most likely: where its advantages are of
    its rewards alone, they are 0."""
    algorithm = make_algorithm(config)
    are_of_rewards = algorithm.critic is None and not algorithm.needs_reference_ahead
    return skips_zero_advantages(config) and algorithm.is_zero_without_advantages and are_of_rewards


def update_plan(config: Config, fields: Mapping[str, Any] = NO_FIELDS) -> UpdatePlan:
    """The updates of a step, for the ledger. `fields`: of the model's `config.json`.

    A rank trains a group in a round, and more that are there up to the tokens of a pass, or, if it is the only one, of as many
    passes as helpers compute beside it; in a pipeline it trains as many as make up the micro-batches that go through it together,
    or as many passes. Where passes are one micro-batch each, helpers have some of their own all the same."""
    pieces = -(-config.rollout.group_size // (config.train.responses_per_micro_batch or config.rollout.group_size))
    num_passes = config.train.pipeline_micro_batches if config.layout.pp > 1 else 1 + num_passing(config)
    groups = -(-num_passes // pieces) if config.layout.pp > 1 else 1
    tokens = tokens_per_pass(config, fields)
    if tokens is None and kind_of(config.train.device) != CPU and num_passing(config):
        tokens = PASS_TOKENS
    return UpdatePlan(
        config.layout.dp,
        groups,
        None if tokens is None else tokens * num_passes,
        config.train.epochs,
        config.train.mini_batches,
    )


def tokens_per_pass(config: Config, fields: Mapping[str, Any]) -> int | None:
    """Packed tokens up to which several micro-batches are computed in one pass; None: each by itself. `fields`: of the model's
    `config.json`.

    By itself is each where `train.responses_per_micro_batch` has made them small, by an engine of the user's own or outside, and
    with exact sums on an accelerator (whose library may compute a row otherwise in a longer pass); unless a number says otherwise.
    """
    return _tokens_per_pass(config.train, fields, config.train.device)


def critic_tokens_per_pass(config: Config, fields: Mapping[str, Any]) -> int | None:
    """`tokens_per_pass` of the critic, by its device. A round of it has as many tokens as one of the policy. `fields`: of the
    `config.json` of its own model, see `critic_fields`."""
    return _tokens_per_pass(config.train, fields, config.train.critic.device)


def critic_fields(config: Config) -> Mapping[str, Any]:
    """Fields of the `config.json` of the critic's own model, which may be the policy's."""
    return read_json(Path(config.train.critic.path or config.model.path) / "config.json")


def _tokens_per_pass(train: TrainConfig, fields: Mapping[str, Any], device: str) -> int | None:
    if train.tokens_per_micro_batch != "auto":
        return train.tokens_per_micro_batch
    is_chosen, is_on_cpu = train.responses_per_micro_batch is not None, kind_of(device) == CPU
    if "hidden_size" not in fields or is_chosen or train.engine.name not in PASS_ENGINES:
        return None
    if train.accumulate == "exact" and not is_on_cpu:
        return None
    if not is_on_cpu:
        return PASS_TOKENS
    # In a narrow model what a call costs counts more than its arithmetic.
    return PASS_TOKENS_CPU * max(1, 256 // int(fields["hidden_size"]))


def queue_schema(config: Config) -> Schema:
    """The columns and tasks of the run's queue. Raises `UserError` for a sampler of a task that there is not."""
    made = schema(
        shape_of(config).group_bits,
        config.queue.lease_seconds,
        config.reward.max_attempts,
        tasks_before_training(config),
        has_reward_parts=config.reward.has_parts,
        has_evaluators=config.eval.num_workers > 0,
        has_episodes=config.environment is not None,
    )
    specs = {task.name: task for task in made.tasks}
    for name, chosen in config.queue.samplers.items():
        if name not in specs:
            raise UserError(f"queue.samplers.{name}: this run has no task {name!r}: its tasks are {', '.join(specs)}")
        specs[name] = msgspec.structs.replace(specs[name], sampler=chosen.name, sampler_options=chosen.options)
    return msgspec.structs.replace(made, tasks=tuple(specs.values()))


def check_samplers(config: Config) -> None:
    """Raises `UserError` where a sampler that the user has chosen cannot serve this run."""
    made = queue_schema(config)
    for name in config.queue.samplers:
        try:
            check_sampler(made.task(name), made)
        except UserError as error:
            raise UserError(f"queue.samplers.{name}: {error}") from error


def critic_folder(config: Config) -> Path | None:
    """The model that the critic starts from; None where there is no critic, or it starts from the policy's."""
    path = config.train.critic.path
    return Path(path) if path is not None and make_algorithm(config).critic is not None else None


def probing_of(config: Config, fields: Mapping[str, Any], max_context: int) -> Probing:
    """Probe of a run. `fields`: the model's `config.json`."""
    vocabulary = fields.get("vocab_size")
    if config.train.engine.name == OUTSIDE or not vocabulary:
        return NO_PROBING
    return new_probing(vocabulary, max_context, [config.train.dtype, config.rollout.dtype])


def train_engine_options(config: Config, fields: Mapping[str, Any] = NO_FIELDS) -> TrainEngineOptions:
    """Options of every train engine: keys of `train` that have their names, and others that follow from the configuration.
    `fields`: of the model's `config.json`."""
    train, algorithm = config.train, make_algorithm(config)
    names = {option.name for option in fields_of(TrainEngineOptions)} & TrainConfig.model_fields.keys()
    options: dict[str, Any] = {name: getattr(train, name) for name in names}
    options |= {
        "layout": config.layout,
        "num_updates": max(0, config.run.steps - algorithm.held_steps) * train.epochs * train.mini_batches,
        "temperature": config.rollout.temperature,
        "seed": config.run.seed,
        "num_threads": train.least_threads,
        "is_corrected": algorithm.correction != "none",
        "has_reference": algorithm.needs_reference and train.reference == "fused",
        "lora": config.lora,
        "tokens_per_pass": tokens_per_pass(config, fields),
        "helpers": (),  # the trainer's process names their devices
    }
    return TrainEngineOptions(**options)


def critic_options(config: Config, fields: Mapping[str, Any] = NO_FIELDS) -> TrainEngineOptions:
    """Options of the critic's engine: one model on one device, without old policy or reference. `fields`: of the `config.json` of
    its own model."""
    train, critic = config.train, config.train.critic
    return replace(
        train_engine_options(config),
        layout=Layout(),
        tokens_per_pass=critic_tokens_per_pass(config, fields),
        learning_rate=critic.learning_rate,
        warmup_steps=critic.warmup_steps,
        min_learning_rate=critic.learning_rate * train.min_learning_rate / train.learning_rate,
        num_updates=config.run.steps * train.epochs * train.mini_batches,
        device=critic.device,
        old="current",
        is_corrected=False,
        has_reference=False,
        lora=None,
    )


def make_schedule(config: Config) -> Schedule:
    """The schedule of the configuration. It is stateless, so every process has one of its own.

    Raises `UserError` where there is none, or one that lacks a part of the contract.
    """
    return schedule_of(config.schedule)


def schedule_of(chosen: Choice) -> Schedule:
    """The schedule that is chosen. Raises as `make_schedule`."""
    schedule: Schedule = build("schedule", chosen.name, chosen.options, SCHEDULES)
    parts = [*Schedule.__annotations__, *(name for name, part in vars(Schedule).items() if inspect.isfunction(part))]
    _check_contract(f"the schedule {chosen.name}", schedule, Schedule, [name for name in parts if not name.startswith("_")])
    return schedule


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm of the configuration, which corrects for the schedule's staleness unless told otherwise (docs/off_policy.md).

    One of the user's own says itself what it does. Raises `UserError` when there is none, one that lacks a part of the contract, or
    one that is wrong for rows as stale as the schedule's under `train.old`.
    """
    schedule = make_schedule(config)
    old, options = config.train.old, config.algorithm.options
    if config.algorithm.name in ALGORITHMS:
        correction = default_correction(old, schedule.max_staleness, is_truncated=config.rollout.is_truncated)
        options = {"correction": correction, **options}
    algorithm: Algorithm = build("algorithm", config.algorithm.name, options, ALGORITHMS)
    own = f"the algorithm {config.algorithm.name}"
    _check_objective(own, algorithm, Algorithm, (*TRAINED, "needs_reference", "correction", "is_token_local"))
    if algorithm.critic is not None:
        _check_objective(f"the critic of {own}", algorithm.critic, Critic, TRAINED)
    check_correction(algorithm.correction, old, schedule.max_staleness, is_truncated=config.rollout.is_truncated)
    return algorithm


def _check_objective(what: str, trained: Any, contract: type, needed: Sequence[str]) -> None:
    """Check that an algorithm, or its critic, keeps a contract, and fill in what it may leave out. Raises `UserError`."""
    _check_contract(what, trained, contract, needed)
    for name in MAY_BE_LEFT_OUT:
        if not hasattr(trained, name) and hasattr(contract, name):
            setattr(trained, name, getattr(contract, name))
    if trained.waits_for_batch:
        _check_contract(what, trained, contract, ("statistics", "normalised"), ", which waits_for_batch needs")


def _check_contract(what: str, made: Any, contract: type, needed: Sequence[str], why: str = "") -> None:
    """Check that a user's object has these parts of a contract, and that its values are of the contract's kinds. `why` follows what
    is not there. Raises `UserError`."""
    where = f"{contract.__module__.replace('.', '/')}.py says what is needed"
    for name in needed:
        promised, own = getattr(contract, name, None), getattr(made, name, None)
        if not hasattr(made, name) or (callable(promised) and getattr(own, "__func__", own) is promised):
            raise UserError(f"{what} has no {name!r}{why}: {where}")
        if callable(promised) and not callable(own):
            raise UserError(f"{what} has {name!r}, which is no function: {where}")
    for name, kind in _kinds_of(contract).items():
        if hasattr(made, name) and (wrong := misfit(getattr(made, name), kind)):
            raise UserError(f"{what}: {name} {wrong}; {where}")


@lru_cache
def _kinds_of(contract: type) -> Mapping[str, Any]:
    return get_type_hints(contract)


def why_never_deterministic(config: Config) -> str:
    """Sentence that says why the rollout engine cannot be deterministic, if that is known before it is built; else ""."""
    chosen = config.rollout.engine
    if chosen.name not in ROLLOUT_ENGINE_WHYS:
        return ""
    why: str = build("rollout engine", chosen.name, chosen.options, ROLLOUT_ENGINE_WHYS)
    return why


def tasks_before_training(config: Config) -> tuple[str, ...]:
    """The tasks that a row passes before it is trained, in order."""
    has = {
        "reward": config.reward.place == "task",
        SELECT_TASK: make_algorithm(config).wants_varied_groups,
        "reference": config.train.reference == "task",
        VALUES_TASK: make_algorithm(config).critic is not None,
    }
    return ("rollout", *(task for task in has if has[task]))


def make_storage(config: Config, number: int) -> Storage:
    """Storage in which a unit of the run's queue keeps rows."""
    chosen = config.queue.storage
    storage: Storage = build("queue storage", chosen.name, chosen.options, STORAGES, {"unit": number})
    return storage


def new_owner(config: Config) -> QueueOwner:
    """Owner of what the queue of a new attempt stores. A run is known by its folder on this machine."""
    place = hashlib.sha256(f"{socket.gethostname()}:{config.run_dir.resolve()}".encode()).hexdigest()[:8]
    return QueueOwner(f"{re.sub(r'[^A-Za-z0-9._-]', '_', config.run.name)}-{place}", uuid.uuid4().hex[:12])


def unit_options(config: Config) -> UnitOptions:
    """Options of each storage unit, on the machine that it is on."""
    queue = config.queue
    return UnitOptions(
        capacity_rows=queue.capacity_rows,
        capacity_bytes=queue.unit_capacity_bytes,
        snapshot_dir=config.run_dir / SNAPSHOTS_DIR,
    )


def weight_sync_facts(config: Config) -> WeightSyncFacts:
    """Facts that the chosen weight sync states. Raises `UserError` when there is none, or it lacks a part of the contract."""
    name = config.weight_sync.name
    target = resolve("weight sync", name, WEIGHT_SYNCS)
    if name in WEIGHT_SYNC_FACTS:
        return WEIGHT_SYNC_FACTS[name]
    chosen = load("weight sync", target)
    facts = getattr(chosen, "facts", WeightSyncFacts())
    lacks = [end for end in ("sender", "receiver") if not callable(getattr(chosen, end, None))]
    if lacks or not isinstance(facts, WeightSyncFacts):
        what = f"has no {lacks[0]!r}" if lacks else f"has {facts!r} as its facts, which are no WeightSyncFacts"
        raise UserError(f"weight sync {name!r} {what}: asyncflow/weight_sync/base.py says what is needed")
    return facts


def max_retained(config: Config) -> int:
    """Older versions whose weights stay for evaluators at most: one that they serve, and one that waits."""
    return 2 if config.eval.num_workers else 0


def weights_need_key(config: Config) -> bool:
    """Whether the two ends of the weight sync meet by TLS."""
    return config.weight_sync.listen is not None or weight_sync_facts(config).needs_key


def reward_pool(config: Config, name: str, on_scored: Callable[[float], None] = lambda seconds: None) -> RewardPool:
    """The reward processes that the configuration asks for, not yet started. `on_scored`: see `RewardPool`."""
    reward = config.reward
    parts = [
        RewardPart(name, resolve("reward", part.scorer.name, REWARDS), part.scorer.options, part.weight)
        for name, part in reward.parts.items()
    ]
    return RewardPool(
        parts,
        ProcessLimits(reward.deadline_seconds, reward.memory_bytes, reward.output_bytes),
        num_workers=reward.num_workers,
        name=name,
        prompt_column=config.data.prompt_column,
        prompt_template=config.data.prompt_template,
        on_scored=on_scored,
    )


def environment_pool(config: Config, name: str) -> EnvironmentPool | None:
    """The environment processes that the configuration asks for, not yet started; None: a response is one turn."""
    if (chosen := config.environment) is None:
        return None
    episodes, path = config.episodes, resolve("environment", chosen.name, ENVIRONMENTS)
    limits = ProcessLimits(episodes.deadline_seconds, episodes.memory_bytes, episodes.output_bytes)
    pythons = [episodes.python] if isinstance(episodes.python, str) else episodes.python or ()
    return EnvironmentPool(path, chosen.options, limits, num_workers=episodes.num_workers, name=name, pythons=pythons)


def turn_format(config: Config, tokenizer: CheckpointTokenizer) -> TurnFormat:
    """The tokens between the turns of an episode. Raises `UserError` where the model's chat template has none."""
    chosen = config.episodes.format
    is_chat = getattr(load("turn format", resolve("turn format", chosen.name, TURN_FORMATS)), "is_chat", False)
    of_prompts = config.data.chat_template_options if is_chat else {}  # turns are written as the prompts are
    options = {"tokenizer": tokenizer, **of_prompts, **chosen.options}
    made: TurnFormat = build("turn format", chosen.name, options, TURN_FORMATS)
    return made


def episode_limits(config: Config) -> EpisodeLimits:
    """Limits of the run's episodes."""
    episodes = config.episodes
    return EpisodeLimits(max_turns=episodes.max_turns, max_turn_tokens=episodes.max_turn_tokens, fails=episodes.on_limit == "fail")
