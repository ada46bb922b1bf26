"""Scorers tried before a run: on the responses of a file, or on made-up ones for the first rows of the data.

rows, responses --> samples --reward processes, as a run has them--> a reward, or why there is none
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Final

from asyncflow.config import Config
from asyncflow.data.datasets import read_json_lines
from asyncflow.rewards.answers import reference, text_of
from asyncflow.rewards.base import RewardFailure, Sample, Score
from asyncflow.run.factories import reward_pool
from asyncflow.run.preparation.prompts import read_source
from asyncflow.types import UserError

MADE_UP: Final = "I do not know."
"""Response that is right nowhere."""


@dataclass(frozen=True, slots=True)
class TriedResponse:
    """Response that was scored. `name`: what it is; `outcome`: its reward, or why it has none."""

    name: str
    sample: Sample
    outcome: Score | RewardFailure


def made_up(config: Config, num_rows: int) -> Iterator[tuple[str, Sample]]:
    """Two responses for each of the first rows of the data: its reference answer, if it has one, and one that is wrong. Raises
    `UserError` for data that cannot be read."""
    source = read_source(config, "train")
    for number, row in enumerate(islice(source.rows, num_rows), 1):
        prompt = source.columns.prompt_of(row)
        text = prompt if isinstance(prompt, str) else "\n".join(str(message["content"]) for message in prompt)
        asked = Sample(text, MADE_UP, source.columns.example_of(row), is_finished=True)
        try:
            answer = text_of(reference(asked))
        except ValueError:  # there is none
            pass
        else:
            yield f"the answer alone, row {number}", Sample(text, answer, asked.example, is_finished=True)
        yield f"a wrong response, row {number}", asked


def responses_in(path: Path) -> Iterator[tuple[str, Sample]]:
    """Responses of a JSON Lines file: each line has a `response`, perhaps a `prompt`, and the data's row as `example`, or as its
    other columns. `unscored.jsonl` of a run is such a file. Raises `UserError`."""
    for number, line in enumerate(read_json_lines(path), 1):
        if not isinstance(line.get("response"), str):
            raise UserError(f"{path}, line {number} has no text 'response'")
        rest = {name: value for name, value in line.items() if name not in ("response", "example")}
        example = line["example"] if isinstance(line.get("example"), dict) else rest
        yield f"line {number}", Sample(str(line.get("prompt", "")), line["response"], example, is_finished=True)


async def try_scorers(config: Config, responses: Sequence[tuple[str, Sample]]) -> list[TriedResponse]:
    """Score the responses by processes as a run has them. A reward model is not asked. Raises `UserError` for a scorer that cannot
    be built, or where there is none."""
    if not config.reward.parts:
        raise UserError("this configuration has no scorer to try: reward.model alone gives its rewards")
    pool = reward_pool(config, "trial")
    await pool.start()
    try:
        outcomes = await asyncio.gather(*(pool.score(sample) for _, sample in responses), return_exceptions=True)
    finally:
        await pool.close()
    tried = []
    for (name, sample), outcome in zip(responses, outcomes, strict=True):
        if not isinstance(outcome, Score | RewardFailure):
            raise outcome
        tried.append(TriedResponse(name, sample, outcome))
    return tried
