"""The public SDK, unmodified, at two versions, against a server of ours (suite `tinker`)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import MODEL, ROOT
from tests.tinker.world import CLIENTS, PYTHONS, Served, serving, version_of

pytestmark = pytest.mark.skipif(not PYTHONS, reason="ASYNCFLOW_TINKER_PYTHONS names no interpreter that has the tinker SDK")
VERSIONS = [pytest.param(python, id=version_of(python), marks=[pytest.mark.smoke] * (i == 0)) for i, python in enumerate(PYTHONS)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("sdk")
    (made / "tiny").symlink_to(MODEL)
    return made


@pytest.fixture(scope="module")
def served(folder: Path) -> Iterator[Served]:
    with serving(folder / "tiny", folder / "runs", "--max-models", "32", name="tiny") as made:
        yield made


@pytest.mark.parametrize("python", VERSIONS)
def test_every_call_of_the_sdk_does_what_it_says(served: Served, folder: Path, python: Path) -> None:
    seen: dict[str, Any] = json.loads(served.run(python, CLIENTS / "basics.py", "tiny", version_of(python), cwd=folder))
    assert seen["models"] == ["tiny"] and seen["info"] == ["tiny", True, 8]
    # Training: the loss that `forward` says is the first one of `forward_backward`, and it falls.
    assert seen["forward_loss"] == pytest.approx(seen["losses"][0], rel=1e-5)
    assert seen["losses"] == sorted(seen["losses"], reverse=True) and seen["losses"][-1] < 0.7 * seen["losses"][0]
    assert seen["many"] == 1100 and [metrics["pieces"] for metrics in seen["custom"]] == [2] * 4
    assert seen["custom_losses"][0] == pytest.approx(seen["custom_losses"][1], rel=1e-4)
    # Sampling: by a name, from a snapshot and from the base model; seeds; ends.
    assert seen["same"][0] == seen["same"][1] != seen["base"]
    assert seen["drawn"][0] == seen["drawn"][1] and len({tuple(tokens) for tokens in seen["drawn"][0]}) > 1
    assert all("\n" not in text[:-1] for text in seen["stops"])
    assert all("1" not in text[:-1] and (reason == "length" or text[-1] in "1<>") for text, reason in seen["stop_ids"])
    assert seen["scored"][0] is None and seen["scored"][2] < 0
    assert seen["mismatch"] < 1e-4
    # On policy the ratio is 1: the two sequences' loss is - (A1 L1 + A2 L2), whatever bounds the ratio.
    assert seen["importance_sampling"] == pytest.approx(seen["ppo"], abs=1e-2)
    # A state goes on as the model would have; without the optimiser's moments the second step differs.
    with_moments, without = seen["continued"]
    assert with_moments[0] == pytest.approx(without[0], rel=1e-5) and with_moments[1] != pytest.approx(without[1], rel=1e-4)
    name = version_of(python)
    assert seen["paths"][0].endswith(f"/weights/{name}-state") and seen["paths"][1].endswith(f"/sampler_weights/{name}-sampler")
    assert seen["run"] == ["tiny", True, seen["paths"][0]]
    assert seen["checkpoints"] == [f"sampler_weights/{name}-sampler", f"weights/{name}-state"]
    assert seen["left"] == [f"weights/{name}-state"]
    assert seen["files"]["adapter_model.safetensors"] > 100_000
    assert {"adapter_config.json", "tokenizer.json"} < set(seen["files"])
    mistakes = seen["mistakes"]
    assert "no loss 'dro' here" in mistakes["loss"] and "datum 0 has advantages" in mistakes["missing"]
    assert "no checkpoint" in mistakes["path"] and "no model 'nobody/nothing' here" in mistakes["model"]
    assert "a prompt has 1 to 511 tokens here" in mistakes["long"]


@pytest.mark.parametrize("python", VERSIONS)
def test_two_sessions_train_and_sample_side_by_side_each_its_own_weights(served: Served, folder: Path, python: Path) -> None:
    seen = json.loads(served.run(python, CLIENTS / "interleaved.py", "tiny", cwd=folder))
    assert seen["together"] == seen["alone"]


@pytest.mark.parametrize("python", VERSIONS)
def test_a_request_that_comes_again_or_too_early_is_applied_once_in_its_order(served: Served, folder: Path, python: Path) -> None:
    seen = json.loads(served.run(python, CLIENTS / "repeated.py", "tiny", cwd=folder))
    assert seen["repeated"] == seen["plain"] and seen["num_sent"] > seen["num_requests"]
    assert "belongs to another request" in seen["refused"]


@pytest.mark.parametrize("python", VERSIONS)
def test_the_sweep_of_the_recipes_trains_an_adapter_for_each_rate(served: Served, folder: Path, python: Path) -> None:
    """Equal rates are equal to the bit beside another one, and a rate that is next to nothing learns nothing."""
    said = served.run(python, ROOT / "recipes" / "sweep.py", "tiny", "2e-3", "2e-3", "1e-12", "--steps", "4", cwd=folder)
    head, *table = [line.split() for line in said.splitlines()]
    assert head == ["learning", "rate", "0", "1", "2", "3"] and [line[0] for line in table] == ["0.002", "0.002", "1e-12"]
    first, second, still = ([float(reward) for reward in line[1:]] for line in table)
    assert first == second and first[0] == still[0]
    assert max(first[2:]) > first[0] + 0.2 and max(still) < max(first) - 0.1
