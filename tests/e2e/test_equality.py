"""Theorem 1 (PA): periodic asynchrony changes when things happen, never what. Real processes, two workers, injected delays.

The check is void unless the groups were trained in different orders, and training began while the batch was being generated.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from asyncflow.telemetry.spans import Span
from asyncflow.telemetry.trace import read_spans
from tests.e2e.commands import rows, run_command, write_config

DELAYED_REWARD = """
import random, time

class Delayed:
    def __init__(self, *, salt):
        self.salt = salt

    def __call__(self, sample):
        time.sleep(random.Random(f"{self.salt}{sample.prompt}{sample.response}").random() ** 4 * 0.4)
        right = sample.response.rsplit("####", 1)[-1].strip() == sample.example["answer"]
        return float(right and sample.is_finished)
"""


def run(small: Callable[..., dict[str, Any]], tmp_path: Path, schedule: str) -> Path:
    (tmp_path / "delayed.py").write_text(DELAYED_REWARD)
    tree = small(
        run={"name": schedule, "steps": 4},
        rollout={"num_workers": 2, "num_slots": 16},
        train={"prompts_per_step": 8, "warmup_steps": 0},
        schedule=schedule,
        reward={"scorer": {"path": f"{tmp_path / 'delayed.py'}:Delayed", "salt": schedule}, "num_workers": 4},
    )
    folder = tmp_path / schedule
    folder.mkdir()
    command = run_command("train", write_config(folder, tree))
    assert command.returncode == 0, command.stderr
    return tmp_path / "runs" / schedule


def trained_order(spans: list[Span], step: int) -> list[int]:
    """The step's groups in the order in which training took them, each once (a flush may cut a span in two)."""
    taken = sorted((s.start, s.group) for s in spans if s.task == "forward_backward" and s.step == step)
    return list(dict.fromkeys(group for _, group in taken))


def began_early(spans: list[Span], step: int) -> bool:
    """Whether training on the step began before the batch's last group was complete (its span ends a moment after it is)."""
    first_training = min(s.start for s in spans if s.task == "forward_backward" and s.step == step)
    return first_training < -0.05 + max(s.end for s in spans if s.task == "generate_group" and s.step == step)


def test_periodic_equals_synchronous(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    synchronous, periodic = (run(small, tmp_path, schedule) for schedule in ("synchronous", "periodic"))
    spans = {path.name: read_spans(path / "spans.jsonl") for path in (synchronous, periodic)}

    for step in range(1, 4):  # in step 0 the trainer is still loading its engine while the batch is generated
        orders = [trained_order(spans[name], step) for name in ("synchronous", "periodic")]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(step * 8, step * 8 + 8))
        assert orders[0] != orders[1], "void: the orders did not differ"
        assert began_early(spans["periodic"], step), "void: training began after the batch"
        assert not began_early(spans["synchronous"], step)

    losses = [[row["policy/loss"] for row in rows(path / "metrics.jsonl")] for path in (synchronous, periodic)]
    np.testing.assert_allclose(losses[0], losses[1], rtol=0, atol=1e-6)
    assert any(abs(loss) > 1e-3 for loss in losses[0]), "void: nothing was learned"
    weights = [load_file(path / "model" / "model.safetensors") for path in (synchronous, periodic)]
    for name in weights[0]:
        np.testing.assert_allclose(weights[0][name], weights[1][name], rtol=0, atol=1e-5, err_msg=name)
