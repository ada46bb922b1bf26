"""Workers that come by the run's TLS door, as those on other machines do: here all of a run's, the trainer too."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from asyncflow.cluster.remote_node import RemoteNode
from asyncflow.telemetry.trace import read_spans
from tests.depth import in_gate
from tests.e2e.commands import run_command, write_config

Small = Callable[..., dict[str, Any]]


@pytest.mark.parametrize("weight_sync", in_gate("collective", of=["network", "collective"]))
def test_a_run_over_tls_alone_gives_the_same_bits(small: Small, tmp_path: Path, weight_sync: str) -> None:
    places = RemoteNode(tmp_path / "memory", tmp_path / "files")
    for place in (places.memory, places.files):
        place.mkdir(mode=0o700)
    separate = {"reward": {"place": "task"}, "algorithm": {"kl_coefficient": 0.1}}
    tree = small(train={"accumulate": "exact", "reference": "task"}, rollout={"num_workers": 2}, **separate)
    config, listen = write_config(tmp_path, tree), "tls:127.0.0.1:0"
    assert run_command("train", config, "run.name=near").returncode == 0
    doors = [f"queue.listen={listen}", f"weight_sync.name={weight_sync}", f"weight_sync.listen={listen}"]
    far = run_command("train", config, "run.name=far", *doors, **places.environment(), GLOO_SOCKET_IFNAME="lo")
    assert far.returncode == 0, far.stdout + far.stderr
    near, far_model = (tmp_path / "runs" / name / "model" / "model.safetensors" for name in ("near", "far"))
    assert near.read_bytes() == far_model.read_bytes()
    workers = {span.worker for span in read_spans(tmp_path / "runs" / "far" / "spans.jsonl")}
    assert workers == {"rollout/0", "rollout/1", "reward/0", "reference/0", "trainer/0"}
    assert [*places.memory.iterdir()]  # weights lay there and not in the driver's folder
