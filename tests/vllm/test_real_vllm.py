"""Against a real vLLM (`make test-vllm`): updates beside a fresh server, and a whole run. Six starts of a minute each."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

from asyncflow.engines.base import Response, SampleKey, Sampling
from asyncflow.engines.rollout.vllm import VllmEngine
from asyncflow.engines.rollout.vllm_client import Refused, VllmClient
from asyncflow.engines.rollout.vllm_instance import OwnServer
from asyncflow.telemetry.certificate import read_certificate
from tests.conftest import MODEL, merged
from tests.e2e.commands import command_line, processes_of, rows, write_config
from tests.vllm.servers import VLLM_PYTHON

pytestmark = pytest.mark.skipif(VLLM_PYTHON is None, reason="ASYNCFLOW_VLLM_PYTHON names no interpreter that has vLLM")
SHIFT = -0.05


def changed() -> dict[str, torch.Tensor]:
    return {name: tensor * (1 + SHIFT) for name, tensor in load_file(MODEL / "model.safetensors").items()}


@asynccontextmanager
async def opened(model: Path, **changes: Any) -> AsyncIterator[VllmEngine]:
    options = {"num_slots": 16, "max_context": 224, "stop_ids": (), "python": VLLM_PYTHON, **changes}
    engine = await asyncio.to_thread(lambda: VllmEngine(model, **options))
    try:
        yield engine
    finally:
        await engine.close()


async def probe(engine: VllmEngine) -> list[Response]:
    """Eight responses, one after another: a sum depends on what else is in the batch."""
    made = []
    for index in range(8):
        prompt, sampling = np.arange(5, 20 + index), Sampling([1.0, 0.7, 0.0][index % 3], 64)
        async for response in engine.generate(prompt, samples=[index], sampling=sampling, key=SampleKey(3, index)):
            made.append(response)
    return made


async def test_an_updated_server_is_a_fresh_one_with_the_new_weights_and_a_killed_one_comes_back_as_it(tmp_path: Path) -> None:
    """Tokens and log-probs are equal to the bit."""
    fresh_model = tmp_path / "changed"
    shutil.copytree(MODEL, fresh_model)
    save_file(changed(), fresh_model / "model.safetensors", metadata={"format": "pt"})
    async with opened(MODEL) as engine:
        before = await probe(engine)
        began = time.monotonic()
        await engine.install(1, changed())
        print(f"installed in {time.monotonic() - began:.3f} s")
        updated = await probe(engine)
        host = engine.instances[0].host
        assert isinstance(host, OwnServer) and host.server is not None and host.server.pid is not None
        await refused_without_the_key(host.server.address)
        group = psutil.Process(host.server.pid).children(recursive=True)
        assert len(group) >= 2
        stream = engine.generate(np.arange(9), samples=range(8), sampling=Sampling(1.0, 200), key=SampleKey(3, 9))
        pending = asyncio.create_task(anext(stream))
        await asyncio.sleep(0.2)
        group[-1].kill()  # the engine, or what computes for it
        assert (await pending).version_spans.tolist() == [[0, 1]]
        await stream.aclose()
        revived = await probe(engine)
        assert engine.instances[0].num_restarts == 1
        assert not [process for process in group if process.is_running() and process.status() != psutil.STATUS_ZOMBIE]
    async with opened(fresh_model, version=1) as engine:
        fresh = await probe(engine)
    for made in (updated, revived):
        for one, other in zip(made, fresh, strict=True):
            assert one.token_ids.tolist() == other.token_ids.tolist()
            assert np.abs(one.logprobs - other.logprobs).max() == 0.0
            assert one.version_spans.tolist() == [[0, 1]]
    assert all(np.abs(a.logprobs[:1] - b.logprobs[:1]).max() > 1e-4 for a, b in zip(before, fresh, strict=True))


async def refused_without_the_key(address: str) -> None:
    """Whatever is asked, the development endpoints too."""
    stranger = VllmClient(address, "another key", generation_seconds=30, deadline_seconds=30)
    for call in (
        stranger.pause("abort", clear_cache=True),
        stranger.resume(),
        stranger.start_weight_update(),
        stranger.set_weight_version(9),
        stranger.settings(),
        stranger.generate([1], {"max_tokens": 1}, "salt"),
    ):
        with pytest.raises(Refused, match="401"):
            await call
    await stranger.close()


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Callable[..., tuple[subprocess.Popen[str], Path]]]:
    """Starts a small run on vLLM."""
    started: list[subprocess.Popen[str]] = []

    def start(**changes: Any) -> tuple[subprocess.Popen[str], Path]:
        tree = {
            "run": {"name": "vllm", "dir": str(tmp_path / "runs"), "steps": 6, "stall_timeout_seconds": 900},
            "model": {"path": str(MODEL)},
            "data": {"path": "generated:arithmetic", "limit": 64},
            "train": {"prompts_per_step": 8, "learning_rate": 1e-4},
            "telemetry": {"trackers": []},
        }
        process = subprocess.Popen(
            command_line("train", write_config(tmp_path, merged(tree, changes))),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, tmp_path / "runs" / "vllm"

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def test_a_bounded_run_on_two_instances_one_of_which_is_killed(
    run: Callable[..., tuple[subprocess.Popen[str], Path]],
) -> None:
    """Weights are installed in the middle of responses, and no prompt is lost."""
    engine = {"name": "vllm", "python": VLLM_PYTHON, "instances": 2, "arguments": {"disable_uvicorn_access_log": False}}
    rollout = {"engine": engine, "num_slots": 16, "group_size": 4, "max_new_tokens": 48, "kv_on_install": "recompute"}
    before = vllm_processes()
    command, run_dir = run(rollout=rollout, schedule={"name": "bounded", "max_staleness": 2})
    deadline = time.monotonic() + 1200
    while not (run_dir / "metrics.jsonl").exists() or len(rows(run_dir / "metrics.jsonl")) < 2:
        assert command.poll() is None and time.monotonic() < deadline, command.communicate()
        time.sleep(0.1)
    engines = [p for worker in processes_of(run_dir) for p in worker.children(recursive=True) if "EngineCore" in p.name()]
    assert engines, "no engine was found"
    engines[0].kill()
    output, errors = command.communicate(timeout=900)
    assert command.returncode == 0, errors[-2000:]
    log = (run_dir / "logs" / "rollout-0.log").read_text()
    assert "was lost" in log
    asked = [len(re.findall(rf"\[vLLM {i}\].*/inference/v1/generate", log)) for i in range(2)]
    print("responses of each instance:", asked)
    assert min(asked) >= 32 and sum(asked) >= 6 * 32, asked
    steps = rows(run_dir / "metrics.jsonl")
    assert len(steps) == 6 and all(step["rows/trained"] == 32 and step["rows/dead"] == 0 for step in steps)
    certificate = read_certificate(run_dir)
    assert certificate is not None and not certificate.is_deterministic
    print(
        json.dumps([{k: v for k, v in step.items() if k.startswith(("mismatch/", "staleness/", "reward/mean"))} for step in steps])
    )
    print(output[-1500:])
    differences = [step["mismatch/kl"] for step in steps if "mismatch/kl" in step]
    assert differences and max(differences) < 1e-6  # nats: both engines compute the same model, in float32
    assert all("policy/rollout_kl" in step for step in steps)
    assert not processes_of(run_dir)
    deadline = time.monotonic() + 5
    while vllm_processes() - before:
        assert time.monotonic() < deadline, vllm_processes() - before
        time.sleep(0.1)


def vllm_processes() -> set[int]:
    """Those of this machine, also of other tests."""
    found = set()
    for process in psutil.process_iter(["cmdline", "status"]):
        is_vllm = any("vllm" in word.lower() for word in process.info["cmdline"] or [])
        if is_vllm and process.info["status"] != psutil.STATUS_ZOMBIE and "pytest" not in process.info["cmdline"]:
            found.add(process.pid)
    return found
