"""Models of many families beside plain transformers: log-probs, gradients, a step, checkpoints, responses (tests/families.py)."""

from pathlib import Path

import pytest

from asyncflow.engines.families import DECODED, PACKED
from tests.conftest import ROOT
from tests.families import BEGIN, CONFIGS, END, examine, faults

SOME = ("granite", "gemma2", "mamba")  # of those that are packed, that have windows and caps, and that have no attention


@pytest.mark.parametrize("name", [name if name in SOME else pytest.param(name, marks=pytest.mark.deep) for name in CONFIGS])
def test_a_family_is_computed_as_transformers_does(name: str, tmp_path: Path) -> None:
    found = examine(name, tmp_path)
    assert not faults(found)
    kind = CONFIGS[name][0]
    assert (found.way == "packed") == (kind in PACKED and "windows" not in CONFIGS[name][2])
    assert ("slots" in found.rollout) == (kind in DECODED and "windows" not in CONFIGS[name][2])


def test_the_table_has_every_family() -> None:
    table = (ROOT / "docs" / "models.md").read_text().split(BEGIN)[1].split(END)[0]
    rows = [line for line in table.splitlines() if line.startswith("| `")]
    assert [row.split("`")[1] for row in rows if "model_type" not in row] == [kind for kind, _, _ in CONFIGS.values()]
    assert len(rows) > 14
