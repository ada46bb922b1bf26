"""What workers keep of what they make."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from asyncflow.build.workers import Connection, _sample_filter
from asyncflow.workflows.evaluation import HeldOut
from asyncflow.workflows.samples import Prompt


@pytest.mark.parametrize("greedy", [True, False])
def test_of_every_evaluation_the_same_prompts_are_kept(greedy: bool) -> None:
    kept: list[dict[str, Any]] = []
    held_out = HeldOut(
        [Prompt(np.arange(2), {}) for _ in range(5)],
        last_version=9,
        every_steps=1,
        samples=4,
        temperature=1.0,
        greedy=greedy,
        on_row=lambda row: None,
    )
    run = SimpleNamespace(
        shape=SimpleNamespace(group_bits=3, numbers_per_step=8),
        config=SimpleNamespace(telemetry=SimpleNamespace(samples_per_step=3)),
        job=SimpleNamespace(num_held_out=5),
        reporter=SimpleNamespace(keep_sample=kept.append),
    )
    keep = _sample_filter(cast(Connection, run))
    for version in range(10):
        for meta in held_out.admission(version)[0]:
            for number in range(meta.size):
                keep({"row": (meta.group << 3) | number, "purpose": "eval", "version": version, "group": meta.group})
    firsts = [held_out.admission(version)[0][i].group for version in range(10) for i in range(3)]
    assert [(sample["version"], sample["group"]) for sample in kept] == [(i // 3, group) for i, group in enumerate(firsts)]
    kept.clear()
    for row in range(16 << 3):
        keep({"row": row, "purpose": "train"})
    assert [sample["row"] >> 3 for sample in kept] == [0, 1, 2, 8, 9, 10]
