"""Costs come back out of the spans of a run that was made with them; what they leave out, and what is wrong in them, is said."""

from __future__ import annotations

import asyncio
import functools
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncflow.cli import watch
from asyncflow.config import Config, dump, load
from asyncflow.engines.base import SampleKey
from asyncflow.engines.cores import Contention
from asyncflow.engines.costs import Costs, Lengths
from asyncflow.planner.measured import Measurement, fitted, measured, of_layers, predicted, residuals, what_if
from asyncflow.planner.pieces import lengths_of, lognormal, samples
from asyncflow.run_dir import CONFIG_FILE
from asyncflow.simulation.run import Simulated, simulate
from asyncflow.telemetry.profile import Cost
from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import SPANS_FILE, join_pieces
from asyncflow.types import UserError
from tests.conftest import ROOT

TRUE = Costs(
    decode_step_seconds=0.004, decode_slot_seconds=5e-5, forward_backward_seconds=0.03, train_token_seconds=4e-5,
    optim_step_seconds=0.02, publish_seconds=0.01, fetch_seconds=0.003, install_seconds=0.004, reward_seconds=0.0,
    weight_bytes=1_000_000, lengths=Lengths(prompt=30, response_median=25.0, response_sigma=0.1, prompt_sigma=0.4),
    contention=Contention(cores=2, slowdown={"rollout": 0.3, "train": 0.5}),
)  # fmt: skip


def config(*overrides: str) -> Config:
    alone = [
        "train.tokens_per_micro_batch=null",
        "rollout.num_workers=1",
    ]  # a step has many passes, and its beginning one worker alone
    return load(ROOT / "recipes/quickstart.yaml", ["run.steps=8", "eval.path=null", *alone, *overrides])


def run_of(of: Config, costs: Costs, decode_slowdown: float = 0.3) -> tuple[Simulated, list[Span]]:
    """A simulated run with spans as a real one has them: with decode steps, at either of two ends of its contention."""
    done = simulate(of, costs=costs)
    assert not done.violations
    fetched = [msgspec.structs.replace(s, bytes=costs.weight_bytes) if s.task == "fetch" else s for s in done.spans]
    return done, [*fetched, *decode_steps(done.spans, costs, decode_slowdown)]


@functools.cache
def true_run() -> tuple[Simulated, list[Span]]:
    """The run of `config()` with the true costs, once for all tests."""
    return run_of(config(), TRUE)


def decode_steps(spans: list[Span], costs: Costs, slowdown: float) -> list[Span]:
    """Decode steps while rollout generates, some alone and some beside the trainer."""
    found = []
    for number, span in enumerate(spans):
        is_beside = span.worker == "trainer/0" and span.task == "forward_backward"
        is_alone = span.worker == "trainer/0" and span.cause == "rows" and span.end - span.start > 0.05
        if is_beside or is_alone:
            slots, start = 1 + 37 * number % 128, span.start + 0.001
            end = start + costs.decode_step(slots) * (1 + slowdown * is_beside)
            found.append(Span(worker="rollout/0", task="decode_step", start=start, end=end, is_lane=False, rows=slots))
    return found


def test_costs_of_a_run_are_recovered_and_foretell_it() -> None:
    of = config()
    done, spans = true_run()
    found = fitted(of, join_pieces(spans), done.rows, cores=2)
    costs, contention = found.costs, found.costs.contention
    assert contention is not None
    for name in ("decode_step_seconds", "decode_slot_seconds", "forward_backward_seconds", "train_token_seconds"):
        assert getattr(costs, name) == pytest.approx(getattr(TRUE, name), rel=0.15), name
    assert contention.slowdown["train"] == pytest.approx(0.5, abs=0.08)
    assert contention.slowdown["rollout"] == pytest.approx(0.3, abs=0.08)
    assert (costs.optim_step_seconds, costs.install_seconds) == pytest.approx((0.02, 0.004), rel=0.5)
    assert costs.lengths.prompt == 30 and costs.lengths.response_median == pytest.approx(25, rel=0.1)
    assert costs.lengths.prompt_sigma == pytest.approx(0.4, rel=0.2)
    assert found.left_out == pytest.approx(1.0, abs=0.05)
    assert "warning: forward_backward" not in "\n".join(found.lines())


