"""The result of `asyncflow eval`: `evaluation.json` with every prompt's rewards, and `evaluation.html`, a page for reading.

    figures, responses by kind, prompts, kept samples --> write_evaluation --> evaluation.json, evaluation.html

As in a run's report nothing of what a model said is trusted: the template escapes it, and the page runs no script at all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from asyncflow.run_dir import replace
from asyncflow.telemetry.accuracy import METHODS, Responses, is_correct, mean_interval
from asyncflow.telemetry.report import page_style, page_template
from asyncflow.telemetry.sections import shortened

JSON_FILE: Final = "evaluation.json"
HTML_FILE: Final = "evaluation.html"
_TEMPLATE: Final = "evaluation.html.j2"
_BARS: Final = 10


class PromptResult(msgspec.Struct, frozen=True):
    """Result for one prompt, a number for each response: its reward, its tokens, and whether the length limit ended it."""

    prompt: int
    rewards: list[float]
    lengths: list[int]
    truncated: list[bool]


class EvaluationResult(msgspec.Struct, frozen=True):
    """`evaluation.json`. `settings`: what was asked; `figures`: the metrics of docs/evaluation.md; `intervals`: the method of
    mean@n's, by kind; `prompts`: by kind, in the order of the data; `samples`: the kept responses, each with its prompt's number
    and kind."""

    model: str
    data: str
    settings: Mapping[str, Any]
    figures: Mapping[str, float | int]
    intervals: Mapping[str, str]
    prompts: Mapping[str, list[PromptResult]]
    samples: Sequence[Mapping[str, Any]]


def result_of(
    model: str,
    data: str,
    settings: Mapping[str, Any],
    figures: Mapping[str, float | int],
    responses: Mapping[str, Sequence[Responses]],
    samples: Sequence[Mapping[str, Any]],
) -> EvaluationResult:
    """The result, as it is written."""
    prompts = {
        kind: [PromptResult(p.prompt, p.rewards.tolist(), p.lengths.tolist(), p.truncated.tolist()) for p in of_kind]
        for kind, of_kind in responses.items()
    }
    found = {kind: mean_interval([p.rewards for p in of_kind]) for kind, of_kind in responses.items()}
    intervals = {kind: METHODS[interval.method] for kind, interval in found.items() if interval is not None}
    shown = {name: value for name, value in figures.items() if name != "step"}
    return EvaluationResult(model, data, settings, shown, intervals, prompts, samples)


def write_evaluation(folder: Path, result: EvaluationResult, *, correct_from: float) -> tuple[Path, Path]:
    """Write both files into the folder, which is made if need be, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    replace(folder / JSON_FILE, msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    page = page_template(_TEMPLATE).render(
        style=page_style(),
        model=result.model,
        data=result.data,
        facts=[(name, value) for name, value in result.settings.items() if value not in (None, "")],
        tiles=[tile for kind in result.prompts for tile in _tiles(kind, result)],
        warnings=[
            _warning(kind, result.figures) for kind in [*result.prompts, *_lost(result)] if num_unscored(kind, result.figures)
        ],
        correct_from=f"{correct_from:g}",
        ks=(ks := sorted({int(name[len("pass@") :].split("/")[0]) for name in result.figures if name.startswith("pass@")})),
        passes=[(kind, [_pass_cell(f"pass@{k}/{kind}", result.figures) for k in ks]) for kind in result.prompts],
        histograms=[_histogram(kind, of_kind, result.figures) for kind, of_kind in result.prompts.items()],
        samples=[_shown(sample, result, correct_from) for sample in result.samples],
    )
    replace(folder / HTML_FILE, page.encode())
    return folder / JSON_FILE, folder / HTML_FILE


def lines_of(result: EvaluationResult) -> list[str]:
    """Lines that the terminal shows, one for each kind of responses."""
    figures, lines = result.figures, []
    for kind, of_kind in result.prompts.items():
        num_each, unscored = max(len(prompt.rewards) for prompt in of_kind), num_unscored(kind, figures)
        passes = sorted((int(n[5:].split("/")[0]), n) for n in figures if n.startswith("pass@") and n.endswith(f"/{kind}"))
        lines.append(
            f"{kind:8} mean@{num_each} {figures[f'accuracy/{kind}']:.4f} {_interval(kind, figures)}  "
            + "  ".join(f"pass@{k} {figures[name]:.4f} {_interval(name, figures)}" for k, name in passes)
            + f"  length {figures[f'response_length/{kind}/mean']:.1f} (at most {figures[f'response_length/{kind}/max']})"
            f"  truncated {figures[f'clipped_ratio/{kind}']:.1%}  of {len(of_kind)} prompts"
            + (f"  {unscored} responses could not be scored" if unscored else "")
        )
    return lines + [f"{kind:8} none of its {num_unscored(kind, figures)} responses could be scored" for kind in _lost(result)]


def num_unscored(kind: str, figures: Mapping[str, float | int]) -> int:
    """Responses of a kind that could not be scored."""
    return int(figures.get(f"unscored/{kind}", 0))


def _lost(result: EvaluationResult) -> list[str]:
    """Kinds of which no response could be scored."""
    kinds = [name.partition("/")[2] for name in result.figures if name.startswith("unscored/")]
    return [kind for kind in kinds if kind not in result.prompts and num_unscored(kind, result.figures)]


def _warning(kind: str, figures: Mapping[str, float | int]) -> str:
    return (
        f"{kind}: {num_unscored(kind, figures):,} responses could not be scored. Those that failed are in no figure; those "
        f"with reward.value_on_failure count with that value."
    )


def _interval(name: str, figures: Mapping[str, float | int]) -> str:
    """`name`: a kind, whose mean@n it is, or pass@k of a kind."""
    if f"interval/{name}/low" not in figures:
        return "[no interval of one prompt]"
    return f"[{figures[f'interval/{name}/low']:.4f}, {figures[f'interval/{name}/high']:.4f}]"


def _pass_cell(name: str, figures: Mapping[str, float | int]) -> tuple[str, str]:
    """Value and interval; empty where no prompt has k responses."""
    if name not in figures:
        return "", ""
    low, high = figures[f"interval/{name}/low"], figures[f"interval/{name}/high"]
    return f"{figures[name]:.1%}", f"{low:.1%} to {high:.1%}"


def _tiles(kind: str, result: EvaluationResult) -> list[tuple[str, str, str]]:
    """(label, value, remark)."""
    figures, num_each = result.figures, max(len(prompt.rewards) for prompt in result.prompts[kind])
    low, high = figures.get(f"interval/{kind}/low"), figures.get(f"interval/{kind}/high")
    interval = "one prompt has no interval" if low is None else f"95%: {low:.3f} to {high:.3f}, {result.intervals[kind]}"
    return [
        (
            f"{kind}, mean@{num_each}",
            f"{figures[f'accuracy/{kind}']:.3f}",
            interval,
        ),
        (f"{kind}, pass@1", f"{figures[f'pass@1/{kind}']:.1%}", f"{figures[f'num_responses/{kind}']:,} responses"),
        (f"{kind}, truncated", f"{figures[f'clipped_ratio/{kind}']:.1%}", "ended by the length limit"),
        (
            f"{kind}, tokens",
            f"{figures[f'response_length/{kind}/mean']:,.1f}",
            f"at most {figures[f'response_length/{kind}/max']:,}",
        ),
    ]


def _histogram(kind: str, prompts: Sequence[PromptResult], figures: Mapping[str, float | int]) -> dict[str, Any]:
    """Bars of equal width, from 1 token on."""
    lengths = np.array([length for prompt in prompts for length in prompt.lengths], np.int64)
    width = -(-int(lengths.max()) // _BARS)
    counts = np.bincount((lengths - 1) // width, minlength=1)
    bars = [
        {"low": i * width + 1, "high": (i + 1) * width, "count": int(count), "share": count / counts.max()}
        for i, count in enumerate(counts)
    ]
    median, truncated = figures[f"response_length/{kind}/median"], figures[f"clipped_ratio/{kind}"]
    return {"kind": kind, "bars": bars, "note": f"Median {median:g} tokens; {truncated:.1%} ended by the length limit."}


def _shown(sample: Mapping[str, Any], result: EvaluationResult, correct_from: float) -> dict[str, str]:
    of_prompt = next((p for p in result.prompts.get(sample["kind"], []) if p.prompt == sample["prompt_number"]), None)
    rewards = of_prompt.rewards if of_prompt is not None else []
    return {
        "prompt": shortened(sample["prompt"]),
        "answer": shortened(sample["answer"]),
        "response": shortened(sample["response"]),
        "reward": f"{sample['reward']:.3g}",
        "ended_by": "the length limit" if sample["finish_reason"] == "length" else "its end token",
        "correct": f"{is_correct(rewards, correct_from).sum()} of {len(rewards)}",
    }
