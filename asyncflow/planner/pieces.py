"""Pieces of work of a run, from its folder: what was done, how long it took, and how many workers computed beside it.

    spans.jsonl, metrics.jsonl, config.yaml --read_run--> spans, metrics --samples--> timed work, by the pieces that costs have
                                                                         --lengths_of--> lengths of prompts and responses

`measured.py` fits costs to them.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import msgspec
import numpy as np

from asyncflow.config import Config, load
from asyncflow.engines.cores import CRITIC, REFERENCE, ROLLOUT, TRAIN
from asyncflow.engines.costs import Lengths
from asyncflow.loops.samples import VALUES_TASK
from asyncflow.model_folder import read_json
from asyncflow.planner.contention import BusyWorkers
from asyncflow.planner.fit import TimedWork
from asyncflow.run.factories import critic_fields, critic_tokens_per_pass, tokens_per_pass
from asyncflow.run.state.resume import metrics_of
from asyncflow.run_dir import CONFIG_FILE, METRICS_FILE
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SPANS_FILE, join_pieces, read_spans
from asyncflow.types import UserError

WARM_UP: Final = 2
"""Steps at a run's beginning that nothing is made of: they load, and check, and compile."""
CENSORED: Final = 0.02
"""Share of responses that were cut off, from which on it is considered in their distribution."""
BEYOND: Final = 1 << 20
"""Median of responses that were nearly all cut off, in tokens: what they would have been is not known."""


class Piece(msgspec.Struct, frozen=True):
    """Kind of work: whose it is, and the fields of `Costs` that its seconds are made of, one for each amount of a sample."""

    pool: str
    terms: tuple[str, ...]


PIECES: Final[Mapping[str, Piece]] = {
    "decode_step": Piece(ROLLOUT, ("decode_step_seconds", "decode_slot_seconds", "decode_context_seconds")),
    "prefill": Piece(ROLLOUT, ("prefill_seconds", "prefill_token_seconds")),
    "install": Piece(ROLLOUT, ("install_seconds", "install_byte_seconds")),
    "forward_backward": Piece(TRAIN, ("collectives_seconds", "forward_backward_seconds", "train_token_seconds")),
    "optim_step": Piece(TRAIN, ("optim_step_seconds",)),
    "reference": Piece(REFERENCE, ("reference_seconds", "reference_token_seconds")),
    "values": Piece(CRITIC, ("value_token_seconds",)),
    "critic_update": Piece(CRITIC, ("critic_seconds", "critic_token_seconds")),
    "critic_update_optim_step": Piece(CRITIC, ("critic_optim_step_seconds",)),
    "publish": Piece("", ("publish_seconds", "publish_byte_seconds")),
    "fetch": Piece("", ("fetch_seconds", "fetch_byte_seconds")),
    "score": Piece("", ("reward_seconds",)),
}
"""By task of a span. The first of a pool shows its contention. Without a pool the work is not slowed down: it is measured beside
whatever goes on in a run."""

StepRow = Mapping[str, float]
WorkByPiece = dict[str, list[TimedWork]]


def read_run(run_dir: Path) -> tuple[Config, list[Span], dict[int, StepRow]]:
    """Configuration, spans, and metrics by step. Raises `UserError` where costs cannot be made of them."""
    for name in (CONFIG_FILE, SPANS_FILE, METRICS_FILE):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} has no {name}: name the folder of a run, such as runs/quickstart")
    rows: dict[int, StepRow] = {int(row["step"]): row for row in metrics_of(run_dir)}
    if len(rows) <= WARM_UP:
        raise UserError(f"{run_dir} has {len(rows)} steps, of which the first {WARM_UP} are not counted: give it a longer run")
    return load(run_dir / CONFIG_FILE), join_pieces(read_spans(run_dir / SPANS_FILE)), rows