def test_without_spans_of_decode_steps_all_of_rollout_is_in_its_tokens_prefill_too() -> None:
    done, spans = true_run()
    found = fitted(config(), join_pieces([span for span in spans if span.task != "decode_step"]), done.rows, cores=2)
    assert "rollout is known by its tokens a second alone" in "\n".join(found.notes)
    assert found.costs.decode_slot_seconds > 0 and found.costs.decode_step_seconds == found.costs.prefill(1000) == 0


def test_what_no_cost_covers_is_added_for_each_row() -> None:
    """Half of the rows: half of the driver's work, whatever share of a step it was."""
    of = config()
    found = Measurement(costs=TRUE, residuals=(), step_seconds=0.5, rows=256, simulated_seconds=0.4)
    assert (found.whole(0.4, 256), found.whole(0.4, 128), found.whole(0.1, 512)) == pytest.approx((0.5, 0.45, 0.3))
    too_large = msgspec.structs.replace(found, simulated_seconds=0.625)
    assert (too_large.whole(0.4, 256), too_large.whole(0.4, 128)) == pytest.approx((0.32, 0.32))
    raw, whole = (predicted(of, each) for each in (msgspec.structs.replace(found, simulated_seconds=0.0), found))
    assert whole.step_seconds == pytest.approx(raw.step_seconds + 0.1)
    assert whole.tpspd * whole.step_seconds == pytest.approx(raw.tpspd * raw.step_seconds)


def test_passes_that_helpers_take_cost_what_the_trainers_own_do() -> None:
    of = config("schedule=synchronous", "train.helpers=1", "train.tokens_per_micro_batch=300")
    done, spans = run_of(of, TRUE)
    assert sum(row.get("perf/helper_seconds", 0.0) for row in done.rows.values()) > 0.2 * 8
    found = fitted(of, join_pieces(spans), done.rows, cores=2)
    assert found.costs.forward_backward(300) == pytest.approx(TRUE.forward_backward(300), rel=0.15)
    assert found.left_out == pytest.approx(1.0, abs=0.05)
    alone = predicted(config("schedule=synchronous", "train.helpers=0", "train.tokens_per_micro_batch=300"), found)
    assert predicted(of, found).step_seconds < 0.95 * alone.step_seconds


def test_a_pass_of_several_groups_costs_a_call_once() -> None:
    of = config("train.tokens_per_micro_batch=700", "run.steps=16")
    done, spans = run_of(of, TRUE)
    costs = fitted(of, join_pieces(spans), done.rows, cores=2).costs
    assert max(span.rows for span in spans if span.task == "forward_backward") > 8
    for tokens in (300, 700):  # passes are nearly all full, which tells their call from their tokens less well
        assert costs.forward_backward(tokens) == pytest.approx(TRUE.forward_backward(tokens), rel=0.1), tokens
    assert costs.lengths.prompt == 30


def test_a_collective_that_is_counted_twice_is_reported() -> None:
    of = config("plan.train.dp=2", "train.prompts_per_step=16")
    true = msgspec.structs.replace(TRUE, collectives_seconds=0.03, forward_backward_seconds=0.0, contention=None)
    done, spans = run_of(of, true, 0.0)
    pieces = samples(of, join_pieces(spans), 30)
    trained = {"forward_backward": pieces["forward_backward"]}
    assert pieces["forward_backward"] and not residuals(true, trained)[0].is_bad
    (flawed,) = residuals(msgspec.structs.replace(true, collectives_seconds=0.06), trained)
    assert flawed.is_bad and "counted twice" in flawed.warning()
    assert fitted(of, join_pieces(spans), done.rows, cores=64).costs.collectives_seconds == pytest.approx(0.03, rel=0.1)


def test_training_is_put_together_from_a_layer() -> None:
    parts = [Cost("layer_forward", t, 0, 0.001 * t, 3) for t in (100, 200)]
    parts += [Cost("layer_backward", t, 0, 0.002 * t, 3) for t in (100, 200)]
    parts += [Cost("head_loss", t, 0, 0.05 + 0.001 * t, 3) for t in (80, 160)]
    parts += [Cost("accumulate", 0, 4000, 0.25, 3), Cost("optim_step", 0, 4000, 0.5, 3)]
    for name in ("dp/all_gather", "dp/reduce_scatter"):
        parts += [Cost(name, 0, size, 0.01 + 1e-5 * size, 3) for size in (1000, 9000)]
    found = of_layers(config("plan.train.dp=2"), parts, 6).coefficients
    assert found["forward_backward_seconds"] == pytest.approx(6 * 0.25 + 0.05)
    assert found["train_token_seconds"] == pytest.approx(6 * 0.003 + 0.0008)
    assert found["optim_step_seconds"] == pytest.approx(3.0)
    assert found["collectives_seconds"] == pytest.approx(6 * 3 * 0.05)
    piped = of_layers(config("plan.train.pp=2", "train.pipeline_micro_batches=4"), parts, 6).coefficients
    assert piped["train_token_seconds"] == pytest.approx(5 / 4 * (3 * 0.003 + 0.0008)) and "collectives_seconds" not in piped


