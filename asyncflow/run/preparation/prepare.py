"""Inputs of a run, read and checked before anything starts (checks.py). No torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from asyncflow.attestation import NO_PROBING, Probing
from asyncflow.config import Config
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.families import why_not_generated
from asyncflow.engines.lora_files import check_lora_targets
from asyncflow.loops.samples import Prompt
from asyncflow.model_folder import read_json
from asyncflow.run.availability import check_devices, check_engines
from asyncflow.run.factories import critic_folder, environment_pool, probing_of, reward_pool
from asyncflow.run.models.model_source import Log, check_folder, is_made, model_folder
from asyncflow.run.preparation.checks import (
    check_capacity,
    check_choices,
    check_critic_fits,
    check_enough,
    check_evaluators,
    check_needs_no_outsider,
    check_reward_model,
    check_train_engine,
    check_turns,
)
from asyncflow.run.preparation.notes import pass_note
from asyncflow.run.preparation.prompts import read_source, short_enough, tokenize
from asyncflow.run.stored_rows import check_storage
from asyncflow.types import UserError

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
    """Inputs of a run, checked. `num_left_out`: prompts that were too long, of those to train on and of the held-out ones. `tools`:
    that prompts tell of. `notes`: sentences that the run says before it starts."""

    model: Path
    prompts: list[Prompt]
    held_out: list[Prompt]
    max_context: int
    num_left_out: tuple[int, int] = (0, 0)
    tools: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = ()
    probing: Probing = NO_PROBING


async def prepare(
    config: Config,
    scratch: Path,
    *,
    evaluate_only: bool = False,
    begun_with: Path | None = None,
    is_served: bool = False,
    log: Log = print,
) -> Prepared:
    """Load and check the data, the model and the reward. `begun_with`: the folder that an earlier attempt of the run began with.

    A model that is not a folder as it is (model_source.py) becomes one in `scratch`, unless the run was begun with it. `log` takes
    lines about the progress. `is_served`: processes from outside may put prompts, generate and train.
    """
    check_choices(config)
    await check_devices(config)
    await check_engines(config, is_training=not evaluate_only)
    await check_storage(config)
    if not is_served:
        check_needs_no_outsider(config)
    source = read_source(config, "train") if config.data.path is not None else None
    if not evaluate_only and source is not None:
        check_enough(config, len(source.rows), "rows")
    held_out = read_source(config, "heldout") if config.eval.path is not None else None
    check_reward_model(config)
    if config.reward.parts:
        pool = reward_pool(config, "check")
        await pool.start()
        await pool.close()
    tools: Sequence[Mapping[str, Any]] = ()
    if (environments := environment_pool(config, "check")) is not None:
        await environments.start()
        await environments.close()
        tools = environments.facts.tools
    if begun_with is not None and is_made(config.model.path):
        model = check_folder("model.path", begun_with, config.model.path)
    else:
        model = await model_folder(config, source, scratch, log)
    if not evaluate_only:
        check_train_engine(config, read_json(model / "config.json"))
        if config.lora is not None:
            check_lora_targets(model, config.lora)
    critic = critic_folder(config) if not evaluate_only else None
    if critic is not None:
        check_critic_fits(critic, model)
    tokenizer = CheckpointTokenizer(model)
    notes = [] if environments is None else check_turns(config, tokenizer, environments)
    if not evaluate_only and (note := pass_note(config, read_json(model / "config.json"))):
        notes.append(note)
    sources = [each for each in (source, held_out) if each is not None]
    tokenized = {id(each): tokenize(config, tokenizer, each, tools) for each in sources}
    prompts = [] if source is None else short_enough(config, tokenized[id(source)], source.name)
    held_out_prompts = [] if held_out is None else short_enough(config, tokenized[id(held_out)], held_out.name)
    if not evaluate_only and source is not None:
        check_enough(config, len(prompts), "short enough prompts")
    everything = [*prompts, *held_out_prompts] if not evaluate_only else held_out_prompts or prompts
    longest = max((len(prompt.ids) for prompt in everything), default=0)
    if source is None:
        if config.model.max_context_tokens is None:
            raise UserError("without data.path no prompts are there to be measured: set model.max_context_tokens")
        longest = max(longest, config.model.max_context_tokens - config.rollout.max_new_tokens)
    rows = {id(prompt): (n, of.name) for of in sources for n, prompt in enumerate(tokenized[id(of)], 1)}
    context = _context(config, model, critic, everything, lambda prompt: rows[id(prompt)])
    check_evaluators(config, len(held_out_prompts))
    check_capacity(config, len(held_out_prompts), longest)
    num_rows = [len(each.rows) if each is not None else 0 for each in (source, held_out)]
    left_out = num_rows[0] - len(prompts), num_rows[1] - len(held_out_prompts)
    probing = probing_of(config, read_json(model / "config.json"), context)
    return Prepared(model, prompts, held_out_prompts, context, left_out, tools, notes, probing)


def _context(
    config: Config, model: Path, critic: Path | None, prompts: Sequence[Prompt], row_of: Callable[[Prompt], tuple[int, str]]
) -> int:
    """Tokens that the longest prompt and its response take. `row_of`: the number of a prompt's row, and what the data are called.
    Raises `UserError` if a model, or the user, allows fewer."""
    longest, new = max(prompts, key=lambda prompt: len(prompt.ids), default=None), config.rollout.max_new_tokens
    length = len(longest.ids) if longest is not None else max(1, (config.model.max_context_tokens or 0) - new)
    limits = {
        "model.max_context_tokens": config.model.max_context_tokens,
        "the model's max_position_embeddings": read_json(model / "config.json").get("max_position_embeddings"),
    }
    if critic is not None:
        limits["the critic's max_position_embeddings"] = read_json(critic / "config.json").get("max_position_embeddings")
    for name, limit in limits.items():
        if limit is not None and length + new > limit:
            way_out = f"set rollout.max_new_tokens to {limit - length} or less" if length < limit else "shorten the prompts"
            if limit > new:
                way_out += f", or leave out longer ones by data.max_prompt_tokens={limit - new}"
            if longest is None:
                raise UserError(f"rollout.max_new_tokens = {new} and a prompt of {length} tokens do not fit: {name} is {limit}")
            row, name_of_data = row_of(longest)
            raise UserError(
                f"the prompt of row {row} of {name_of_data} has {length} tokens, with rollout.max_new_tokens = {new} that makes "
                f"{length + new}, and "
                f"{name} is {limit}: {way_out}"
            )
    context = config.model.max_context_tokens or length + new
    engine = config.rollout.engine.name
    if engine == "transformers" and (why := why_not_generated(read_json(model / "config.json"), context)):
        raise UserError(f"rollout.engine={engine}: {why}")
    return context
