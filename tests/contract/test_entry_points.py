"""Parts from an installed package: the train engine of docs/extending.md, whole, and samplers and weight syncs by their names."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncflow.config import parse
from asyncflow.engines.base import TrainEngine
from asyncflow.engines.train import TRAIN_ENGINES
from asyncflow.registry import build, resolve
from asyncflow.run.factories import weights_need_key
from asyncflow.run.preparation.checks import check_choices
from asyncflow.types import Layout, UserError
from tests.conftest import ROOT
from tests.unit.engines.train.training import (
    MakeMicroBatch,
    ModelPath,
    Sum,
    policy_gradient,
    torch_engine,
    train_on,
    train_options,
    weights_of,
)

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a package on the path, as pip does it."""

    def install(package: str, entry_points: str, source: str = "") -> None:
        site = tmp_path / "site"
        information = site / f"{package}-1.0.dist-info"
        information.mkdir(parents=True)
        (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (information / "entry_points.txt").write_text(entry_points)
        (site / f"{package}.py").write_text(source)
        if str(site) not in sys.path:
            monkeypatch.syspath_prepend(site)
        monkeypatch.delitem(sys.modules, package, raising=False)

    return install


def example() -> str:
    """The page's engine."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "extending.md").read_text(), re.DOTALL)
    (source,) = (block for block in blocks if "class SgdEngine" in block)
    return str(source)


def test_the_example_is_short() -> None:
    assert 50 < len(example().splitlines()) < 100


async def test_an_engine_of_a_package_trains_by_its_name(
    install: Install, model_path: ModelPath, make_micro_batch: MakeMicroBatch, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="'sgd' is not known"):
        resolve("train engine", "sgd", TRAIN_ENGINES)
    install("sgd_package", "[asyncflow.train_engines]\nsgd = sgd_package:SgdEngine\n", example())
    path = model_path("qwen2-tiny")

    def engine(**own: float) -> TrainEngine:
        arguments = {**own, "model_path": path, "options": train_options(learning_rate=0.1, max_grad_norm=1e9)}
        built: TrainEngine = build("train engine", "sgd", arguments, TRAIN_ENGINES)
        return built

    sgd, ours = engine(momentum=0.5), torch_engine(path, learning_rate=0.1, max_grad_norm=1e9)
    batches = [make_micro_batch(0), make_micro_batch(1, (3, 8))]
    ours_first = [await train_on(ours, batch, Sum(policy_gradient)) for batch in batches]
    before = await weights_of(sgd)
    for number in range(2):
        await sgd.begin_step()
        results = await sgd.forward_backward(batches, Sum(policy_gradient))
        update = await sgd.optim_step(25)
        assert not update.skipped and all(result.is_finite for result in results)
        if number == 0:
            assert [r.loss_sum for r in results] == pytest.approx([r.loss_sum for r in ours_first], rel=1e-5)
            for result, other in zip(results, ours_first, strict=True):  # which tells more than the loss's own
                assert result.metrics == pytest.approx({"policy/entropy": other.metrics["policy/entropy"]}, rel=1e-4)
            assert update.grad_norm == pytest.approx((await ours.optim_step(25)).grad_norm, rel=1e-4)
            first = await weights_of(sgd)
            await (await sgd.save_state(tmp_path / "state"))
    second = await weights_of(sgd)
    # The second update carries half of the first one.
    name = "model.layers.0.mlp.up_proj.weight"
    assert not before[name].equal(first[name]) and not first[name].equal(second[name])
    other = engine(momentum=0.5)
    await other.load_state(tmp_path / "state")
    await other.forward_backward(batches, Sum(policy_gradient))
    await other.optim_step(25)
    assert await other.fingerprint() == await sgd.fingerprint()
    await sgd.save(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").is_file()
    own = await sgd.log_probs(batches[0].prompt_ids, batches[0].response_ids)
    trained = await torch_engine(tmp_path / "model").log_probs(batches[0].prompt_ids, batches[0].response_ids)
    assert own.values == pytest.approx(trained.values, abs=1e-4)
    with pytest.raises(UserError, match="has no option 'speed'"):
        engine(speed=1.0)
    with pytest.raises(UserError, match="one device"):
        build("train engine", "sgd", {"model_path": path, "options": train_options(layout=Layout(2, 1, 1))}, TRAIN_ENGINES)


@pytest.mark.parametrize(("name", "who"), [("mine", "installed package one_package"), ("torch", "AsyncFlow itself")])
def test_a_name_that_is_taken_is_refused(install: Install, name: str, who: str) -> None:
    if name == "mine":
        install("one_package", f"[asyncflow.train_engines]\n{name} = one_package:Mine\n")
    install("two_package", f"[asyncflow.train_engines]\n{name} = two_package:Mine\n")
    with pytest.raises(UserError, match=f"'{name}' is given by .*{who} and by the installed package two_package"):
        resolve("train engine", "torch", TRAIN_ENGINES)
    assert resolve("schedule", "periodic", {"periodic": "x:Y"}) == "x:Y", "other kinds go on"


def test_the_known_names_are_listed_with_those_of_packages(install: Install) -> None:
    install("third_package", "[asyncflow.rewards]\njudge = third_package:Judge\n")
    with pytest.raises(UserError, match="choose one of final_answer, judge, or"):
        resolve("reward", "jugde", {"final_answer": "x:Y"})


def test_samplers_and_weight_syncs_of_a_package_are_chosen_by_their_names(install: Install) -> None:
    source = (
        "from asyncflow.transfer_queue.sampler.oldest import Oldest\n"
        "from asyncflow.weight_sync.base import WeightSyncFacts\n"
        "class Sync:\n"
        "    facts = WeightSyncFacts(needs_key=True)\n"
        "    def __init__(self, options): ...\n"
        "    def sender(self, incarnation): ...\n"
        "    def receiver(self, name): ...\n"
    )
    entry_points = "[asyncflow.samplers]\nfirst = own_package:Oldest\n[asyncflow.weight_syncs]\ncourier = own_package:Sync\n"
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "weight_sync": "courier", "queue": {"samplers": {"rollout": "first"}}}
    with pytest.raises(UserError, match="weight sync 'courier' is not known"):
        check_choices(parse(tree))
    install("own_package", entry_points, source)
    check_choices(parse(tree))
    assert weights_need_key(parse(tree))