@pytest.mark.parametrize("limit", [10_000, 150, 90])
def test_lengths_are_those_that_were_drawn_before_they_were_cut_off(limit: int) -> None:
    true = Lengths(response_median=100.0, response_sigma=0.5)
    drawn = np.array([true.draw(SampleKey(0, prompt), sample, limit)[0] for prompt in range(500) for sample in range(4)])
    median, sigma = lognormal(drawn.mean(), drawn.std(), (drawn == limit).mean(), limit)
    assert median == pytest.approx(100.0, rel=0.06) and sigma == pytest.approx(0.5, rel=0.12)


def test_where_all_responses_are_cut_off_a_longer_limit_makes_them_longer() -> None:
    row = {"response_length/mean": 64.0, "response_length/clipped_ratio": 1.0, "response_length/std": 0.0}
    found = lengths_of(config(), [], {5: row})
    assert [found.draw(SampleKey(0, 1), 0, limit)[0] for limit in (64, 512)] == [64, 512]


def test_what_if_says_what_another_configuration_would_take(tmp_path: Path) -> None:
    write(tmp_path)
    cores = measured(tmp_path).costs.contention
    assert cores is not None
    same = what_if(tmp_path, [])
    assert same.predicted.step_seconds == pytest.approx(same.measured.step_seconds, rel=1e-6)
    half = what_if(tmp_path, ["train.prompts_per_step=16"])
    assert half.predicted.step_seconds == pytest.approx(same.measured.step_seconds / 2, rel=0.2)
    words = asyncio.run(watch.predicted(tmp_path, "train.prompts_per_step=16"))  # as the live page asks
    assert f"predicts {half.predicted.step_seconds:.3g} s a step with train.prompts_per_step=16" in words
    assert asyncio.run(watch.predicted(tmp_path, "model.path=other")) == ""


def test_a_run_without_what_is_needed_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"has no config.yaml: name the folder of a run"):
        measured(tmp_path)
    write(tmp_path)
    with pytest.raises(UserError, match=r"its own plan\.train"):
        what_if(tmp_path, ["plan.train.dp=2"])
    with pytest.raises(UserError, match="another model needs"):
        what_if(tmp_path, ["model.path=other"])
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "metrics.jsonl").write_text("".join(lines[:2]))
    with pytest.raises(UserError, match="has 2 steps, of which the first 2 are not counted"):
        measured(tmp_path)


def write(folder: Path) -> None:
    """The folder of the run with the true costs."""
    done, spans = true_run()
    (folder / CONFIG_FILE).write_text(dump(config()))
    (folder / SPANS_FILE).write_bytes(b"".join(msgspec.json.encode(span) + b"\n" for span in spans))
    (folder / "metrics.jsonl").write_bytes(
        b"".join(msgspec.json.encode({"step": step, **row}) + b"\n" for step, row in done.rows.items())
    )


def test_groups_without_a_signal_are_as_many_in_a_prediction_as_in_the_run() -> None:
    of = config("train.prompts_per_step=16")
    done, spans = run_of(of, msgspec.structs.replace(TRUE, equal_groups=0.6))
    found = fitted(of, join_pieces(spans), done.rows)
    assert found.costs.equal_groups == pytest.approx(0.6, abs=0.15) and found.left_out == pytest.approx(1.0, abs=0.1)
    skipped = [
        sum(row["rows/zero_advantage"] for row in rows.values()) for rows in (done.rows, simulate(of, costs=found.costs).rows)
    ]
    assert skipped[0] > 0.4 * 8 * 128 and skipped[1] == pytest.approx(skipped[0], rel=0.25)


def test_rewards_that_were_recorded_together_are_counted_each() -> None:
    spans = [
        Span(worker="rollout/0", task="score", start=float(n), end=n + 0.2, is_lane=False, rows=50, calls=50) for n in range(9)
    ]
    (taken, *_) = samples(config(), spans, 30.0)["score"]
    assert taken.amounts == (50.0,) and taken.seconds == pytest.approx(0.2)
