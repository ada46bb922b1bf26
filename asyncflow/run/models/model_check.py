"""Whether AsyncFlow runs a model: which engines train it, which generate with it, and how much memory that takes.

    model.path --> config.json, tokenizer (of the Hub's no weights) --> lines of text

Parameters are counted on a model without memory (torch's meta device); the bytes are those of memory.py.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.config import Config, parse
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.devices import accelerators, memory_of_accelerator
from asyncflow.engines.families import why_not_generated, why_not_packed
from asyncflow.engines.train import TRAIN_ENGINE_CHECKS
from asyncflow.engines.train.model.lora import shapes_for
from asyncflow.model_folder import read_json
from asyncflow.registry import build
from asyncflow.run.factories import make_schedule, train_engine_options
from asyncflow.run.models.model_source import Log, check_folder, folder_of
from asyncflow.run.preparation.memory import GIB, Shapes, host_parts, lines, rollout_parts, training_parts
from asyncflow.settings import apply_override
from asyncflow.types import UserError

PROMPT_TOKENS = 512
"""Tokens of the longest prompt, assumed: there is no data that would tell."""


async def checked(path: str, overrides: Sequence[str], scratch: Path, log: Log = print) -> list[str]:
    """Lines about a model. `overrides`: of a run's configuration.

    Raises `UserError` if it is no causal language model, or has no weights that a run reads.
    """
    tree: dict[str, Any] = {"model": {"path": path}, "data": {"path": "generated:arithmetic"}}
    for override in overrides:
        apply_override(tree, override)
    config = parse(tree)
    folder = await folder_of(path, scratch, log, has_weights=False)
    if not (fields := read_json(folder / "config.json")):
        raise UserError(f"{path} is no folder with a model in Hugging Face format: it has no config.json")
    # Of a repository on the Hub its list of files was asked; a folder that was made has the weights that it needs.
    check_folder("model.path", folder, path, has_weights=folder == Path(path))
    module = _module(path, folder)
    adapter = _adapter(config, module)
    context = _context(config, module)
    lines = [*_model(path, folder, module), *_training(config, fields, adapter), *_rollout(config, fields, context)]
    if isinstance(adapter, UserError):
        return [*lines, "memory          not known: it gets no adapter"]
    return [*lines, *_memory(config, fields, module, context, adapter)]


def _module(path: str, folder: Path) -> Any:
    """The model without memory for its weights. Raises `UserError` if transformers has none for it."""
    try:
        config = AutoConfig.from_pretrained(folder)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(config)
    except (ValueError, KeyError, OSError) as error:
        raise UserError(f"transformers has no causal language model for {path}: {str(error).splitlines()[0]}") from error


def _model(path: str, folder: Path, module: Any) -> Iterator[str]:
    context = getattr(module.config, "max_position_embeddings", None)
    kind, count = module.config.model_type, module.num_parameters()
    yield f"model           {path}: {type(module).__name__} ({kind}), {count:,} parameters"
    yield f"context         {f'{context:,} tokens' if context else 'no limit is named'}"
    try:
        tokenizer = CheckpointTokenizer(folder)
    except UserError as error:
        yield f"tokenizer       {error}"
    else:
        template = "a chat template" if tokenizer.template_source is not None else "no chat template: data.chat_template=false"
        yield f"tokenizer       end tokens {', '.join(map(str, tokenizer.end_token_ids))}; {template}"


def _adapter(config: Config, module: Any) -> int | UserError | None:
    """Parameters of the adapter that is to be trained, None without one; or why the model does not get it."""
    if config.lora is None:
        return None
    try:
        return sum(math.prod(shape) for shape in shapes_for(module, config.lora).values())
    except UserError as error:
        return error


def _training(config: Config, fields: Mapping[str, Any], adapter: int | UserError | None) -> Iterator[str]:
    """Verdicts of the train engines on a model, a line each."""
    for name in TRAIN_ENGINE_CHECKS:
        try:
            if isinstance(adapter, UserError):
                raise adapter
            build("train engine", name, {"options": train_engine_options(config), "fields": fields}, TRAIN_ENGINE_CHECKS)
        except (UserError, KeyError) as error:
            yield f"train.engine    {name}: no: {error if isinstance(error, UserError) else f'config.json has no {error}'}"
            continue
        why = why_not_packed(fields)
        how = f"yes, each row a sequence of its own: {why}" if why else "yes, responses packed behind one copy of their prompt"
        yield f"train.engine    {name}: {how}"


def _context(config: Config, module: Any) -> int:
    """Tokens of the longest prompt with its response, which are no more than the model's positions if nothing says how many."""
    assumed = PROMPT_TOKENS + config.rollout.max_new_tokens
    return config.model.max_context_tokens or min(assumed, getattr(module.config, "max_position_embeddings", None) or assumed)


