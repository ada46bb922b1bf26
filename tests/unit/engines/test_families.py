"""Models of many families beside plain transformers: log-probs, gradients, a step, checkpoints, responses (tests/families.py)."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers import AutoConfig

from asyncflow.engines.families import DECODED, FAMILIES, PACKED
from tests.conftest import ROOT
from tests.families import BASE, BEGIN, CONFIGS, CUTS, END, Findings, examine, faults, table, trainers_of
from tests.unit.engines.train.parallel.processes import Processes

SOME = ("granite", "gemma2", "mamba")  # of those that are packed, that have windows and caps, and that have no attention


@pytest.fixture
def ranks(name: str) -> Iterator[Processes | None]:
    """Two, for models that are sharded."""
    made = Processes(2) if CONFIGS[name][0] in FAMILIES else None
    yield made
    if made is not None:
        made.close()


@pytest.mark.parametrize("name", [name if name in SOME else pytest.param(name, marks=pytest.mark.deep) for name in CONFIGS])
def test_a_family_is_computed_as_transformers_does(name: str, ranks: Processes | None, tmp_path: Path) -> None:
    found = examine(name, tmp_path, ranks)
    assert not faults(found)
    kind = CONFIGS[name][0]
    assert (found.way == "packed") == (kind in PACKED and "windows" not in CONFIGS[name][2])
    assert ("slots" in found.rollout) == (kind in DECODED and "windows" not in CONFIGS[name][2])
    assert [*found.cuts] == ([*CUTS] if kind in FAMILIES else [])
    of_page, made = next(row for row in rows() if row[:2] == made_row(name, found)[:2]), made_row(name, found)
    assert [of_page[column] for column in (2, 3, 5, 6)] == [made[column] for column in (2, 3, 5, 6)], "the page is of other results"
    assert [of_page[column] == "-" for column in (7, 8)] == [made[column] == "-" for column in (7, 8)], "other engines generate"


def made_row(name: str, found: Findings) -> list[str]:
    return cells(table({name: found}, ("", [])).splitlines()[-1])


def cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def rows() -> list[list[str]]:
    """Rows of the page's table, cell by cell."""
    text = (ROOT / "docs" / "models.md").read_text().split(BEGIN)[1].split(END)[0]
    return [cells(line) for line in text.splitlines() if line.startswith("| `") and "model_type" not in line]


def test_the_table_has_every_family_and_who_takes_it() -> None:
    assert [(row[0], row[1]) for row in rows()] == [(f"`{kind}`", special) for kind, _, special in CONFIGS.values()]
    assert len(rows()) > 14
    for (kind, changes, _), row in zip(CONFIGS.values(), rows(), strict=True):
        fields = {**AutoConfig.for_model(kind, **{**BASE, **changes}).to_dict(), "model_type": kind}
        assert row[5] == ", ".join(f"`{trainer}`" for trainer in trainers_of(fields)), kind
        assert row[6] == (", ".join(CUTS) if kind in FAMILIES else "-"), kind
