"""Costs measured: from a run's folder, or from a short run that is made for it; and what another configuration would take.

    spans.jsonl, metrics.jsonl, config.yaml --samples--> pieces of work, with their amounts and who computed beside them
        --fit.py, contention.py--> Costs, with a residual for each piece
        --simulate the same run--> `left_out`: times as long as simulated that its steps took
    what_if: simulate another configuration with these costs, times `left_out`

A figure is a mean, not a median: a step takes what all of its pieces take, the slow ones too.
"""

from __future__ import annotations

import asyncio
import math
import os
import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from asyncflow.config import Config, load, parse
from asyncflow.engines.cores import Contention
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.engines.sleeping import CRITIC, REFERENCE, ROLLOUT, TRAIN
from asyncflow.loops.samples import VALUES_TASK
from asyncflow.planner.contention import BusyWorkers, alone, factors_of, fit_slowdown
from asyncflow.planner.fit import Fit, Residual, TimedWork, fit, residual
from asyncflow.run.job import Job
from asyncflow.run_dir import CONFIG_FILE
from asyncflow.simulation.run import simulate
from asyncflow.telemetry.profile import Cost, costs
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SPANS_FILE, join_pieces, read_spans
from asyncflow.types import RunError, UserError

METRICS_FILE: Final = "metrics.jsonl"
WARM_UP: Final = 2
"""Steps at a run's beginning that nothing is made of: they load, and check, and compile."""
MEASURED_STEPS: Final = 10
"""Steps of a run that is made to be measured."""
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

