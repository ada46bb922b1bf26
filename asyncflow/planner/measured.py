"""Costs measured: from a run's folder, or from a short run that is made for it; and what another configuration would take.

    the run's folder --pieces.py--> pieces of work, with their amounts and what ran beside them
        --fit.py, contention.py--> Costs, with a residual for each piece
        --simulate the same run--> what no cost covers: how much longer its steps took than is simulated
    what_if: simulate another configuration with these costs, and add that for each of its rows

A figure is a mean, not a median: a step takes what all of its pieces take, the slow ones too.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from asyncflow.config import Config, load, parse
from asyncflow.engines.cores import TRAIN, Contention
from asyncflow.engines.costs import Costs
from asyncflow.planner.contention import alone, factors_of, fit_slowdown
from asyncflow.planner.fit import Fit, Residual, TimedWork, fit, residual
from asyncflow.planner.pieces import PIECES, WARM_UP, StepRow, lengths_of, loads, read_run, samples
from asyncflow.run.job import Job
from asyncflow.run_dir import CONFIG_FILE
from asyncflow.simulation.run import simulate
from asyncflow.telemetry.profile import Cost, costs
from asyncflow.telemetry.spans import Span
from asyncflow.threads import num_cores, run_ready
from asyncflow.types import RunError, UserError

MOST_EQUAL: Final = 0.95
"""Share of groups without a signal that a prediction has at most: of a run that had none with one, dynamic sampling finds none."""
MEASURED_STEPS: Final = 10
"""Steps of a run that is made to be measured."""


class Measurement(msgspec.Struct, frozen=True, kw_only=True):
    """Costs of a run, and how well they describe it.

    `step_seconds`: mean of the run's steps, of `rows` responses each; `simulated_seconds`: the same as simulated with these costs;
    0: not known. `notes`: what is not known, one sentence each.
    """

    costs: Costs
    residuals: tuple[Residual, ...]
    step_seconds: float
    rows: int
    simulated_seconds: float = 0.0
    notes: tuple[str, ...] = ()

    @property
    def left_out(self) -> float:
        """Times as long as simulated that steps took."""
        return self.step_seconds / self.simulated_seconds if self.simulated_seconds else 1.0

    def whole(self, seconds: float, rows: int) -> float:
        """Seconds of a step of so many rows, from those that are simulated.

        What no cost covers is mostly work of the driver and of the reward processes, and messages between them: each row has its
        part of it. Where a simulation takes longer than the run did, its costs are too large, in proportion.
        """
        if self.left_out <= 1.0:
            return seconds * self.left_out
        return seconds + (self.step_seconds - self.simulated_seconds) * rows / self.rows

    @property
    def warnings(self) -> list[str]:
        """Sentences, one for each piece that the costs describe badly."""
        return [warning for each in self.residuals if (warning := each.warning())]

    def lines(self) -> list[str]:
        """The residuals, the warnings and the notes, as they are printed."""
        shown = [each.line() for each in self.residuals]
        if (contention := self.costs.contention) is not None:
            slowed = ", ".join(f"{pool} {slowdown:.0%}" for pool, slowdown in sorted(contention.slowdown.items()))
            shown.append(f"slower while all {contention.cores} cores compute: {slowed or 'not known'}")
        shown.append(f"steps of {self.step_seconds:.3g} s took {self.left_out:.2f} times what is simulated with these costs")
        return [*shown, *(f"warning: {warning}" for warning in self.warnings), *(f"note: {note}" for note in self.notes)]


class Prediction(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of a configuration. Means over its steps, but for those of the warm-up."""

    step_seconds: float
    tpspd: float


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Prediction of another configuration, beside the run that it is made from."""

    measurement: Measurement
    measured: Prediction
    predicted: Prediction


def measured(run_dir: Path) -> Measurement:
    """Costs of a run, from its folder.

    Raises `UserError` for a folder without the files of a run that has trained more than `WARM_UP` steps.
    """
    config, spans, rows = read_run(run_dir)
    return fitted(config, spans, rows)


def fitted(
    config: Config, spans: Sequence[Span], rows: Mapping[int, StepRow], *, cores: int | None = None, known: Costs | None = None
) -> Measurement:
    """Costs of a run of this configuration. `cores`: of the machine; None: this one's, if the run's workers share one.

    `known`: costs of the same model on one trainer. What a round of several ranks takes longer is their collectives' then; without
    it, what does not depend on the tokens is.
    """
    counted = {step: row for step, row in rows.items() if step >= WARM_UP} or dict(rows)
    if cores is None and config.cluster.name == "local" and config.train.device == "cpu" == config.rollout.device:
        cores = num_cores()
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
    load_seconds = loads(spans)
    given: dict[str, Any] = {
        **fields,
        "load_seconds": statistics.fmean(load_seconds) if load_seconds else 0.0,
        "weight_bytes": int(statistics.median(sizes)) if sizes else 0,
        "lengths": lengths,
        "equal_groups": _equal_groups(config, counted),
        "contention": None if cores is None else Contention(cores=cores, slowdown=slowdown),
    }
    if "reward_seconds" not in fields:
        given["reward_seconds"] = 0.0
    costs = Costs(**given)
    residuals = tuple(each.residual for each in fits.values() if each.residual.num_samples)
    seconds = statistics.fmean(row["perf/step_seconds"] for row in counted.values())
    found = Measurement(costs=costs, residuals=residuals, step_seconds=seconds, rows=_rows_of(config), notes=tuple(notes))
    return msgspec.structs.replace(found, simulated_seconds=predicted(config, found, steps=len(rows)).step_seconds)


def _rows_of(config: Config) -> int:
    """Responses of a step."""
    return config.train.prompts_per_step * config.rollout.group_size


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
        else:  # without a pool work is not slowed down, as on more cores than there are workers
            fits[name] = alone(name, piece.terms, found, slowdown.get(piece.pool, 0.0), cores if piece.pool else 1 << 20)
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


def _equal_groups(config: Config, rows: Mapping[int, StepRow]) -> float:
    """`Costs.equal_groups` of a run. Where rewards are drawn, as in a simulation, some more groups have equal ones by chance."""
    share = statistics.fmean(row["reward/zero_std_groups"] for row in rows.values()) / config.train.prompts_per_step
    by_chance = 2.0 ** (1 - config.rollout.group_size)
    return min(MOST_EQUAL, max(0.0, (share - by_chance) / (1 - by_chance))) if by_chance < 1 else 0.0


def _by_tokens(spans: Sequence[Span]) -> Fit:
    """Rollout's seconds of a token, where nothing finer is known: all of it, prefill too, is a slot's part of a decode step."""
    lanes = [span for span in spans if span.is_lane and span.task == "generate"]
    tokens, seconds = sum(span.tokens for span in lanes), sum(span.end - span.start for span in lanes)
    known = Residual("decode_step", len(lanes), 0.0, 0.0, 0.0, 0.0, False)
    others = {"decode_step_seconds": 0.0, "prefill_seconds": 0.0, "prefill_token_seconds": 0.0}
    return Fit({**others, "decode_slot_seconds": seconds / max(tokens, 1)}, 0.0, known)


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
    simulated = means(done.rows)
    seconds = measurement.whole(simulated.step_seconds, _rows_of(config))
    return Prediction(step_seconds=seconds, tpspd=simulated.tpspd * simulated.step_seconds / seconds)


def means(rows: Mapping[int, StepRow]) -> Prediction:
    """Means over steps, without the warm-up where there are more."""
    counted = [row for step, row in rows.items() if step >= WARM_UP] or [*rows.values()]
    seconds = [row["perf/step_seconds"] for row in counted]
    tokens = sum(row["perf/tpspd"] * row["perf/step_seconds"] for row in counted)
    return Prediction(step_seconds=statistics.fmean(seconds), tpspd=tokens / sum(seconds))


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
    if not run_ready(Job(parse(tree)).run()):
        raise RunError("the run that was to be measured was interrupted")
    return fitted(*read_run(run_dir), known=known)