def samples(config: Config, spans: Sequence[Span], prompt_tokens: float) -> WorkByPiece:
    """Pieces of work of a run or of a profile, by the tasks of `PIECES`; what happened before the warm-up's end is left out.

    `prompt_tokens`: mean length of a prompt, by which packed tokens follow from a span's.
    """
    group, layout = config.rollout.group_size, config.layout
    per_micro_batch = config.train.responses_per_micro_batch or group
    pass_tokens = tokens_per_pass(config, read_json(Path(config.model.path) / "config.json"))
    of_critic = critic_tokens_per_pass(config, critic_fields(config))
    begun = min((span.start for span in spans if span.task == "optim_step" and span.step >= WARM_UP - 1), default=-math.inf)
    longest = _longest_of_rounds(spans) if layout.dp > 1 else set()

    def amounts(span: Span) -> tuple[float, ...] | None:
        """Amounts of a span, one for each term; None: it is not what the piece means."""
        micro_batches = -(-span.rows // per_micro_batch)
        packed = span.tokens + micro_batches * prompt_tokens  # of a span that counts response tokens
        match span.task:
            case "decode_step":
                return max(span.calls, 1), span.rows, span.tokens
            case "prefill":
                return (1.0, span.tokens) if span.tokens else None
            case "forward_backward" | "critic_update":
                is_longest = span.task == "critic_update" or layout.dp == 1 or id(span) in longest
                if not span.rows or not is_longest:  # the other ranks' spans end with the longest of their round
                    return None
                packed = span.tokens - (span.rows - micro_batches) * prompt_tokens
                if span.task == "critic_update":
                    passes = micro_batches if of_critic is None else max(1, -(-round(packed) // of_critic))
                    return min(passes, micro_batches), packed
                least = config.train.pipeline_micro_batches if layout.pp > 1 else 1
                passes = micro_batches if pass_tokens is None else max(least, -(-round(packed) // pass_tokens))
                return float(layout.dp > 1), min(passes, micro_batches), packed
            case "reference":
                return micro_batches, packed
            case "values":
                return (packed,)
            case "install" if span.worker.startswith(f"{VALUES_TASK}/"):
                return None  # of the critic's weights, in another engine
            case "score":
                return (max(span.calls, 1),)
            case "install" | "publish" | "fetch":
                return 1.0, span.bytes
            case _:
                return (1.0,)

    busy = BusyWorkers(spans)
    found: WorkByPiece = {name: [] for name in PIECES}
    starts = np.array([span.start for span in spans])
    ends = np.array([span.end for span in spans])
    workers = np.array([span.worker for span in spans])
    computing = np.zeros(len(spans))
    for worker in set(workers.tolist()):
        own = workers == worker
        computing[own] = busy.mean_others(worker, starts[own], ends[own])
    for span, others in zip(spans, computing.tolist(), strict=True):
        if span.task in found and span.start >= begun and (of := amounts(span)) is not None:
            found[span.task].append(TimedWork(tuple(float(each) for each in of), span.end - span.start, others))
    return found


def _longest_of_rounds(spans: Iterable[Span]) -> set[int]:
    """Span (`id`) of each round of data-parallel ranks whose part is the longest: all ranks wait for it."""
    by_step: dict[int, dict[str, list[Span]]] = {}
    for span in spans:
        if span.task == "forward_backward" and span.is_lane:
            by_step.setdefault(span.step, {}).setdefault(span.worker, []).append(span)
    return {
        id(max(together, key=lambda span: span.tokens))
        for ranks in by_step.values()
        for together in zip(*ranks.values(), strict=False)
    }


def loads(spans: Iterable[Span]) -> list[float]:
    """Seconds that each worker loads."""
    seconds: dict[str, float] = {}
    for span in spans:
        if span.task == "load":
            seconds[span.worker] = seconds.get(span.worker, 0.0) + span.end - span.start
    return list(seconds.values())


# -- lengths ----------------------------------------------------------------------------------------------------


def lengths_of(config: Config, spans: Sequence[Span], rows: Mapping[int, StepRow]) -> Lengths:
    """Lengths of prompts and responses of the steps in `rows`."""
    means = [row["response_length/mean"] for row in rows.values()]
    groups = [
        span.tokens / span.rows
        for span in spans
        if span.task in ("forward_backward", "train_group")
        and span.step in rows
        and span.rows == config.rollout.group_size
        and span.tokens
    ]
    mean = statistics.fmean(means)
    prompt = max(1.0, statistics.fmean(groups) - mean) if groups else 1.0  # logical tokens of a row: its prompt and its response
    clipped = statistics.fmean(row["response_length/clipped_ratio"] for row in rows.values())
    spread = math.sqrt(statistics.fmean(row.get("response_length/std", 0.0) ** 2 for row in rows.values()))
    median, sigma = lognormal(mean, spread, clipped, config.rollout.max_new_tokens)
    of_groups = (statistics.pstdev(groups) / mean) ** 2 - sigma**2 / config.rollout.group_size if len(groups) > 1 else 0.0
    between = math.sqrt(min(max(0.0, of_groups), 0.95 * sigma**2))
    within = math.sqrt(sigma**2 - between**2)
    return Lengths(prompt=round(prompt), response_median=median, response_sigma=within, prompt_sigma=between)


def lognormal(mean: float, spread: float, clipped: float, limit: int) -> tuple[float, float]:
    """Median and sigma of lognormal lengths that, cut off at `limit` tokens, have this mean, this standard deviation and this share
    of responses that are cut off.
    """
    if clipped > 1 - CENSORED:
        return float(BEYOND), 0.0
    if clipped < CENSORED:
        sigma = math.sqrt(math.log1p((spread / mean) ** 2))
        return mean * math.exp(-(sigma**2) / 2), sigma
    normal, low, high = statistics.NormalDist(), 1e-3, 5.0
    quantile = normal.inv_cdf(1 - clipped)  # of the limit
    for _ in range(50):
        sigma = (low + high) / 2
        centre = math.log(limit) - sigma * quantile
        of_sigma = math.exp(centre + sigma**2 / 2) * normal.cdf(quantile - sigma) + limit * clipped
        low, high = (sigma, high) if of_sigma > mean else (low, sigma)  # the wider, the shorter are those that are not cut off
    return math.exp(centre), sigma