Row = Mapping[str, float]
Pieces = dict[str, list[TimedWork]]


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a run, and how well they describe it.

    `step_seconds`: mean of the run's steps; `left_out`: the same over what is simulated with these costs. `notes`: what is not
    known, one sentence each.
    """

    costs: Costs
    residuals: tuple[Residual, ...]
    step_seconds: float
    left_out: float = 1.0
    notes: tuple[str, ...] = ()

    @property
    def warnings(self) -> list[str]:
        """Sentences, one for each piece that the costs describe badly."""
        return [said for each in self.residuals if (said := each.warning())]

    def lines(self) -> list[str]:
        """The residuals, the warnings and the notes, as they are printed."""
        shown = [each.line() for each in self.residuals]
        if (contention := self.costs.contention) is not None:
            slowed = ", ".join(f"{pool} {slowdown:.0%}" for pool, slowdown in sorted(contention.slowdown.items()))
            shown.append(f"slower while all {contention.cores} cores compute: {slowed or 'not known'}")
        shown.append(f"steps of {self.step_seconds:.3g} s took {self.left_out:.2f} times what is simulated with these costs")
        return [*shown, *(f"warning: {said}" for said in self.warnings), *(f"note: {note}" for note in self.notes)]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of a configuration. Means over its steps, but for those of the warm-up."""

    step_seconds: float
    tpspd: float


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of another configuration, beside the run that it is made from."""

    measurement: Measurement
    measured: Prediction
    predicted: Prediction


# -- from a run's folder ----------------------------------------------------------------------------------------------------


def measured(run_dir: Path) -> Measurement:
    """Costs of a run, from its folder.

    Raises `UserError` for a folder without the files of a run that has trained more than `WARM_UP` steps.
    """
    config, spans, rows = read_run(run_dir)
    return fitted(config, spans, rows)


def read_run(run_dir: Path) -> tuple[Config, list[Span], dict[int, Row]]:
    """Configuration, spans, and metrics by step. Raises `UserError` where costs cannot be made of them."""
    for name in (CONFIG_FILE, SPANS_FILE, METRICS_FILE):
        if not (run_dir / name).is_file():
            raise UserError(f"{run_dir} has no {name}: name the folder of a run, such as runs/quickstart")
    lines = (run_dir / METRICS_FILE).read_bytes().splitlines()
    rows = {int(row["step"]): row for row in map(msgspec.json.decode, lines)}
    if len(rows) <= WARM_UP:
        raise UserError(f"{run_dir} has {len(rows)} steps, of which the first {WARM_UP} are not counted: give it a longer run")
    return load(run_dir / CONFIG_FILE), join_pieces(read_spans(run_dir / SPANS_FILE)), rows


def fitted(
    config: Config, spans: Sequence[Span], rows: Mapping[int, Row], *, cores: int | None = None, known: Costs | None = None
) -> Measurement:
    """Costs of a run of this configuration. `cores`: of the machine; None: this one's, if the run's workers share one.

    `known`: costs of the same model on one trainer. What a round of several ranks takes longer is their collectives' then; without
    it, what does not depend on the tokens is.
    """
    counted = {step: row for step, row in rows.items() if step >= WARM_UP} or dict(rows)
    if cores is None and config.cluster.name == "local" and config.train.device == "cpu" == config.rollout.device:
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    notes: list[str] = []
    lengths = lengths_of(config, spans, counted)
    pieces = samples(config, spans, lengths.prompt)
    fits, slowdown = fit_all(pieces, cores or 1 << 20)
    if known is not None and config.layout.dp > 1:
        slowdown[TRAIN] = 0.0 if known.contention is None else known.contention.slowdown.get(TRAIN, 0.0)
        fits["forward_backward"] = fit_collectives(pieces["forward_backward"], known, slowdown[TRAIN], cores or 1 << 20)
    if not pieces["decode_step"]:
        notes.append("the run has no spans of decode steps, as with vllm: rollout is known by its tokens a second alone")
        fits["decode_step"] = _by_tokens(spans)
    fields = {name: value for each in fits.values() for name, value in each.coefficients.items() if each.residual.num_samples}
    sizes = [span.bytes for span in spans if span.task == "fetch" and span.bytes]
    loads = _loads(spans)
    given: dict[str, Any] = {
        **fields,
        "load_seconds": statistics.fmean(loads) if loads else 0.0,
        "weight_bytes": int(statistics.median(sizes)) if sizes else 0,
        "lengths": lengths,
        "contention": None if cores is None else Contention(cores=cores, slowdown=slowdown),
    }
    if "reward_seconds" not in fields:
        given["reward_seconds"] = 0.0
    costs = Costs(**given)
    residuals = tuple(each.residual for each in fits.values() if each.residual.num_samples)
    seconds = statistics.fmean(row["perf/step_seconds"] for row in counted.values())
    found = Measurement(costs=costs, residuals=residuals, step_seconds=seconds, notes=tuple(notes))
    return msgspec.structs.replace(found, left_out=seconds / predicted(config, found, steps=len(rows)).step_seconds)


def profiled(config: Config, spans: Sequence[Span], *, num_layers: int, prompt_tokens: float) -> tuple[Costs, tuple[Residual, ...]]:
    """Costs from the spans of `asyncflow check --profile`, each piece alone, and their residuals. The policy's training is put
    together from its parts (`of_layers`). `num_layers`: of the model. `prompt_tokens`: as of `samples`.
    """
    pieces = {name: found for name, found in samples(config, spans, prompt_tokens).items() if name != "optim_step"}  # of a layer
    fits = [each for each in fit_all(pieces, 1 << 20)[0].values() if each.residual.num_samples]
    whole = max((span.bytes for span in spans if span.task == "install"), default=Costs().weight_bytes)
    fits += [trained := of_layers(config, costs(spans), num_layers)]
    fields: dict[str, Any] = {name: value for each in fits for name, value in each.coefficients.items()}
    return Costs(**fields, weight_bytes=whole), tuple(each.residual for each in fits if each is not trained)


def of_layers(config: Config, found: Sequence[Cost], num_layers: int) -> Fit:
    """Training from a layer's costs: a micro-batch on one data-parallel group, the collectives of a round, and an update.

    A micro-batch passes its stage's layers forward and backward, the head, and the sums of gradients; a pipeline's bubbles are in
    it. In the collectives each layer is gathered twice and its gradient scattered, and nothing is hidden behind computation. Left
    out, as of the profile: the embedding, frozen models, activation checkpointing.
    """
    by_task: dict[str, list[Cost]] = {}
    for cost in found:
        by_task.setdefault(cost.task, []).append(cost)
    layout, train = config.layout, config.train
    pieces = -(-config.rollout.group_size // (train.responses_per_micro_batch or config.rollout.group_size))
    together = -(-train.pipeline_micro_batches // pieces) * pieces
    bubbles = (together + layout.pp - 1) / together
    layers = -(-num_layers // layout.pp)
    update, adding = by_task["optim_step"][0], by_task["accumulate"][0].seconds
    parts = zip(by_task["layer_forward"], by_task["layer_backward"], by_task["head_loss"], strict=True)
    passes = [
        TimedWork((1.0, forward.tokens), bubbles * (layers * (forward.seconds + backward.seconds + adding) + head.seconds))
        for forward, backward, head in parts
    ]
    fitted_passes = fit("forward_backward", ("forward_backward_seconds", "train_token_seconds"), passes)
    whole = {"optim_step_seconds": layers * update.seconds}
    if layout.dp > 1:
        whole["collectives_seconds"] = layers * sum(
            count * _at(by_task[f"dp/{name}"], update.bytes) for name, count in (("all_gather", 2), ("reduce_scatter", 1))
        )
    return Fit({**fitted_passes.coefficients, **whole}, fitted_passes.squares, fitted_passes.residual)


def _at(messages: Sequence[Cost], num_bytes: float) -> float:
    """Seconds of a collective of so many bytes, from those that were timed."""
    found = fit("collective", ("call", "byte"), [TimedWork((1.0, each.bytes), each.seconds) for each in messages])
    return found.coefficients["call"] + num_bytes * found.coefficients["byte"]


def fit_all(pieces: Mapping[str, Sequence[TimedWork]], cores: int) -> tuple[dict[str, Fit], dict[str, float]]:
    """Fit of every piece, and the slowdown of every pool, which its first piece with samples shows."""
    fits: dict[str, Fit] = {}
    slowdown: dict[str, float] = {}
    for name, piece in PIECES.items():
        found = pieces.get(name, ())
        if piece.pool and piece.pool not in slowdown and found:
            slowdown[piece.pool], fits[name] = fit_slowdown(name, piece.terms, found, cores)
        elif piece.pool:
            fits[name] = alone(name, piece.terms, found, slowdown.get(piece.pool, 0.0), cores)
        else:
            fits[name] = alone(name, piece.terms, [TimedWork(each.amounts, each.seconds) for each in found], 0.0, 1 << 20)
    return fits, {pool: value for pool, value in slowdown.items() if value}


def fit_collectives(found: Sequence[TimedWork], known: Costs, slowdown: float, cores: int) -> Fit:
    """Collectives of a round of data-parallel ranks: what it takes longer, on average, than one trainer's micro-batches."""
    names = PIECES["forward_backward"].terms
    factors = factors_of(found, slowdown, cores)
    amounts = np.array([sample.amounts for sample in found], float).reshape(-1, len(names))
    per_unit = np.array([0.0, known.forward_backward_seconds, known.train_token_seconds])
    seconds = np.array([sample.seconds for sample in found])
    per_unit[0] = max(0.0, float((seconds - factors * (amounts @ per_unit)).sum() / max(factors.sum(), 1e-9)))
    of_model = factors * (amounts @ per_unit)
    squares = float(((seconds - of_model) ** 2).sum())
    return Fit(dict(zip(names, per_unit.tolist(), strict=True)), squares, residual("forward_backward", of_model, seconds))


