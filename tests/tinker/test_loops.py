"""The cookbook's smallest loops, unmodified, against a server of ours, beside plain loops on the same data (suite `tinker`)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from asyncflow.service.tinker.checkpoint_store import MODEL_DIR
from tests.tinker.world import CLIENTS, NAME, PYTHONS, make_world, metrics_of, serving, version_of

pytestmark = pytest.mark.skipif(not PYTHONS, reason="ASYNCFLOW_TINKER_PYTHONS names no interpreter that has the tinker SDK")
VERSIONS = [pytest.param(python, id=version_of(python)) for python in PYTHONS]
SL_BATCH, SL_RATE, SL_STEPS = 16, 5e-3, 90
RL_BATCH, RL_GROUP, RL_RATE, RL_TOKENS, RL_STEPS = 8, 8, 1e-3, 12, 16


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("loops")
    make_world(made, conversations=SL_BATCH * SL_STEPS, questions=RL_BATCH * RL_STEPS)
    return made


@pytest.mark.parametrize("python", VERSIONS)
def test_the_cookbooks_loops_learn_what_plain_loops_learn(folder: Path, python: Path) -> None:
    version = version_of(python)
    sl_log, rl_log, learnt = folder / f"sl-{version}", folder / f"rl-{version}", folder / f"learnt-{version}"
    with serving(folder / NAME, folder / f"sl-runs-{version}") as served:
        options = [
            f"log_path={sl_log}",
            f"model_name={NAME}",
            f"batch_size={SL_BATCH}",
            f"learning_rate={SL_RATE}",
            "save_every=20",
        ]
        served.run(python, "-m", "tinker_cookbook.recipes.sl_loop", *options, cwd=folder)
        plain_sl = json.loads(
            served.run(python, CLIENTS / "plain_sl.py", NAME, str(SL_BATCH), str(SL_RATE), folder / f"plain-{version}", cwd=folder)
        )
        (final,) = served.folder.glob("checkpoints/*/sampler_weights/final")
        shutil.copytree(final / MODEL_DIR, learnt)
    curve = metrics_of(sl_log, "train_mean_nll")
    print(f"sl_loop {version}: {[round(x, 3) for x in curve[::5]]} plain {[round(x, 3) for x in plain_sl[::5]]}")
    assert len(curve) == len(plain_sl) == SL_STEPS
    assert curve == pytest.approx(plain_sl, rel=0.02, abs=0.01) and curve[:5] == pytest.approx(plain_sl[:5], rel=1e-4)
    assert sum(curve[-5:]) < 0.2 * sum(curve[:5])

    # A model that a client has trained is one that another server begins with.
    with serving(learnt, folder / f"rl-runs-{version}") as served:
        loss = ["loss_fn=importance_sampling"] if python == PYTHONS[0] else []  # the older one has no other
        options = [f"log_path={rl_log}", f"model_name={NAME}", f"batch_size={RL_BATCH}", f"group_size={RL_GROUP}", *loss]
        options += [f"learning_rate={RL_RATE}", f"max_tokens={RL_TOKENS}", "save_every=10"]
        served.run(python, "-m", "tinker_cookbook.recipes.rl_loop", *options, cwd=folder)
        figures = (str(RL_BATCH), str(RL_GROUP), str(RL_RATE), str(RL_TOKENS))
        plain_rl = json.loads(served.run(python, CLIENTS / "plain_rl.py", learnt, NAME, *figures, cwd=folder))
    rewards = metrics_of(rl_log, "reward/total")
    print(f"rl_loop {version}: {[round(x, 2) for x in rewards]} plain {[round(x, 2) for x in plain_rl]}")
    assert len(rewards) == len(plain_rl) == RL_STEPS
    first, last = sum(rewards[:3]) / 3, sum(rewards[-3:]) / 3
    assert first < 0.8 and last > 0.9 and last > sum(plain_rl[-3:]) / 3 - 0.1
