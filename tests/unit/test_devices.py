"""Kinds of device have their names in one place, so that another kind is one place to write."""

from __future__ import annotations

import ast
import importlib.util
from collections import namedtuple
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch

from asyncflow.cli.check import _devices
from asyncflow.devices import COUNTED_AS, KINDS, SHOWN_BY
from asyncflow.engines.devices import check_device, has_flash_attention, memory_of_accelerator
from asyncflow.engines.train.parallel.ranks import backend_of
from asyncflow.types import UserError
from tests.conftest import ROOT


class _Said(ast.NodeTransformer):
    """Leaves out docstrings, those of constants and fields as well. Comments are in no tree."""

    def visit_Expr(self, node: ast.Expr) -> ast.AST | None:
        return None if isinstance(node.value, ast.Constant) else self.generic_visit(node)


def writes_cuda(source: str) -> bool:
    return "cuda" in ast.unparse(_Said().visit(ast.parse(source)))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('device = "cuda"', True),
        ('device = f"cuda:{number}"', True),
        ("torch.cuda.synchronize()", True),
        ("from torch.backends import cuda as backend", True),
        ('def f(device="cuda:0"): ...', True),
        ('"""On cuda."""\nx = 1\n"""On cuda:1."""\ndef f():\n    """cuda"""\n    # cuda', False),
    ],
)
def test_the_word_is_found_in_code_alone(source: str, expected: bool) -> None:
    assert writes_cuda(source) == expected


def test_cuda_is_written_in_one_place() -> None:
    """And where Megatron's own calls, which have it written out, are answered on a CPU."""
    package = ROOT / "asyncflow"
    found = {str(path.relative_to(package)) for path in package.rglob("*.py") if writes_cuda(path.read_text())}
    assert found == {"devices.py", "engines/train/adapters/megatron/core.py"}


def test_ranks_talk_by_the_devices_own_library(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a plug-in has registered included, and one rank alone is no exception."""
    monkeypatch.setitem(torch.distributed.Backend.default_device_backend_map, "npu", "hccl")
    assert backend_of(torch.device("cpu")) == "gloo"
    assert backend_of(torch.device("cuda", 1)) == "cpu:gloo,cuda:nccl"
    monkeypatch.setattr(torch, "device", namedtuple("device", "type"))  # torch knows no NPU without its plug-in
    assert backend_of(torch.device("npu")) == "cpu:gloo,npu:hccl"


def test_every_accelerator_is_counted_and_can_be_shown() -> None:
    assert {*KINDS} - {"cpu"} == COUNTED_AS.keys() == SHOWN_BY.keys()


def test_a_device_that_is_not_there_is_refused_by_its_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    check_device("cpu:0", "train.device")
    with pytest.raises(UserError, match=r"train\.device must be cpu, cuda or npu, perhaps with a number \(cuda:1\), but is 'tpu'"):
        check_device("tpu", "train.device")
    with pytest.raises(UserError, match=r"train\.device is 'cuda:1', but PyTorch sees no GPU here: set it to cpu"):
        check_device("cuda:1", "train.device")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    check_device("cuda:1", "rollout.device")
    with pytest.raises(UserError, match=r"rollout\.device is 'cuda:2', and PyTorch sees 2 of them here: they are numbered from 0"):
        check_device("cuda:2", "rollout.device")


@pytest.mark.parametrize(
    ("is_built", "capability", "expected"), [(True, (8, 0), True), (True, (7, 5), False), (False, (9, 0), False)]
)
def test_flash_attention_takes_a_build_and_a_gpu(
    is_built: bool, capability: Any, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.backends.cuda, "is_flash_attention_available", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: capability)
    assert has_flash_attention(torch.device("cuda:1")) == expected


@pytest.mark.parametrize(
    ("names", "rows"),
    [
        ({}, [("accelerators", "none: rollout.device and train.device must be cpu")]),
        ({"cuda": ["A", "B"]}, [("cuda:0", "A"), ("cuda:1", "B")]),
        ({"npu": ["C"]}, [("npu:0", "C")]),
    ],
)
def test_check_lists_the_devices(names: dict[str, list[str]], rows: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch) -> None:
    class Driver(NamedTuple):
        kind: str

        def is_available(self) -> bool:
            return self.kind in names

        def device_count(self) -> int:
            return len(names.get(self.kind, []))

        def get_device_name(self, number: int) -> str:
            return names[self.kind][number]

        def get_device_properties(self, number: int) -> SimpleNamespace:
            return SimpleNamespace(total_memory=len(names) << 30)

    monkeypatch.setattr(torch, "get_device_module", Driver)
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "torch_npu" or find_spec(name))
    assert _devices()[0][0] == "cpu" and _devices()[1:] == rows
    assert memory_of_accelerator() == (2.0**30 if names else None)
