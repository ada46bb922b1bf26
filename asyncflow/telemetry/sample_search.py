"""Search in a run's samples: by words, step, reward, length and how they ended; and the groups among them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from asyncflow.telemetry.hub import UnscoredResponse

FAILED = "failed"
"""The end of a response that could not be scored."""


class SampleQuery(msgspec.Struct, frozen=True, kw_only=True):
    """Query for samples; None and "": anything. `words`: all of them, in prompt or response, in any case. `ended`: one of
    `stop`, `length`, how an episode ended, or `failed`."""

    words: str = ""
    purpose: str = ""
    ended: str = ""
    first_step: int | None = None
    last_step: int | None = None
    least_reward: float | None = None
    most_reward: float | None = None
    least_length: int | None = None
    most_length: int | None = None


def find(samples: Sequence[dict[str, Any]], unscored: Sequence[UnscoredResponse], query: SampleQuery) -> list[dict[str, Any]]:
    """Samples that match, the newest first: lines of `samples.jsonl` with their `number` in it and the `length` of the response in
    characters; those that could not be scored have no step, and say `why`."""
    words = query.words.lower().split()
    return [sample for sample in _all(samples, unscored) if _matches(sample, query, words)]


def groups_by_step(samples: Iterable[Mapping[str, Any]]) -> dict[int, dict[int, list[Mapping[str, Any]]]]:
    """The groups of training of which `samples.jsonl` has several responses: step -> group -> its samples, by row."""
    found: dict[int, dict[int, dict[int, Mapping[str, Any]]]] = {}
    for sample in samples:
        if sample.get("purpose") == "train" and isinstance(sample.get("group"), int):  # older runs do not name it
            found.setdefault(sample["step"], {}).setdefault(sample["group"], {})[sample["row"]] = sample
    several = {
        step: {group: [rows[row] for row in sorted(rows)] for group, rows in groups.items() if len(rows) > 1}
        for step, groups in found.items()
    }
    return {step: groups for step, groups in several.items() if groups}


def _all(samples: Sequence[dict[str, Any]], unscored: Sequence[UnscoredResponse]) -> Iterator[dict[str, Any]]:
    for number in range(len(samples) - 1, -1, -1):
        sample = samples[number]
        yield {**sample, "number": number, "length": len(str(sample.get("response") or ""))}
    for each in reversed(unscored):
        fields = {"prompt": each.prompt, "response": each.response, "length": len(each.response), "why": each.trace or each.error}
        yield {"step": None, "number": -1, "finish_reason": FAILED, "purpose": "train", "kind": each.kind, **fields}


def _matches(sample: dict[str, Any], query: SampleQuery, words: Sequence[str]) -> bool:
    if query.purpose and sample.get("purpose") != query.purpose:
        return False
    if query.ended and sample.get("finish_reason") != query.ended:
        return False
    bounds = (
        (sample.get("step"), query.first_step, query.last_step),
        (sample.get("reward"), query.least_reward, query.most_reward),
        (sample["length"], query.least_length, query.most_length),
    )
    for value, least, most in bounds:
        if least is not None and (value is None or value < least):
            return False
        if most is not None and (value is None or value > most):
            return False
    text = f"{sample.get('prompt')} {sample.get('response')}".lower() if words else ""
    return all(word in text for word in words)
