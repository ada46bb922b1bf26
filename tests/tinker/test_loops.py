"""The cookbook's smallest loops, unmodified, against a server of ours, beside plain loops on the same data (suite `tinker`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from asyncflow.engines.lora import initial_lora
from asyncflow.engines.lora_files import spec_in
from asyncflow.engines.train.model.lora import shapes_for
from asyncflow.types import LoraSpec
from tests.tinker.world import CLIENTS, NAME, PYTHONS, Served, make_world, metrics_of, run_client, serving, version_of

pytestmark = pytest.mark.skipif(not PYTHONS, reason="ASYNCFLOW_TINKER_PYTHONS names no interpreter that has the tinker SDK")
VERSIONS = [pytest.param(python, id=version_of(python)) for python in PYTHONS]
SL_BATCH, SL_RATE, SL_STEPS = 16, 5e-3, 90
RL_BATCH, RL_GROUP, RL_RATE, RL_TOKENS, RL_STEPS = 8, 8, 2e-3, 12, 24
ADAPTER = LoraSpec(32, 32.0)
"""The loops ask for this rank."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loops")
    make_world(made, conversations=SL_BATCH * SL_STEPS, questions=RL_BATCH * RL_STEPS)
    shapes = shapes_for(AutoModelForCausalLM.from_pretrained(made / NAME), ADAPTER)
    save_file(initial_lora(shapes, ADAPTER, seed=0), made / "adapter.safetensors")
    return made


class SupervisedRuns:
    """Runs of sl_loop that train all weights, one for each version, made when they are first asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._curves: dict[str, list[float]] = {}

    def curve(self, python: Path) -> list[float]:
        """Mean NLL of each step."""
        version = version_of(python)
        if version not in self._curves:
            log = self.folder / f"sl-{version}"
            with serving(self.folder / NAME, self.folder / f"sl-runs-{version}", "--full-weights") as served:
                run_sl_loop(served, python, self.folder, log)
                (final,) = served.folder.glob("checkpoints/*/sampler_weights/final/model-*")
                shutil.copytree(final, self.folder / f"learnt-{version}")
            self._curves[version] = metrics_of(log, "train_mean_nll")
        return self._curves[version]

    def learnt(self, python: Path) -> Path:
        """Model that the loop has saved for sampling."""
        self.curve(python)
        return self.folder / f"learnt-{version_of(python)}"


def run_sl_loop(served: Served, python: Path, folder: Path, log: Path) -> None:
    options = [f"log_path={log}", f"model_name={NAME}", f"batch_size={SL_BATCH}", f"learning_rate={SL_RATE}"]
    options += ["save_every=30", "train_on_what=last_assistant_message"]
    served.run(python, "-m", "tinker_cookbook.recipes.sl_loop", *options, cwd=folder)


@pytest.fixture(scope="module")
def supervised(folder: Path) -> SupervisedRuns:
    return SupervisedRuns(folder)


@pytest.mark.parametrize("python", VERSIONS)
def test_the_supervised_loop_has_the_curve_of_a_plain_loop(supervised: SupervisedRuns, python: Path) -> None:
    curve = supervised.curve(python)
    plain = plain_loop(supervised.folder, python, "plain_sl.py", NAME, SL_BATCH, SL_RATE)
    print(f"sl_loop {version_of(python)}: {[round(x, 3) for x in curve[::6]]} plain {[round(x, 3) for x in plain[::6]]}")
    assert len(curve) == len(plain) == SL_STEPS
    assert curve == pytest.approx(plain, rel=0.05, abs=0.01) and curve[:10] == pytest.approx(plain[:10], rel=1e-3)
    assert sum(curve[-5:]) < 0.2 * sum(curve[:5])


def test_an_adapter_has_the_curve_of_a_plain_loops_adapter(folder: Path) -> None:
    """The same first values; what is saved is an adapter in PEFT's files."""
    python, log = PYTHONS[0], folder / "sl-adapter"
    with serving(folder / NAME, folder / "sl-runs-adapter") as served:
        run_sl_loop(served, python, folder, log)
        (final,) = served.folder.glob("checkpoints/*/sampler_weights/final/model-*")
        assert (spec_in(final).rank, spec_in(final).alpha) == (ADAPTER.rank, ADAPTER.alpha)
    curve = metrics_of(log, "train_mean_nll")
    plain = plain_loop(folder, python, "plain_sl.py", NAME, SL_BATCH, SL_RATE, folder / "adapter.safetensors")
    print(f"sl_loop, adapter: {[round(x, 3) for x in curve[::6]]} plain {[round(x, 3) for x in plain[::6]]}")
    assert curve == pytest.approx(plain, rel=0.05, abs=0.01) and curve[:10] == pytest.approx(plain[:10], rel=1e-3)
    assert sum(curve[-5:]) < 0.8 * sum(curve[:5])  # above random embeddings, which stay


@pytest.mark.parametrize("python", VERSIONS)
def test_the_rl_loop_learns_what_a_plain_loop_learns(supervised: SupervisedRuns, python: Path) -> None:
    """An adapter of a model that a client has trained, with which another server begins."""
    folder, learnt, version = supervised.folder, supervised.learnt(PYTHONS[0]), version_of(python)
    log = folder / f"rl-{version}"
    with serving(learnt, folder / f"rl-runs-{version}") as served:
        loss = ["loss_fn=importance_sampling"] if python == PYTHONS[0] else []  # the older one has no other
        options = [f"log_path={log}", f"model_name={NAME}", f"batch_size={RL_BATCH}", f"group_size={RL_GROUP}", *loss]
        options += [f"learning_rate={RL_RATE}", f"max_tokens={RL_TOKENS}", "save_every=10"]
        served.run(python, "-m", "tinker_cookbook.recipes.rl_loop", *options, cwd=folder)
    rewards, first_values = metrics_of(log, "reward/total"), folder / "adapter.safetensors"
    plain = plain_loop(folder, python, "plain_rl.py", learnt, NAME, RL_BATCH, RL_GROUP, RL_RATE, RL_TOKENS, first_values)
    print(f"rl_loop {version}: {[round(x, 2) for x in rewards]} plain {[round(x, 2) for x in plain]}")
    assert len(rewards) == len(plain) == RL_STEPS
    assert best_of(rewards) > sum(rewards[:3]) / 3 + 0.15 and best_of(rewards) > best_of(plain) - 0.25


def best_of(rewards: list[float]) -> float:
    """Highest mean of five steps: a policy without a KL term may fall for a step or two (a plain loop's did, from 0.9 to 0.1)."""
    return max(sum(rewards[i : i + 5]) / 5 for i in range(len(rewards) - 4))


def plain_loop(folder: Path, python: Path, program: str, *arguments: object) -> list[float]:
    """Curve of a plain loop."""
    done = run_client(python, CLIENTS / program, *map(str, arguments), cwd=folder)
    assert done.returncode == 0, done.stderr[-4000:]
    curve: list[float] = json.loads(done.stdout)
    return curve
