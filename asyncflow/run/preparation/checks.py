"""Checks of a run's choices, before anything starts: each mistake is described in one sentence. No torch."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncflow.algorithms import ALGORITHMS
from asyncflow.cluster import CLUSTERS
from asyncflow.cluster.remote_node import host_of, is_any
from asyncflow.config import Config
from asyncflow.control import SCHEDULES
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.families import check_layout
from asyncflow.engines.lora_files import check_lora_files
from asyncflow.engines.rollout import ROLLOUT_ENGINE_CHECKS, ROLLOUT_ENGINES
from asyncflow.engines.train import OUTSIDE, TRAIN_ENGINE_CHECKS, TRAIN_ENGINES
from asyncflow.environments import ENVIRONMENTS, TURN_FORMATS
from asyncflow.environments.pool import EnvironmentPool
from asyncflow.loops.samples import EVALUATION_GROUPS, VALUES_TASK
from asyncflow.model_folder import read_json
from asyncflow.registry import build, check_options, resolve
from asyncflow.rewards import REWARDS
from asyncflow.run.device_shares import check_shares
from asyncflow.run.factories import (
    check_samplers,
    make_algorithm,
    make_schedule,
    shape_of,
    shape_of_evaluation,
    tasks_before_training,
    train_engine_options,
    turn_format,
    weight_sync_facts,
)
from asyncflow.run.models.model_card import may_push
from asyncflow.run.models.model_source import SHAPES, check_folder
from asyncflow.settings import Choice
from asyncflow.transfer_queue import STORAGES
from asyncflow.types import UserError
from asyncflow.weight_sync import WEIGHT_SYNC_FACTS, WEIGHT_SYNCS


def check_choices(config: Config, *, is_here: bool = True) -> None:
    """Every name chosen is known, every option of what is light to build is one of its own. Raises `UserError`.

    `is_here`: the run would start on this machine, so what its cluster needs must be installed.
    """
    chosen: list[tuple[str, Choice, dict[str, str]]] = [
        *(("reward", part.scorer, dict(REWARDS)) for part in config.reward.parts.values()),
        *([("environment", config.environment, dict(ENVIRONMENTS))] if config.environment is not None else []),
        ("turn format", config.episodes.format, dict(TURN_FORMATS)),
        ("algorithm", config.algorithm, dict(ALGORITHMS)),
        ("schedule", config.schedule, dict(SCHEDULES)),
        ("rollout engine", config.rollout.engine, dict(ROLLOUT_ENGINES)),
        ("train engine", config.train.engine, dict(TRAIN_ENGINES)),
        ("queue storage", config.queue.storage, dict(STORAGES)),
        ("cluster", config.cluster, dict(CLUSTERS)),
    ]
    for kind, choice, known in chosen:
        resolve(kind, choice.name, known)
    if is_here:
        build("cluster", config.cluster.name, config.cluster.options, CLUSTERS, {"run_dir": config.run_dir})
    for key, listen in (("queue.listen", config.queue.listen), ("weight_sync.listen", config.weight_sync.listen)):
        if listen is not None and is_any(host_of(listen)):
            raise UserError(f"{key}={listen} names no machine, and others are told to come there: take this machine's own address")
    storage = config.queue.storage
    check_options("queue storage", storage.name, storage.options, STORAGES, ["unit"])
    if is_here and "wandb" in config.telemetry.trackers and importlib.util.find_spec("wandb") is None:
        raise UserError("telemetry.trackers has wandb, which is not installed: pip install 'asyncflow-rl[wandb]', or leave it out")
    _check_weight_sync(config)
    check_rollout_engine(config, config.rollout.num_workers)
    algorithm, train = make_algorithm(config), config.train
    _check_lora(config)
    if (train.offload or train.frozen_dtype) and not algorithm.needs_reference and train.old not in ("step_start", "previous"):
        raise UserError("train.offload and train.frozen_dtype are for an old policy or a reference, and this run has neither")
    if algorithm.critic is not None:
        _check_critic(config)
    elif workers := config.plan.values.num_workers:
        raise UserError(
            f"plan.values.num_workers={workers}, but the algorithm {config.algorithm.name} has no critic whose values they could "
            f"compute: take one that has, such as ppo, or leave it out"
        )
    check_shares(config)
    if config.model.push_to_hub is not None and is_here and not may_push():
        raise UserError("model.push_to_hub needs a token of the Hugging Face Hub: log in with `hf auth login`, or set HF_TOKEN")
    _check_candidates(config, wants_them=algorithm.wants_varied_groups)
    if (groups := config.run.steps * shape_of(config).numbers_per_step) > EVALUATION_GROUPS:
        raise UserError(
            f"run.steps={config.run.steps} makes {groups} groups to be numbered, and {EVALUATION_GROUPS} is the most: take fewer"
        )
    if config.train.skip_zero_advantages is True and not algorithm.is_zero_without_advantages:
        raise UserError(
            f"train.skip_zero_advantages is for losses that have no gradient where advantages are 0, and {config.algorithm.name} "
            f"as it is set here has one (a KL term in the loss, an entropy bonus), or does not say (is_zero_without_advantages, in "
            f"asyncflow/algorithms/base.py): leave it out"
        )
    if algorithm.needs_turns and config.environment is None:
        raise UserError("algorithm.credit=turn compares rewards of turns, and there is no environment to give any: set environment")
    if algorithm.needs_reference_ahead and train.reference != "task":
        raise UserError(
            "the algorithm has a KL term in the reward, which needs the reference's log-probs ahead of training: set "
            "train.reference=task"
        )
    if config.train.engine.name == OUTSIDE and train.epochs * train.mini_batches > 1:
        raise UserError(
            "train.engine=outside is given a step as a whole, and makes of it what it likes: leave out train.epochs and "
            "train.mini_batches"
        )
    if config.train.reference == "task" and not algorithm.needs_reference:
        raise UserError(
            "train.reference=task, but the algorithm has no KL term to a reference: set its coefficient, or leave it out"
        )
    check_samplers(config)


def _check_weight_sync(config: Config) -> None:
    """Raises `UserError` where the chosen weight sync cannot do what this run needs."""
    chosen, facts, evaluators = config.weight_sync, weight_sync_facts(config), config.eval.num_workers
    if chosen.name not in WEIGHT_SYNC_FACTS:
        check_options("weight sync", chosen.name, chosen.options, WEIGHT_SYNCS, ["options"])
    elif chosen.options:
        raise UserError(f"weight_sync={chosen.name} has no options of its own: leave out {', '.join(chosen.options)}")
    if chosen.listen is not None and not facts.has_door:
        others = " or ".join(name for name, of_other in WEIGHT_SYNC_FACTS.items() if of_other.has_door)
        raise UserError(
            f"weight_sync.listen={chosen.listen}: no process connects to it when weights travel by {chosen.name}: take {others}"
        )
    if evaluators and facts.is_broadcast:
        others = " or ".join(name for name, of_other in WEIGHT_SYNC_FACTS.items() if not of_other.is_broadcast)
        raise UserError(
            f"weight_sync.name={chosen.name} broadcasts each version to all workers that have once asked for one, and "
            f"eval.num_workers={evaluators} take only some, later: take {others}, or eval.num_workers=0"
        )


def _check_lora(config: Config) -> None:
    """Check that a low-rank adapter can be trained with these settings. Raises `UserError`."""
    if (lora := config.lora) is None:
        return
    train = config.train
    if train.offload or train.frozen_dtype:
        raise UserError(
            "train.offload and train.frozen_dtype are for old policy and reference, which share the policy's base with model.lora: "
            "leave them out"
        )
    if lora.path is not None:
        check_lora_files(Path(lora.path), lora)


def _check_critic(config: Config) -> None:
    """Check that a critic can be trained beside the policy. Raises `UserError`."""
    _check_strict(config, "groups change their steps, and the critic has given them the values of one")
    if config.train.critic.path is not None:
        check_folder("train.critic.path", Path(config.train.critic.path), config.train.critic.path)


def _check_strict(config: Config, why: str) -> None:
    if make_schedule(config).membership != "strict":
        raise UserError(f"schedule.membership=first_come has {why}: take strict")


def check_critic_fits(critic: Path, policy: Path) -> None:
    """Check that a critic's model reads the policy's tokens. Raises `UserError`."""
    theirs, ours = (read_json(folder / "config.json").get("vocab_size", 0) for folder in (critic, policy))
    if theirs < ours:
        raise UserError(
            f"the critic's model {critic} has {theirs} tokens, and the policy's {ours}: set train.critic.path to a model with the "
            f"policy's tokens"
        )
    tokens = [read_json(folder / "tokenizer.json").get("model", {}).get("vocab") for folder in (critic, policy)]
    if all(tokens) and tokens[0] != tokens[1]:
        raise UserError(
            f"the critic's model {critic} has another tokenizer than the policy's: set train.critic.path to a model with the "
            f"policy's tokens"
        )


def _check_candidates(config: Config, *, wants_them: bool) -> None:
    """Check that steps can choose their members among candidates, or need not. Raises `UserError`."""
    train, shape = config.train, shape_of(config)
    if not wants_them:
        if train.oversampling != 1.0 or train.max_candidates is not None:
            raise UserError(
                "train.oversampling and train.max_candidates are for an algorithm that takes other prompts for those whose "
                "responses all have one reward (algorithm.dynamic_sampling of dapo), and this one trains all: leave them out"
            )
        return
    _check_strict(
        config,
        "the groups that are complete first trained first, and dynamic sampling those that come first in the order of the data",
    )
    if train.max_candidates is not None and train.max_candidates < shape.prompts_at_first:
        raise UserError(
            f"train.max_candidates is {train.max_candidates}, and a step begins with {shape.prompts_at_first} prompts "
            f"(train.prompts_per_step x train.oversampling): take as many or more"
        )


def check_rollout_engine(config: Config, num_workers: int) -> None:
    """Check that so many rollout workers can have engines with these options. Raises `UserError`."""
    chosen = config.rollout.engine
    if chosen.name not in ROLLOUT_ENGINE_CHECKS:
        return
    schedule = make_schedule(config)
    asked = {
        "num_workers": num_workers,
        "cluster": config.cluster.name,
        "device": config.rollout.device,
        "num_evaluators": config.eval.num_workers,
        "evaluators_device": config.evaluators_device,
        "installs_in_flight": schedule.installs_in_flight,
        "has_lora": config.lora is not None,
    }
    build("rollout engine", chosen.name, chosen.options, ROLLOUT_ENGINE_CHECKS, asked)


def check_train_engine(config: Config, fields: Mapping[str, Any]) -> None:
    """Check that the train engine can train such a model. `fields`: of the model's `config.json`. Raises `UserError`.

    An engine of the user's own is asked about the layout what the built-in one is, and says the rest when it is built.
    """
    chosen = config.train.engine
    if chosen.name in TRAIN_ENGINE_CHECKS:
        given = {"options": train_engine_options(config, fields), "fields": fields}
        build("train engine", chosen.name, chosen.options, TRAIN_ENGINE_CHECKS, given)
    else:
        check_layout(fields, config.layout)


def check_evaluators(config: Config, num_held_out: int) -> None:
    """Raises `UserError` where an evaluator would have no share of an evaluation."""
    workers, groups = config.eval.num_workers, shape_of_evaluation(config, num_held_out).prompts_per_step
    if workers > groups:
        kinds = "sampled and greedy" if config.eval.greedy else "sampled"
        raise UserError(
            f"eval.num_workers={workers} is more than the {groups} groups of an evaluation ({num_held_out} prompts, {kinds}), so "
            f"{workers - groups} of them would have nothing to generate: take {groups} or fewer, or more prompts"
        )


def check_capacity(config: Config, num_held_out: int, longest_prompt: int) -> None:
    """Check that a storage unit can take its part of the largest admission, and, where evaluators make evaluations beside
    training, of both. Raises `UserError` showing the arithmetic."""
    queue, shape = config.queue, shape_of(config)
    # Where a step chooses its prompts those that stay may all be on one unit.
    of_step = shape.prompts_at_first if shape.max_candidates else -(-shape.prompts_per_step // queue.num_units)
    of_evaluation = -(-num_held_out // queue.num_units) * (config.eval.samples_per_prompt + config.eval.greedy)
    admissions = {"a step": of_step * shape.group_size, "an evaluation": of_evaluation}
    if config.eval.num_workers and num_held_out:
        admissions["a step with an evaluation beside it"] = sum(admissions.values())
    for what, rows in admissions.items():
        num_bytes = rows * (shape.row_bytes + 8 * longest_prompt)
        for unit, needed, capacity in (
            ("rows", rows, queue.capacity_rows),
            ("bytes", num_bytes, queue.unit_capacity_bytes),
        ):
            if capacity is not None and needed > capacity:
                raise UserError(
                    f"{what} puts {rows} rows on each of {queue.num_units} storage units, which reserve {needed} {unit}, and "
                    f"queue.capacity_{unit} is {capacity}: raise it, or take fewer prompts"
                )


def check_shapes(config: Config) -> dict[str, Any]:
    """Check that a model of these shapes could be trained so, for a configuration whose model is its shapes alone (`shapes:FILE`).

    Returns the fields of the file. Neither data nor tokenizer nor machine is looked at. Raises `UserError`.
    """
    check_choices(config, is_here=False)
    file, rollout, model = Path(config.model.path.removeprefix(SHAPES)), config.rollout, config.model
    fields = read_json(file)
    if not fields:
        raise UserError(f"model.path {model.path!r}: there is no file {file} with the fields of a model's config.json")
    check_train_engine(config, fields)
    if model.max_context_tokens is None:
        raise UserError("a model of shapes alone has no tokenizer to measure prompts with: set model.max_context_tokens")
    if rollout.max_new_tokens >= model.max_context_tokens:
        raise UserError(
            f"rollout.max_new_tokens = {rollout.max_new_tokens} leaves no room for a prompt in model.max_context_tokens = "
            f"{model.max_context_tokens}: set it lower"
        )
    most = fields.get("max_position_embeddings")
    if most is not None and model.max_context_tokens > most:
        raise UserError(f"model.max_context_tokens is {model.max_context_tokens}, and the model's max_position_embeddings {most}")
    return fields


def check_reward_model(config: Config) -> None:
    """Check that the reward model's folder holds a sequence classifier with one label, and its tokenizer. Raises `UserError`."""
    if (model := config.reward.model) is None:
        return
    fields = read_json(Path(model.path) / "config.json")
    if not fields:
        raise UserError(f"reward.model.path {model.path!r} is no folder with a model in Hugging Face format: it has no config.json")
    if not (architectures := fields.get("architectures")):
        raise UserError(
            f"the config.json of the reward model {model.path} names no class: set architectures, such as "
            f'["Qwen2ForSequenceClassification"]'
        )
    if not (architecture := str(architectures[0])).endswith("ForSequenceClassification"):
        raise UserError(f"the reward model {model.path} is a {architecture}; it takes one for sequence classification")
    num_labels = len(fields.get("id2label") or {"0": "", "1": ""})  # two is what transformers takes for granted
    if num_labels != 1:
        raise UserError(f"the reward model {model.path} has {num_labels} labels: a reward is one number")
    if not [*Path(model.path).glob("*.safetensors")]:
        raise UserError(f"the reward model {model.path} has no weights in safetensors format; write them with save_pretrained")
    CheckpointTokenizer(Path(model.path), generates=False)