def residuals(costs: Costs, pieces: Mapping[str, Sequence[TimedWork]]) -> list[Residual]:
    """Residual of any costs, such as computed ones, at measured pieces of work. A term that is missing or counted twice shows."""
    contention, found = costs.contention, []
    for name, each in pieces.items():
        if not each:
            continue
        per_unit = np.array([getattr(costs, term) or 0.0 for term in PIECES[name].terms])
        seconds = np.array([sample.amounts for sample in each], float) @ per_unit
        if contention is not None and PIECES[name].pool:
            seconds *= factors_of(each, contention.slowdown.get(PIECES[name].pool, 0.0), contention.cores)
        found.append(residual(name, seconds, np.array([sample.seconds for sample in each])))
    return found


# -- samples of work ----------------------------------------------------------------------------------------------------


def samples(config: Config, spans: Sequence[Span], prompt_tokens: float) -> Pieces:
    """Pieces of work of a run or of a profile, by the tasks of `PIECES`; what happened before the warm-up's end is left out.

    `prompt_tokens`: mean length of a prompt, by which packed tokens follow from a span's.
    """
    group, layout = config.rollout.group_size, config.layout
    per_pass = config.train.responses_per_micro_batch or group
    begun = min((span.start for span in spans if span.task == "optim_step" and span.step >= WARM_UP - 1), default=-math.inf)
    longest = _longest_of_rounds(spans) if layout.dp > 1 else set()

    def amounts(span: Span) -> tuple[float, ...] | None:
        """Amounts of a span, one for each term; None: it is not what the piece means."""
        passes = -(-span.rows // per_pass)
        packed = span.tokens + passes * prompt_tokens  # of a span that counts response tokens
        match span.task:
            case "decode_step":
                return 1.0, span.rows, span.tokens
            case "prefill":
                return (1.0, span.tokens) if span.tokens else None
            case "forward_backward" | "critic_update":
                is_longest = span.task == "critic_update" or layout.dp == 1 or id(span) in longest
                if not span.rows or not is_longest:  # the other ranks' spans end with the longest of their round
                    return None
                packed = span.tokens - (span.rows - passes) * prompt_tokens
                if span.task == "critic_update":
                    return passes, packed
                return float(layout.dp > 1), passes, packed
            case "reference":
                return passes, packed
            case "values":
                return (packed,)
            case "install" if span.worker.startswith(f"{VALUES_TASK}/"):
                return None  # of the critic's weights, in another engine
            case "install" | "publish" | "fetch":
                return 1.0, span.bytes
            case _:
                return (1.0,)

    busy = BusyWorkers(spans)
    found: Pieces = {name: [] for name in PIECES}
    starts = np.array([span.start for span in spans])
    ends = np.array([span.end for span in spans])
    workers = np.array([span.worker for span in spans])
    beside = np.zeros(len(spans))
    for worker in set(workers.tolist()):
        own = workers == worker
        beside[own] = busy.beside(worker, starts[own], ends[own])
    for span, others in zip(spans, beside.tolist(), strict=True):
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


def _by_tokens(spans: Sequence[Span]) -> Fit:
    """Rollout's seconds of a token, where nothing finer is known: all of it is a slot's part of a decode step."""
    lanes = [span for span in spans if span.is_lane and span.task == "generate"]
    tokens, seconds = sum(span.tokens for span in lanes), sum(span.end - span.start for span in lanes)
    known = Residual("decode_step", len(lanes), 0.0, 0.0, 0.0, 0.0, False)
    return Fit({"decode_step_seconds": 0.0, "decode_slot_seconds": seconds / max(tokens, 1)}, 0.0, known)


def _loads(spans: Iterable[Span]) -> list[float]:
    """Seconds that each worker loads."""
    seconds: dict[str, float] = {}
    for span in spans:
        if span.task == "load":
            seconds[span.worker] = seconds.get(span.worker, 0.0) + span.end - span.start
    return list(seconds.values())


# -- lengths ----------------------------------------------------------------------------------------------------


def lengths_of(config: Config, spans: Sequence[Span], rows: Mapping[int, Row]) -> Lengths:
    """Lengths of prompts and responses of the steps in `rows`."""
    means = [row["response_length/mean"] for row in rows.values()]
    groups = [
        span.tokens / span.rows
        for span in spans
        if span.task == "forward_backward" and span.step in rows and span.rows == config.rollout.group_size and span.tokens
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


# -- predictions ----------------------------------------------------------------------------------------------------


def predicted(config: Config, measurement: Measurement, *, steps: int | None = None) -> Prediction:
    """Prediction of a configuration with measured costs: the run's own loops, simulated. Deterministic.

    `steps`: of the simulated run; None: the configuration's.
    """
    tree = config.model_dump(mode="json")
    tree["run"]["steps"] = steps or config.run.steps
    tree["telemetry"] |= {"samples_per_step": 0, "keep_batches": 0}
    done = simulate(parse(tree), costs=measurement.costs)
    if done.violations or not done.rows:
        raise RunError(f"the simulated run has not ended as it should: {'; '.join(done.violations) or 'it has no steps'}")
    return means(done.rows, measurement.left_out)


def means(rows: Mapping[int, Row], factor: float = 1.0) -> Prediction:
    """Means over steps, without the warm-up where there are more; seconds times `factor`."""
    counted = [row for step, row in rows.items() if step >= WARM_UP] or [*rows.values()]
    seconds = [row["perf/step_seconds"] for row in counted]
    tokens = sum(row["perf/tpspd"] * row["perf/step_seconds"] for row in counted)
    return Prediction(step_seconds=factor * statistics.fmean(seconds), tpspd=tokens / sum(seconds) / factor)


def what_if(run_dir: Path, overrides: Sequence[str]) -> WhatIf:
    """Prediction of a run's configuration with these overrides (`key.path=value`), from what the run has measured.

    Raises `UserError` for a folder that is no run's, an override that is wrong, and for what the run has not measured: another
    layout of the trainer, another model.
    """
    config, spans, rows = read_run(run_dir)
    other = load(run_dir / CONFIG_FILE, overrides)
    if other.layout != config.layout:
        raise UserError("a run has measured its own plan.train: take `asyncflow plan` without --from for another layout")
    if other.model.path != config.model.path:
        raise UserError(f"the run has measured {config.model.path}: another model needs a run of its own, or --measure")
    measurement = fitted(config, spans, rows)
    return WhatIf(measurement=measurement, measured=means(rows), predicted=predicted(other, measurement))


def measure(config: Config, run_dir: Path, *, steps: int = MEASURED_STEPS) -> Measurement:
    """Costs of a configuration on this machine: a short run of it is made in `run_dir`, which takes a minute or two.

    With several data-parallel ranks one run is made with a single one before, which tells computation from collectives.

    Raises what a run raises.
    """
    known = None
    if config.layout.dp > 1:
        one = config.model_dump(mode="json")
        one["plan"]["train"]["dp"] = 1
        known = measure(parse(one), run_dir.with_name(f"{run_dir.name}-one-rank"), steps=steps).costs
    tree = config.model_dump(mode="json")
    tree["run"] |= {"dir": str(run_dir.parent), "name": run_dir.name, "steps": steps, "overwrite": True}
    tree["eval"] |= {"path": None}
    tree["checkpoint"] |= {"every_steps": None}
    tree["telemetry"] |= {"trackers": []}
    if not asyncio.run(Job(parse(tree)).run()):
        raise RunError("the run that was to be measured was interrupted")
    return fitted(*read_run(run_dir), known=known)
