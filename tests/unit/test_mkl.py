"""MKL's products: on Intel's processors a row's bits do not depend on the rows beside it, with narrower instructions neither."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import asyncflow.engines  # noqa: F401 - which tells MKL
from asyncflow import mkl
from asyncflow.threads import thread_environment

NARROW = {"ATEN_CPU_CAPABILITY": "avx2", "MKL_ENABLE_INSTRUCTIONS": "AVX2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
SHAPES = ((64, 64), (100, 36), (128, 384), (576, 192), (1536, 576), (896, 4864), (16, 576), (576, 16))


@pytest.mark.skipif(not mkl.is_intels(), reason="this processor is not one of Intel's")
def test_a_row_s_bits_do_not_depend_on_how_many_there_are() -> None:
    for inputs, outputs in SHAPES:
        generator = torch.Generator().manual_seed(0)
        x, dy = torch.randn(600, inputs, generator=generator), torch.randn(600, outputs, generator=generator)
        weight = torch.randn(outputs, inputs, generator=generator)
        forward, backward = torch.nn.functional.linear(x, weight), dy @ weight
        for begin, count in ((5, 4), (64, 8), (7, 12), (9, 16), (100, 36), (200, 128), (0, 512)):
            rows = slice(begin, begin + count)
            assert torch.nn.functional.linear(x[rows], weight).equal(forward[rows]), (inputs, outputs, count)
            assert (dy[rows] @ weight).equal(backward[rows]), (inputs, outputs, count)


@pytest.mark.skipif(not mkl.is_intels(), reason="this processor is not one of Intel's")
def test_nor_do_they_without_avx512() -> None:
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", __file__, "-k", "a_row_s_bits"]
    done = subprocess.run(command, env={**os.environ, **NARROW}, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and "1 passed" in done.stdout, done.stdout


@pytest.mark.parametrize(
    ("is_intels", "before", "after"),
    [(True, None, mkl.STRICT), (True, "AVX2", "AVX2"), (False, None, None), (False, mkl.STRICT, None), (False, "AVX2", "AVX2")],
)
def test_it_is_told_on_intels_processors_alone_and_what_the_user_has_said_stays(
    is_intels: bool, before: str | None, after: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mkl, "is_intels", lambda: is_intels)
    monkeypatch.delenv(mkl.VARIABLE, raising=False)
    if before is not None:
        monkeypatch.setenv(mkl.VARIABLE, before)
    assert thread_environment(1).get(mkl.VARIABLE) == (after if is_intels else None)
    mkl.keep_bits_of_rows()
    assert os.environ.get(mkl.VARIABLE) == after