def check_turns(config: Config, tokenizer: CheckpointTokenizer, environments: EnvironmentPool) -> list[str]:
    """Sentences about the turns of episodes. Raises `UserError` where they cannot be written, or have branches that a task of the
    run does not know."""
    if environments.facts.is_captured:
        notes, may_branch = [], True
    else:
        form = turn_format(config, tokenizer)
        notes, may_branch = list(getattr(form, "notes", ())), bool(getattr(form, "may_branch", False))
    tasks = {"reference", VALUES_TASK} & {*tasks_before_training(config)}
    if may_branch and tasks:
        raise UserError(
            f"episodes may have branches here, which the task {min(tasks)} does not compute: take train.reference=fused, and an "
            f"algorithm without a critic"
        )
    return notes


def check_needs_no_outsider(config: Config) -> None:
    """Raises `UserError` where a run that no service hosts would wait for processes from outside for ever."""
    for is_missing, key, what in (
        (config.data.path is None, "data.path", "puts prompts"),
        (config.rollout.num_workers == 0, "rollout.num_workers", "generates"),
        (config.train.engine.name == OUTSIDE, "train.engine", "trains"),
    ):
        if is_missing:
            raise UserError(f"no process {what} in this run: set {key}, or let processes from outside do it, by asyncflow serve")


def check_enough(config: Config, count: int, what: str) -> None:
    """Check that the data have enough prompts (`count`, named by `what`) for a step. Raises `UserError`."""
    if count < config.train.prompts_per_step:
        raise UserError(
            f"{config.data.path} has {count} {what}, and a step takes train.prompts_per_step = {config.train.prompts_per_step} "
            f"different ones: give more data, or set it to {count} or less"
        )
