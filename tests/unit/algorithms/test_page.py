"""docs/algorithms.md says of every algorithm what the code does by default."""

from __future__ import annotations

import re

import pytest

from asyncflow.algorithms import ALGORITHMS
from asyncflow.algorithms.policy_loss import PolicyLoss
from asyncflow.registry import build
from tests.conftest import ROOT


def cells(header: str) -> list[list[str]]:
    """The rows of a table."""
    text = (ROOT / "docs" / "algorithms.md").read_text()
    lines = text[text.index(header) :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def table(header: str) -> dict[str, list[str]]:
    """The rows of a table, by the name that each begins with."""
    return {name.strip("` "): row[1:] for row in cells(header) for name in row[0].split(",")}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_defaults_are_those_of_the_page(name: str) -> None:
    _, _, normaliser, clip, kl, source = table("| `name` | surrogate |")[name]
    own = {"loss_constant": 8} if "to be given" in normaliser else {}
    algorithm: PolicyLoss = build("algorithm", name, own, ALGORITHMS)
    assert f"`{algorithm.loss_options.loss_normaliser}`" in normaliser
    if (constant := re.search(r": (\d+)$", normaliser)) is not None:
        assert algorithm.loss_options.loss_constant == float(constant[1])
    low, high = re.findall(r"\d[\d.]*", clip)
    surrogate = algorithm.surrogate
    assert (surrogate.clip_low, surrogate.clip_high) == (float(low), float(high))  # type: ignore[attr-defined]
    assert kl.removesuffix(" (none in the paper)") == f"{algorithm.loss_options.kl_place}, {algorithm.loss_options.kl_estimator}"
    assert re.search(r"arXiv:\d{4}\.\d{5}", source)


def test_what_each_needs_is_on_the_page() -> None:
    needs = table("| `name` | needs |")
    for name, target in ALGORITHMS.items():
        algorithm = build("algorithm", name, {"loss_constant": 8} if target.endswith("DrGRPO") else {}, ALGORITHMS)
        assert ("whole responses" in needs[name][0]) is not algorithm.is_token_local, name
        assert ("over all tokens of the step" in needs[name][0]) is algorithm.waits_for_batch, name


def test_every_algorithm_solves_the_quickstart_with_three_seeds_by_the_page() -> None:
    figures = {name: row for name, *row in cells("| algorithm | seed 0 | seed 1 | seed 2 | mean |")}
    assert ALGORITHMS.keys() <= figures.keys()
    assert {name.partition(",")[0] for name in figures} == ALGORITHMS.keys()
    for name, row in figures.items():
        *seeds, mean = (float(figure) for figure in row)
        assert len(seeds) == 3 and all(0.80 < accuracy <= 1.0 for accuracy in seeds), name
        assert mean == pytest.approx(sum(seeds) / 3, abs=0.0011), name
