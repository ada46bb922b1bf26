"""Prompts from data sets: rows, the columns that make a prompt, token ids, and rows that are too long and left out. No torch.

config --read_source--> Source: rows, columns --tokenize--> prompts --short_enough--> those that are kept
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from asyncflow.config import Config
from asyncflow.data.columns import Columns, find_columns, template_columns
from asyncflow.data.datasets import DataRow, Split, has_parts, load_rows
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.loops.samples import Prompt
from asyncflow.types import UserError


@dataclass(frozen=True, slots=True)
class DataRows:
    """The rows of a data set, and where their prompts and answers are. `name`: what messages call it."""

    name: str
    rows: list[DataRow]
    columns: Columns

    def texts(self) -> Iterator[str]:
        """The prompts' texts, for a vocabulary to be made from: of conversations, what their messages say."""
        for row in self.rows:
            prompt = self.columns.prompt_of(row)
            if isinstance(prompt, str):
                yield prompt
            else:
                yield from (str(message["content"]) for message in prompt)


def read_source(config: Config, split: Split) -> DataRows:
    """The data set to train on, or the held-out one, which there must be. Raises `UserError` for what is wrong with it."""
    data, held_out = config.data, config.eval
    if split == "train":
        if data.path is None:
            raise UserError("data.path is not set, so there are no rows to read: name a data set")
        path, named, subset, limit = data.path, data.split, data.subset, data.limit
    else:
        assert held_out.path is not None
        path, named, subset, limit = held_out.path, held_out.split, held_out.subset or data.subset, held_out.num_prompts
    section = "data" if split == "train" else "eval"
    of_section = subset if split == "train" else held_out.subset
    if not has_parts(path) and (of_section is not None or named not in ("train", "test")):
        key = "subset" if of_section is not None else "split"
        raise UserError(
            f"{section}.{key}={of_section or named}, but {path} is one whole, without subsets and splits: leave it out, or set it "
            f"to {'null' if key == 'subset' else 'train'}"
        )
    rows = load_rows(path, seed=config.data_seed, split=split, limit=limit, named=named, subset=subset)
    return source_of(config, rows, path)


def source_of(config: Config, rows: Sequence[DataRow], name: str) -> DataRows:
    """Rows that come from somewhere, with their columns found as the configuration says. Raises `UserError`."""
    data = config.data
    if data.prompt_template is not None and config.environment is None and not template_columns(data.prompt_template):
        raise UserError(
            f"data.prompt_template {data.prompt_template!r} names no column, so that all prompts are the same: name some in "
            f"braces, as in '{{question}}'"
        )
    columns = find_columns(rows, name, template=data.prompt_template, prompt=data.prompt_column, answer=data.answer_column)
    return DataRows(name, list(rows), columns)


def tokenize(
    config: Config, tokenizer: CheckpointTokenizer, source: DataRows, tools: Sequence[Mapping[str, Any]] = ()
) -> list[Prompt]:
    """Rows as prompts, through the chat template where that is asked for, or a prompt is a conversation. Where an environment
    brings the whole chat (`data.prompt_template` is empty), a prompt is the token that every chat of the model begins with.
    `tools`: specifications that the template is given.

    Raises `UserError` naming the row whose prompt has no token: nothing could be generated behind it.
    """
    columns, data = source.columns, config.data
    options = {**data.chat_template_options, **({"tools": list(tools)} if tools else {})}
    brings_chat = config.environment is not None and config.episodes.format.name == "chat" and data.prompt_template == ""
    prompts = []
    for number, row in enumerate(source.rows, 1):
        prompt = columns.prompt_of(row)
        if brings_chat:
            ids = tokenizer.encode_chat("A question.", options)[:1]
        elif isinstance(prompt, str) and not data.chat_template:
            ids = tokenizer.encode(prompt)
        else:
            ids = tokenizer.encode_chat(prompt, options)
        if not len(ids):
            raise UserError(
                f"the prompt of row {number} of {source.name} has no tokens: leave such rows out, or name what makes a prompt by "
                f"data.prompt_column or data.prompt_template"
            )
        prompts.append(Prompt(ids, columns.example_of(row)))
    return prompts


def short_enough(config: Config, prompts: list[Prompt], name: str) -> list[Prompt]:
    """Prompts of at most `data.max_prompt_tokens` tokens. Raises `UserError` where none is left."""
    most = config.data.max_prompt_tokens
    kept = [prompt for prompt in prompts if most is None or len(prompt.ids) <= most]
    if not kept:
        shortest = min(len(prompt.ids) for prompt in prompts)
        raise UserError(
            f"every prompt of {name} is longer than data.max_prompt_tokens = {most}: the shortest has {shortest} tokens; raise it"
        )
    return kept


def left_out_lines(config: Config, num_left_out: tuple[int, int], num_kept: tuple[int, int]) -> Iterator[str]:
    """Messages about prompts that are left out, of those to train on and of the held-out ones."""
    for what, left_out, kept in zip(("prompts", "held-out prompts"), num_left_out, num_kept, strict=True):
        if left_out:
            most = config.data.max_prompt_tokens
            yield f"{left_out:,} of {left_out + kept:,} {what} have more than data.max_prompt_tokens = {most} tokens: left out"
