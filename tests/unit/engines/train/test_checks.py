"""What a train engine refuses is said before anything starts, without torch."""

import importlib.util
import subprocess
import sys
from typing import Any

import pytest

from asyncflow.config import parse
from asyncflow.engines.train import TRAIN_ENGINE_CHECKS, TRAIN_ENGINES
from asyncflow.run.preparation.checks import check_train_engine
from asyncflow.types import UserError
from tests.patience import patience

FIELDS = {
    "model_type": "llama",
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "vocab_size": 101,
}


def check(engine: Any, fields: dict[str, Any], **changes: Any) -> None:
    layout = {axis: changes.pop(axis) for axis in ("dp", "tp", "pp") if axis in changes}
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "train": {"engine": engine, **changes}, "plan": {"train": layout}}
    check_train_engine(parse(tree), FIELDS | fields)


@pytest.fixture
def all_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: name)


@pytest.mark.parametrize(
    ("engine", "changes", "fields", "words"),
    [
        ("torch", {"tp": 3}, {}, "plan.train.tp is 3"),
        ("torch", {"pp": 5}, {}, "plan.train.pp is 5"),
        ("torch", {"tp": 2}, {"model_type": "gpt2"}, "a model of type 'gpt2'"),
        ({"name": "torch", "stage": 2}, {}, {}, "'torch' has no option 'stage': it has none"),
        ({"path": "my_engine.py:Engine", "depth": 2}, {"tp": 3}, {}, "plan.train.tp is 3"),
        ("deepspeed", {"tp": 2}, {}, "data parallel only"),
        ("deepspeed", {"pp": 2}, {}, "data parallel only"),
        ("deepspeed", {"accumulate": "exact"}, {}, "set train.accumulate to fp32"),
        ({"name": "deepspeed", "stage": 4}, {}, {}, "train.engine.stage is one of 1, 2, 3"),
        ({"name": "deepspeed", "stages": 2}, {}, {}, "did you mean 'stage'"),
        ({"name": "deepspeed", "stage": 1}, {"dtype": "bfloat16"}, {}, "stage to 2"),
        ("deepspeed", {}, {"model_type": "gpt2"}, "a model of type 'gpt2'"),
        ("megatron", {"accumulate": "exact"}, {}, "set train.accumulate to fp32"),
        ("megatron", {"offload": True}, {}, "set train.offload to false"),
        ("megatron", {"offload_optimizer": True}, {}, "train.offload_optimizer"),
        ("megatron", {"pp": 3}, {}, "plan.train.pp=3 does not divide the model's 4 layers"),
        ("megatron", {"tp": 8}, {}, "plan.train.tp=8 does not divide the model's 4 key heads"),
        ("megatron", {}, {"attention_bias": True}, "no biases on output"),
        ("megatron", {}, {"mlp_bias": True}, "no biases on output"),
        ("megatron", {}, {"model_type": "gpt2"}, "a model of type 'gpt2'"),
    ],
)
@pytest.mark.usefixtures("all_installed")
def test_what_an_engine_does_not_do_is_refused(engine: Any, changes: dict[str, Any], fields: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError) as caught:
        check(engine, fields, **changes)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.usefixtures("all_installed")
def test_what_an_engine_does_is_not() -> None:
    for engine in (
        "torch",
        {"name": "deepspeed", "stage": 3, "zero": {"overlap_comm": True}},
        "megatron",
        {"path": "mine.py:Engine"},
    ):
        check(engine, {}, dp=4, dtype="bfloat16")
    check("megatron", {}, tp=2, pp=4)
    check("torch", {}, tp=2, pp=3, accumulate="exact", offload_optimizer=True)
    assert TRAIN_ENGINE_CHECKS.keys() == TRAIN_ENGINES.keys()


@pytest.mark.parametrize("engine", ["deepspeed", "megatron"])
def test_an_engine_that_is_not_installed_says_what_to_install(engine: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *_: None)
    with pytest.raises(UserError, match=rf"asyncflow-rl\[{engine}\]"):
        check(engine, {})


def test_asking_takes_no_torch() -> None:
    program = (
        "import sys; from tests.unit.engines.train.test_checks import check; check('torch', {}); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", program], timeout=patience(60), check=False).returncode == 0
