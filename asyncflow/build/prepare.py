"""Everything that can be wrong with a run's inputs is found here, before anything starts, and said in one sentence. No torch."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from asyncflow.algorithms import ALGORITHMS
from asyncflow.algorithms.base import Algorithm
from asyncflow.algorithms.off_policy import check_correction, default_correction
from asyncflow.cluster import CLUSTERS
from asyncflow.config import Config
from asyncflow.data.datasets import Row, check_columns, load_rows, template_columns
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.base import TrainEngineOptions
from asyncflow.engines.families import check_family, check_layout
from asyncflow.engines.rollout import ROLLOUT_ENGINE_CHECKS, ROLLOUT_ENGINE_DEVICES, ROLLOUT_ENGINES
from asyncflow.engines.train import TRAIN_ENGINE_CHECKS, TRAIN_ENGINES
from asyncflow.model_folder import read_json
from asyncflow.registry import build, resolve
from asyncflow.rewards import REWARDS
from asyncflow.rewards.sandbox import RewardPool
from asyncflow.settings import Choice
from asyncflow.transfer_queue import STORAGES
from asyncflow.types import RunError, UserError, group_bits_for
from asyncflow.workflows import SCHEDULES
from asyncflow.workflows.samples import Prompt, Shape
from asyncflow.workflows.schedule import Schedule

CHOICE_OF_TURNS = 3
"""So many turns' groups each data-parallel rank makes ready, so that those of one turn can be of about one length."""
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
    "chat_template.jinja",
    "generation_config.json",
)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A run's inputs, checked."""

    model: Path
    prompts: list[Prompt]
    held_out: list[Prompt]
    max_context: int


def shape_of(config: Config) -> Shape:
    """The run's fixed numbers."""
    largest = max(config.rollout.group_size, config.eval.samples_per_prompt)
    return Shape(
        prompts_per_step=config.train.prompts_per_step,
        group_size=config.rollout.group_size,
        group_bits=group_bits_for(largest),
        seed=config.run.seed,
        temperature=config.rollout.temperature,
        max_new_tokens=config.rollout.max_new_tokens,
        rows_per_micro_batch=config.train.responses_per_micro_batch or config.rollout.group_size,
        groups_per_turn=(groups := _groups_per_turn(config)),
        groups_ahead=groups * (CHOICE_OF_TURNS if config.layout.dp > 1 else 1),
    )


