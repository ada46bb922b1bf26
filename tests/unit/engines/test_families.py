"""Models of many families beside plain transformers: log-probs, gradients, a step, checkpoints, responses (tests/families.py)."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.families import DECODED, FAMILIES, PACKED
from asyncflow.engines.rollout.transformers_engine import TransformersEngine
from tests.conftest import ROOT
from tests.families import (
    BASE,
    BEGIN,
    CONFIGS,
    CUTS,
    END,
    Findings,
    examine,
    faults,
    plain_log_probs,
    table,
    trainers_of,
    write_model,
)
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


def test_a_batch_finds_no_states_of_another_one_nor_of_log_probs_meanwhile(tmp_path: Path) -> None:
    path = write_model("recurrent_gemma", tmp_path / "model")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    prompt = np.array([7])  # one token: the family takes its states of then for those of the same row

    async def responses() -> list[Response]:
        engine = TransformersEngine(path, num_slots=2, max_context=64, stop_ids=())
        try:
            found = list[Response]()
            for key in range(2):
                stream = engine.generate(prompt, samples=range(2), sampling=Sampling(1.0, 20), key=SampleKey(1, key))
                generating = asyncio.ensure_future(listed(stream))
                while not generating.done():
                    await engine.log_probs(np.arange(3, 9))
                found += await generating
            return found
        finally:
            await engine.close()

    made = asyncio.run(responses())
    assert len(made) == 4
    for response in made:
        with torch.no_grad():
            expected = plain_log_probs(model, prompt, response.token_ids).numpy()
        np.testing.assert_allclose(response.logprobs, expected, atol=1e-4)


async def listed(stream: AsyncIterator[Response]) -> list[Response]:
    return [response async for response in stream]
