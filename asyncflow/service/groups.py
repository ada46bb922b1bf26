"""Groups as they were trained, for reading: of a step's kept batch (`telemetry.keep_batches`), response by response and token by
token, or of `samples.jsonl`; and single responses of `samples.jsonl`, with what the trainer made of each token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from asyncflow.algorithms import ALGORITHMS
from asyncflow.config import Config, load
from asyncflow.control import SCHEDULES
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.loops.samples import PROMPT_COLUMNS, REFERENCE_COLUMN, VALUES_COLUMN
from asyncflow.loops.training_batches import scored_group
from asyncflow.run.factories import group_bits_of, make_algorithm
from asyncflow.run.in_worker.connection import model_begun_with
from asyncflow.run_dir import CONFIG_FILE
from asyncflow.telemetry.batches import kept_steps, read_batch
from asyncflow.telemetry.run_reader import RunReader
from asyncflow.telemetry.sample_search import groups_by_step
from asyncflow.telemetry.tokens import TrainedTokens, read_tokens, token_versions
from asyncflow.types import Advantages, Array, Batch, Ragged, UserError, Values


def steps_with_groups(run: RunReader) -> list[int]:
    """Steps that are trained and of which at least a group can be read, in order."""
    trained = {row["step"] for row in run.rows}
    return sorted({*kept_steps(run.path), *trained.intersection(groups_by_step(run.samples))})


def groups_of(run: RunReader, step: int) -> list[dict[str, Any]]:
    """The groups of a step: number, responses, mean reward. Where its batch was not kept, those that were sampled."""
    if step in kept_steps(run.path):
        return _kept_groups(run.path, step)
    sampled = groups_by_step(run.samples).get(step, {})
    return [
        {"group": group, "size": len(rows), "mean": float(np.mean([row["reward"] for row in rows]))}
        for group, rows in sampled.items()
    ]


def group_figures(run: RunReader, step: int, group: int) -> dict[str, Any]:
    """A group of a step: its prompt, and of each row the reward, the advantage, and each token with what is known of it; where its
    batch was not kept, the `sample`, and whether `token_figures` knows its tokens.

    Text of tokens is there where the model's tokenizer is; otherwise they are shown by number. Advantages of a kept batch are
    computed for AsyncFlow's own algorithms, since no code of a run's folder is run; of another one they are those of
    `tokens.jsonl`, which has the sampled rows. Raises `RunError`, `UserError`.
    """
    if step in kept_steps(run.path):
        return _kept_group(run.path, step, group)
    samples = groups_by_step(run.samples).get(step, {}).get(group)
    if samples is None:
        raise UserError(f"step {step} has no group {group} that was kept or sampled")
    trained = _trained(run.path, [sample["row"] for sample in samples])
    rows = [
        {
            "row": sample["row"],
            "reward": sample["reward"],
            "advantage": trained[sample["row"]].advantage if sample["row"] in trained else None,
            "truncated": sample.get("finish_reason") == "length",
            "sample": sample,
            "is_told": sample["row"] in trained and bool(trained[sample["row"]].ids),
        }
        for sample in samples
    ]
    return {"prompt": samples[0].get("prompt") or "", "rows": rows}


def _kept_groups(run_dir: Path, step: int) -> list[dict[str, Any]]:
    batch, bits = read_batch(run_dir, step), _group_bits(run_dir)
    rewards, groups = batch.dense("reward"), batch.indices >> bits
    return [
        {"group": int(group), "size": int((groups == group).sum()), "mean": float(rewards[groups == group].mean())}
        for group in batch.groups
    ]


def _kept_group(run_dir: Path, step: int, group: int) -> dict[str, Any]:
    batch, config = read_batch(run_dir, step), _config(run_dir)
    places = np.flatnonzero(batch.indices >> _group_bits(run_dir) == group)
    position = np.flatnonzero(batch.groups == group)
    if not len(places) or not len(position):
        raise UserError(f"step {step} has no group {group}")
    texts = _Texts(run_dir)
    alone = _part(batch, int(position[0]), places)
    advantages = _advantages(config, batch, alone, run_dir)
    rows = [_row_figures(alone, number, advantages, texts) for number in range(len(alone))]
    if advantages is None:
        trained = _trained(run_dir, alone.indices.tolist())
        rows = [row | {"advantage": trained[row["row"]].advantage} if row["row"] in trained else row for row in rows]
    return {"prompt": texts.whole(alone.ragged("prompt_ids")[0]), "rows": rows}


def _trained(run_dir: Path, rows: Sequence[int]) -> dict[int, TrainedTokens]:
    return {each.row: each for each in read_tokens(run_dir, rows)}


def token_figures(run_dir: Path, row: int) -> list[dict[str, Any]]:
    """A response of `samples.jsonl` in each epoch that trained it: the step, and each token with what the rollout engine and the
    trainer have said of it. Empty where it was not computed in training. `num_more`: tokens that were not kept."""
    texts = _Texts(run_dir)
    return [
        {
            "step": trained.step,
            "epoch": trained.epoch,
            "num_more": trained.length - len(trained.ids),
            "tokens": _token_cells(
                texts.each(np.array(trained.ids, np.int64)),
                {"logprob": trained.logprobs, "mask": trained.mask, "version": trained.versions, **trained.figures},
            ),
        }
        for trained in read_tokens(run_dir, [row])
        if trained.ids
    ]


def _token_cells(texts: Sequence[str], columns: Mapping[str, Sequence[float | None]]) -> list[dict[str, Any]]:
    """Each token with its text and its number in every column."""
    return [{"text": text, **{name: column[i] for name, column in columns.items()}} for i, text in enumerate(texts)]


def _row_figures(batch: Batch, number: int, advantages: Advantages | None, texts: _Texts) -> dict[str, Any]:
    ids = batch.ragged("response_ids")[number]
    columns: dict[str, Array] = {
        "logprob": batch.ragged("rollout_logprobs")[number],
        "mask": batch.ragged("loss_mask")[number],
        "version": token_versions(batch.ragged("version_spans")[number], len(ids)),
    }
    known = {"log-prob of the reference": REFERENCE_COLUMN.name, "value": VALUES_COLUMN.name}
    columns |= {name: batch.ragged(column)[number] for name, column in known.items() if column in batch.columns}
    is_by_token = isinstance(advantages, Ragged)
    if isinstance(advantages, Ragged):
        columns["advantage"] = advantages[number]
    shown = {name: [round(value, 6) for value in column.tolist()] for name, column in columns.items()}
    advantage = None if advantages is None else float(np.mean(advantages[number])) if is_by_token else float(advantages[number])
    return {
        "row": int(batch.indices[number]),
        "reward": float(batch.dense("reward")[number]),
        "advantage": advantage,
        "truncated": bool(batch.dense("truncated")[number]),
        "tokens": _token_cells(texts.each(ids), shown),
    }


def _part(batch: Batch, group: int, rows: Array) -> Batch:
    """One group of a batch."""
    columns: dict[str, Values] = {}
    for name, values in batch.columns.items():
        taken = np.array([group]) if name in PROMPT_COLUMNS else rows
        columns[name] = values.take(taken) if isinstance(values, Ragged) else values[taken]
    return Batch(batch.indices[rows], batch.groups[group : group + 1], columns)


def _advantages(config: Config, batch: Batch, alone: Batch, run_dir: Path) -> Advantages | None:
    """Advantages of a group, as its step computed them; None for an algorithm of somebody's own."""
    if config.algorithm.name not in ALGORITHMS or config.schedule.name not in SCHEDULES:
        return None
    algorithm = make_algorithm(config)
    scored = scored_group(alone)
    advantages = algorithm.advantages(scored)
    if not algorithm.waits_for_batch:
        return advantages
    bits, sums = _group_bits(run_dir), None
    for position, group in enumerate(batch.groups):
        other = scored_group(_part(batch, position, np.flatnonzero(batch.indices >> bits == group)))
        found = np.asarray(algorithm.statistics(other, algorithm.advantages(other)))
        sums = found if sums is None else sums + found
    return algorithm.normalised(advantages, [] if sums is None else sums.tolist())


class _Texts:
    """Texts of tokens, by the tokenizer of the model that the run began with; their numbers where there is none."""

    def __init__(self, run_dir: Path) -> None:
        self._tokenizer = _tokenizer(run_dir)

    def whole(self, ids: Array) -> str:
        return self._tokenizer.decode_all(ids) if self._tokenizer is not None else " ".join(map(str, ids.tolist()))

    def each(self, ids: Array) -> list[str]:
        return [self.whole(ids[i : i + 1]) + ("" if self._tokenizer is not None else " ") for i in range(len(ids))]


@lru_cache(maxsize=8)
def _tokenizer(run_dir: Path) -> CheckpointTokenizer | None:
    try:
        return CheckpointTokenizer(model_begun_with(run_dir))
    except UserError:
        return None


def _config(run_dir: Path) -> Config:
    return load(run_dir / CONFIG_FILE)


def _group_bits(run_dir: Path) -> int:
    return group_bits_of(_config(run_dir))