def _groups_per_turn(config: Config) -> int:
    """A group, or, in a pipeline, as many as make up the micro-batches that go through it together."""
    pieces = -(-config.rollout.group_size // (config.train.responses_per_micro_batch or config.rollout.group_size))
    return -(-config.train.pipeline_micro_batches // pieces) if config.layout.pp > 1 else 1


def check_choices(config: Config) -> None:
    """Every name chosen is known, every option of what is light to build is one of its own. Raises `UserError`."""
    chosen: list[tuple[str, Choice, dict[str, str]]] = [
        ("reward", config.reward.scorer, dict(REWARDS)),
        ("algorithm", config.algorithm, dict(ALGORITHMS)),
        ("schedule", config.schedule, dict(SCHEDULES)),
        ("rollout engine", config.rollout.engine, dict(ROLLOUT_ENGINES)),
        ("train engine", config.train.engine, dict(TRAIN_ENGINES)),
        ("queue storage", config.queue.storage, dict(STORAGES)),
        ("cluster", config.cluster, dict(CLUSTERS)),
    ]
    for kind, choice, known in chosen:
        resolve(kind, choice.name, known)
    build("cluster", config.cluster.name, {**config.cluster.options, "run_dir": config.run_dir}, CLUSTERS)
    check_rollout_engine(config, config.rollout.num_workers)
    algorithm, train = make_algorithm(config), config.train
    if (train.offload or train.frozen_dtype) and not algorithm.needs_reference and train.old not in ("step_start", "previous"):
        raise UserError("train.offload and train.frozen_dtype are for an old policy or a reference, and this run has neither")
    if config.train.reference == "task" and not algorithm.needs_reference:
        raise UserError(
            "train.reference=task, but the algorithm has no KL term to a reference: set its coefficient, or leave it out"
        )


def check_rollout_engine(config: Config, num_workers: int) -> None:
    """That so many rollout workers can have engines with these options. Raises `UserError`."""
    chosen = config.rollout.engine
    if chosen.name not in ROLLOUT_ENGINE_CHECKS:
        return
    schedule: Schedule = build("schedule", config.schedule.name, config.schedule.options, SCHEDULES)
    asked = {
        "num_workers": num_workers,
        "cluster": config.cluster.name,
        "device": config.rollout.device,
        "installs_in_flight": schedule.installs_in_flight,
    }
    build("rollout engine", chosen.name, {**asked, **chosen.options}, ROLLOUT_ENGINE_CHECKS)


def train_engine_options(config: Config) -> TrainEngineOptions:
    """What the configuration says to every train engine."""
    train, algorithm = config.train, make_algorithm(config)
    return TrainEngineOptions(
        layout=config.layout,
        pipeline_micro_batches=train.pipeline_micro_batches,
        pipeline_fill=train.pipeline_fill,
        learning_rate=train.learning_rate,
        warmup_steps=train.warmup_steps,
        betas=train.betas,
        weight_decay=train.weight_decay,
        max_grad_norm=train.max_grad_norm,
        temperature=config.rollout.temperature,
        seed=config.run.seed,
        device=train.device,
        dtype=train.dtype,
        log_prob_chunk_tokens=train.log_prob_chunk_tokens,
        num_threads=train.num_threads,
        accumulate=train.accumulate,
        old=train.old,
        is_corrected=algorithm.correction != "none",
        has_reference=algorithm.needs_reference and train.reference == "fused",
        frozen_dtype=train.frozen_dtype,
        offload=train.offload,
        check_shared_prompt=train.check_shared_prompt,
        activation_checkpointing=train.activation_checkpointing,
        offload_optimizer=train.offload_optimizer,
    )


def check_train_engine(config: Config, fields: Mapping[str, Any]) -> None:
    """That the train engine can train such a model, as is asked. `fields`: of the model's `config.json`. Raises `UserError`.

    An engine of the user's own is asked about the layout what the built-in one is, and says the rest when it is built.
    """
    chosen = config.train.engine
    if chosen.name in TRAIN_ENGINE_CHECKS:
        arguments = {**chosen.options, "options": train_engine_options(config), "fields": fields}
        build("train engine", chosen.name, arguments, TRAIN_ENGINE_CHECKS)
    else:
        check_layout(fields, config.layout)


def make_algorithm(config: Config) -> Algorithm:
    """The algorithm of the configuration, which corrects for the schedule's staleness unless told otherwise (docs/off_policy.md).

    One of the user's own says itself what it does. Raises `UserError` when there is none, one that lacks a part of the contract, or
    one that is wrong for rows as stale as the schedule's under `train.old`.
    """
    schedule: Schedule = build("schedule", config.schedule.name, config.schedule.options, SCHEDULES)
    old, options = config.train.old, config.algorithm.options
    if config.algorithm.name in ALGORITHMS:
        options = {"correction": default_correction(old, schedule.max_staleness), **options}
    algorithm: Algorithm = build("algorithm", config.algorithm.name, options, ALGORITHMS)
    for name in ("normaliser", "needs_reference", "correction", "is_token_local", "advantages", "loss"):
        if not hasattr(algorithm, name):
            raise UserError(
                f"the algorithm {config.algorithm.name} has no {name!r}: asyncflow/algorithms/base.py says what is needed"
            )
    check_correction(algorithm.correction, old, schedule.max_staleness)
    return algorithm


def num_devices(config: Config) -> int:
    """All of the run's devices: those that generate, those that train, and the reference's own."""
    rollout = config.rollout.num_workers * devices_each(config)
    return rollout + config.layout.size + ("reference" in tasks_before_training(config))


def devices_each(config: Config) -> int:
    """Those of one rollout worker."""
    chosen = config.rollout.engine
    if chosen.name not in ROLLOUT_ENGINE_DEVICES:
        return 1
    count: int = build("rollout engine", chosen.name, chosen.options, ROLLOUT_ENGINE_DEVICES)
    return count


def tasks_before_training(config: Config) -> tuple[str, ...]:
    """The tasks that a row passes before it is trained, in order."""
    has = {"reward": config.reward.place == "task", "reference": config.train.reference == "task"}
    return ("rollout", *(task for task in has if has[task]))


def check_capacity(config: Config, num_held_out: int, longest_prompt: int) -> None:
    """That a storage unit can take its part of the largest admission. Raises `UserError` showing the arithmetic."""
    queue, shape = config.queue, shape_of(config)
    evaluated = (num_held_out, config.eval.samples_per_prompt + config.eval.greedy)
    admissions = {"a step": (shape.prompts_per_step, shape.group_size), "an evaluation": evaluated}
    for what, (prompts, size) in admissions.items():
        rows = -(-prompts // queue.num_units) * size
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


def reward_pool(config: Config, name: str) -> RewardPool:
    """The reward processes that the configuration asks for, not yet started."""
    reward = config.reward
    return RewardPool(
        resolve("reward", reward.scorer.name, REWARDS),
        reward.scorer.options,
        num_workers=reward.num_workers,
        deadline_seconds=reward.deadline_seconds,
        memory_bytes=reward.memory_bytes,
        name=name,
    )


async def prepare(config: Config, scratch: Path, *, evaluate_only: bool = False, made: Path | None = None) -> Prepared:
    """Load and check the data, the model and the reward. A `random:` model is made in `scratch`, unless it was `made` before."""
    check_choices(config)
    rows = load_rows(config.data.path, seed=config.run.seed, split="train", limit=config.data.limit)
    columns = template_columns(config.data.prompt_template)
    check_columns(rows, columns, config.data.path)
    if len(rows) < config.train.prompts_per_step and not evaluate_only:
        raise UserError(
            f"{config.data.path} has {len(rows)} rows, and a step takes train.prompts_per_step = {config.train.prompts_per_step} "
            f"different ones: give more data, or set it to {len(rows)} or less"
        )
    held_out = _held_out_rows(config, columns)
    pool = reward_pool(config, "check")
    await pool.start()
    await pool.close()
    is_made = made is not None and config.model.path.startswith("random:")
    model = made if made is not None and is_made else await model_folder(config, rows, scratch)
    if not evaluate_only:
        check_train_engine(config, read_json(model / "config.json"))
    tokenizer = CheckpointTokenizer(model)
    prompts, held_out_prompts = (tokenize(config, tokenizer, chosen) for chosen in (rows, held_out))
    everything = [*prompts, *held_out_prompts]
    context = _context(config, model, everything)
    check_capacity(config, len(held_out_prompts), max(len(prompt.ids) for prompt in everything))
    return Prepared(model, prompts, held_out_prompts, context)


async def model_folder(config: Config, rows: Sequence[Row], scratch: Path) -> Path:
    """The model's folder, made first if it is a `random:` one. Raises `UserError` if it holds no causal language model."""
    path = config.model.path
    if path.startswith("random:"):
        return await _random_model(config, rows, scratch / "random-model")
    folder = Path(path)
    settings = read_json(folder / "config.json")
    if not settings:
        hint = "download it first: AsyncFlow loads no model from a hub" if not folder.exists() else "it has no config.json"
        raise UserError(f"model.path {path!r} is no folder with a model in Hugging Face format: {hint}")
    architectures = settings.get("architectures") or ["?"]
    if not any(str(name).endswith("ForCausalLM") for name in architectures):
        raise UserError(f"the model {path} is a {architectures[0]}; it takes a causal language model, such as Qwen2ForCausalLM")
    check_family(settings)
    if not [*folder.glob("*.safetensors")]:
        raise UserError(f"the model {path} has no weights in safetensors format; write them with transformers' save_pretrained")
    return folder


def _held_out_rows(config: Config, columns: list[str]) -> list[Row]:
    path = config.eval.path
    if path is None:
        return []
    rows = load_rows(path, seed=config.run.seed, split="heldout", limit=config.eval.num_prompts)
    check_columns(rows, columns, path)
    return rows


def tokenize(config: Config, tokenizer: CheckpointTokenizer, rows: Sequence[Row]) -> list[Prompt]:
    """Rows as prompts, by the configuration's template."""
    encode = tokenizer.encode_chat if config.data.chat_template else tokenizer.encode
    return [Prompt(encode(config.data.prompt_template.format_map(row)), row) for row in rows]


def _context(config: Config, model: Path, prompts: Sequence[Prompt]) -> int:
    """Tokens that the longest prompt and its response take. Raises `UserError` if the model, or the user, allows fewer."""
    longest = max(range(len(prompts)), key=lambda i: len(prompts[i].ids))
    length, new = len(prompts[longest].ids), config.rollout.max_new_tokens
    if length == 0:
        raise UserError("every prompt is empty: does data.prompt_template name a column?")
    limits = {
        "model.max_context_tokens": config.model.max_context_tokens,
        "the model's max_position_embeddings": read_json(model / "config.json").get("max_position_embeddings"),
    }
    for name, limit in limits.items():
        if limit is not None and length + new > limit:
            way_out = f"set rollout.max_new_tokens to {limit - length} or less" if length < limit else "shorten the prompts"
            raise UserError(
                f"prompt {longest + 1} has {length} tokens, with rollout.max_new_tokens = {new} that makes {length + new}, and "
                f"{name} is {limit}: {way_out}"
            )
    return config.model.max_context_tokens or length + new


async def _random_model(config: Config, rows: Sequence[Row], folder: Path) -> Path:
    """Made in a process of its own, since this one imports no torch."""
    with tempfile.NamedTemporaryFile("wb", suffix=".jsonl") as texts:
        texts.write(b"\n".join(msgspec.json.encode(config.data.prompt_template.format_map(row)) for row in rows))
        texts.flush()
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-m", "asyncflow.engines.train.random_model", config.model.path, str(folder), "--texts", texts.name,
            "--seed", str(config.run.seed),
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        _, errors = await process.communicate()
    if process.returncode:
        last = (errors.decode(errors="replace").strip().splitlines() or ["nothing was said"])[-1]
        raise (UserError if process.returncode == 2 else RunError)(f"model.path: {last}")
    return folder
