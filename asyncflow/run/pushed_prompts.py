"""Prompts that are pushed while a run goes on.

push --checked, as tokens--> journal, or this process's memory --> the order of the data
a next attempt --> those that are in no checkpoint
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncflow.config import Config
from asyncflow.data.datasets import as_json
from asyncflow.data.order import SeededOrder
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.loops.samples import Prompt
from asyncflow.rows import ANSWER
from asyncflow.run.factories import queue_schema, shape_of
from asyncflow.run.preparation.prepare import Prepared
from asyncflow.run.preparation.prompts import source_of, tokenize
from asyncflow.run.state.driver_state import Resumed
from asyncflow.run.state.journal import Journal, Kept, PutPrompt
from asyncflow.types import UserError

_NAME = "the pushed prompts"


class PushedPrompts:
    """Prompts of one run, which outlive its attempts; with a journal, its process too."""

    def __init__(self, config: Config, journal: Journal | None) -> None:
        self._config, self._journal = config, journal
        self._kept: list[PutPrompt] = []  # without a journal
        self._next_place = 0  # of the attempts before: see `SeededOrder`
        self._tokenizer: CheckpointTokenizer | None = None

    def left(self, source: SeededOrder[Prompt]) -> None:
        """Take note of how far an attempt has come in the order of the data: steps that are made again keep their prompts."""
        self._next_place = max(self._next_place, source.next_place)

    def push(self, rows: Iterable[Mapping[str, Any]], prepared: Prepared, source: SeededOrder[Prompt]) -> bool:
        """Train on these rows next. False: there are none. Raises `UserError` for one that lacks a column or is too long."""
        given = [] if isinstance(rows, str | Mapping) or not isinstance(rows, Iterable) else [*rows]
        if not all(isinstance(row, Mapping) for row in given) or (not given and rows != []):
            raise UserError(f"{_NAME} must be a list of rows, each a mapping of columns, as data.path has them")
        new = [*as_json(map(dict, given), _NAME)]
        if not new:
            return False
        prompts = self._as_prompts(new, _NAME, prepared)
        self._check(prompts, prepared)
        after, first = max(source.next_place, self._next_place), source.num_pushed
        put = [PutPrompt(number, first, after, dict(row)) for number, row in enumerate(new, first)]
        if self._journal is not None:
            # Before they can be trained: what an attempt has of them is what the journal begins with.
            self._journal.add_prompts(put)
        else:
            self._kept += put
        source.push(prompts, after)
        return True

    def to_resume(self, prepared: Prepared, resumed: Resumed | None) -> tuple[Kept, Sequence[Prompt]]:
        """Rows that the run resumes with, those of its journal beside a checkpoint's; and prompts that were pushed and are in none,
        as tokens. Without a journal these are of this process."""
        num_pushed, version, rows = (resumed.state.num_pushed, resumed.state.version, resumed.rows) if resumed else (0, 0, None)
        if self._journal is not None:
            outputs = queue_schema(self._config).task("rollout").outputs
            kept = self._journal.read(num_pushed, version * shape_of(self._config).numbers_per_step, rows, outputs)
        else:
            kept = Kept([put for put in self._kept if put.number >= num_pushed], rows)
        prompts: list[Prompt] = []
        for _, together in itertools.groupby(kept.prompts, lambda put: put.first):  # each time with columns of their own
            prompts += self._as_prompts([put.row for put in together], "the prompts that were put", prepared)
        return kept, prompts

    def _as_prompts(self, rows: Sequence[dict[str, Any]], name: str, prepared: Prepared) -> Sequence[Prompt]:
        self._tokenizer = self._tokenizer or CheckpointTokenizer(prepared.model)
        return tokenize(self._config, self._tokenizer, source_of(self._config, rows, name), prepared.tools)

    def _check(self, prompts: Sequence[Prompt], prepared: Prepared) -> None:
        has_answers = bool(prepared.prompts) and ANSWER in prepared.prompts[0].example
        most_new = self._config.rollout.max_new_tokens
        for number, prompt in enumerate(prompts, 1):
            if has_answers and ANSWER not in prompt.example:
                raise UserError(
                    f"row {number} of {_NAME} has no answer, as the rows of {self._config.data.path} have: give it the same columns"
                )
            if len(prompt.ids) + most_new > prepared.max_context:
                raise UserError(
                    f"row {number} of {_NAME} has {len(prompt.ids)} tokens: with {most_new} "
                    f"new ones more than the run's context of {prepared.max_context}; set model.max_context_tokens"
                )