def _rollout(config: Config, fields: Mapping[str, Any], context: int) -> Iterator[str]:
    """Verdicts of the rollout engines on a model, a line each."""
    try:
        window = DecoderConfig.from_fields(fields).max_window
    except (ValueError, KeyError) as error:
        yield f"rollout.engine  slots: no: {error}"
    else:
        if window is not None and window < context:
            yield (
                f"rollout.engine  slots: no: a context of {context:,} tokens is longer than the model's windows of {window:,}: "
                f"take transformers, or model.max_context_tokens={window}"
            )
        else:
            limit = "" if window is None else f", up to a context of {window:,} tokens, which its windows are"
            yield f"rollout.engine  slots: yes{limit}"
    why = why_not_generated(fields, context) if config.model.lora is None else "it applies no low-rank adapters"
    yield f"rollout.engine  transformers: {f'no: {why}' if why else 'yes'}"
    yield "rollout.engine  vllm: as vLLM's list of models says (docs/vllm.md)"


def _shapes(fields: Mapping[str, Any], module: Any) -> Shapes:
    """Shapes of a model, by whatever names its config.json has them (GPT-2's `n_embd`), its parameters counted. Raises `UserError`
    where they are not known."""
    config = module.config
    known = {name: getattr(config, name, None) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    known["intermediate_size"] = getattr(config, "n_inner", None) or 4 * (known["hidden_size"] or 0)  # unless it has that name
    named = {name: value for name, value in known.items() if value}
    return replace(Shapes.of({**named, **fields}), counted=module.num_parameters())


def _memory(config: Config, fields: Mapping[str, Any], module: Any, context: int, adapter: int | None) -> Iterator[str]:
    try:
        shapes = replace(_shapes(fields, module), counted_adapter=adapter)
    except UserError as error:
        count, sum_bytes = module.num_parameters(), 8 if config.train.accumulate == "exact" else 4
        training, rollout = (4 + sum_bytes + 8) * count / GIB, (4 if config.rollout.dtype == "float32" else 2) * count / GIB
        yield f"memory          {training:.2f} GiB of weights, sums and optimiser state to train, {rollout:.2f} GiB to generate"
        yield f"                the rest is not known: {error}"
        return
    prompt = max(1, context - config.rollout.max_new_tokens)
    staleness = make_schedule(config).max_staleness
    yield from lines(
        config, shapes, prompt_tokens=prompt, context=context, max_staleness=staleness, device_bytes=memory_of_accelerator()
    )
    parts = [
        *training_parts(config, shapes, prompt),
        *rollout_parts(config, shapes, context),
        *host_parts(config, shapes, staleness),
    ]
    needed, here = sum(part.num_bytes for part in parts) / GIB, psutil.virtual_memory().available / GIB
    verdict = "enough" if needed < here else "too little"
    yield f"this machine    all of it on the CPU: {needed:.1f} GiB of {here:.1f} available, {verdict}"
    for name, what in accelerators():
        yield f"this machine    {name}: {what}"
