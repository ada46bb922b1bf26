"""Both engines over a device that is not the CPU (tests/stand_in.py): they compute the same, nothing lies on the wrong side, and it
is a number how often the host waits for the device."""

from __future__ import annotations

import asyncio
import hashlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from asyncflow.engines.train.device_weights import HostCopies
from asyncflow.engines.train.model import attention
from asyncflow.types import LoraSpec, TensorSpec
from tests.conftest import MODEL
from tests.depth import deep, in_gate
from tests.patience import patience
from tests.stand_in import KIND, TRAFFIC, install
from tests.stand_in_streams import WORK, RaceError
from tests.unit.engines.train.conftest import micro_batch
from tests.unit.engines.train.parallel.processes import Processes
from tests.unit.engines.train.training import ModelPath, Sum, hold_back, policy_gradient, torch_engine, weights_of

ROOT = Path(__file__).parents[2]
ADAPTER = LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def own() -> Iterator[Processes]:
    """A process that has the stand-in: it stays there until the process ends."""
    process = Processes(1)
    process.run(install)
    yield process
    process.close()


def strictness() -> dict[str, Any]:
    """What is refused, and what is counted."""
    refused = []
    there, here = torch.ones(3, 4, device=KIND), torch.ones(4, 5)
    weights = torch.nn.Parameter(torch.ones(4, 5, device=KIND))
    TRAFFIC.clear()
    (there @ weights).sum().backward()
    uncounted = dict(TRAFFIC.reads) | dict(TRAFFIC.uploads)
    for wrong in (lambda: there @ here, lambda: here.add_(weights), lambda: there.numpy(), lambda: np.asarray(there)):
        try:
            wrong()
        except (RuntimeError, TypeError, ValueError) as error:
            refused.append(str(error).splitlines()[0])
    on_device = here.to(KIND)
    read = [there.sum().item(), there.cpu().sum().item(), there[there > 0].shape[0], there.tolist()[0][0], bool((there > 0).all())]
    assert weights.grad is not None
    counts = {"reads": sum(TRAFFIC.reads.values()), "uploads": sum(TRAFFIC.uploads.values()), "uncounted": uncounted}
    return {"refused": refused, "read": read, "kinds": {weights.grad.device.type, on_device.device.type}, **counts}


def test_it_refuses_what_a_device_refuses_and_counts_what_waits(own: Processes) -> None:
    (seen,) = own.run(strictness)
    assert len(seen["refused"]) == 4 and seen["uncounted"] == {}
    assert seen["kinds"] == {KIND}
    assert seen["read"] == [12.0, 12.0, 12, 1.0, True]
    assert seen["reads"] == 5 and seen["uploads"] == 1


def asynchrony() -> dict[str, Any]:
    """What is there too late, what is refused, and that it helps to wait."""
    stream, default = torch.Stream(torch.device(KIND)), torch.accelerator.current_stream()
    there = torch.tensor([1.0, 2.0, 3.0, 4.0], device=KIND)
    host, source = torch.empty(4, pin_memory=True), torch.empty(4, pin_memory=True).fill_(1)
    refused: list[str] = []

    def copied(wait: Callable[[], object]) -> list[bool]:
        """Whether a copy is there at once, when what lay before it is waited for, and when it is."""
        stream.wait_stream(default)
        before = stream.record_event()
        with stream:
            host.copy_(there, non_blocking=True)
        waits: list[Callable[[], object]] = [lambda: None, before.synchronize, wait]
        return [(each(), host.tolist() == [1.0, 2.0, 3.0, 4.0])[1] for each in waits]

    def reads_too_early() -> None:
        fresh = there + 1
        with stream:
            host.copy_(fresh, non_blocking=True)

    def writes_too_early() -> None:
        stream.wait_stream(default)
        with stream:
            host.copy_(there, non_blocking=True)
        there.add_(1)

    def changes_what_is_uploaded() -> None:
        there.copy_(source, non_blocking=True)
        source.add_(1)
        there.cpu()

    waits = [lambda: stream.record_event().synchronize(), stream.synchronize, torch.accelerator.synchronize]
    late = [copied(wait) for wait in waits]
    early = there.to("cpu", non_blocking=True)
    late.append([early.isfinite().any().item()] * 2 + [there.tolist() == early.tolist()])
    for wrong in (reads_too_early, writes_too_early, changes_what_is_uploaded):
        try:
            wrong()
        except RaceError as error:
            refused.append(str(error))
        torch.accelerator.synchronize()
    there.copy_(torch.ones(4))  # whoever waits may read and write
    stream.wait_stream(default)
    with stream:
        doubled = there * 2
    default.wait_event(stream.record_event())
    doubled.add_(there)
    return {"late": late, "refused": refused, "sum": doubled.sum().item()}


def test_what_nobody_has_waited_for_is_not_there_and_what_has_no_order_is_refused(own: Processes) -> None:
    (seen,) = own.run(asynchrony)
    assert seen["late"] == [[False, False, True]] * 4 and seen["sum"] == 12.0
    assert [word in error for word, error in zip(("reads", "writes", "was changed"), seen["refused"], strict=True)] == [True] * 3


def trained(path: Path, device: str, **changes: Any) -> dict[str, Any]:
    """Two steps of two micro-batches: results, weights, and what crossed."""

    async def steps() -> dict[str, Any]:
        engine = torch_engine(path, device=device, learning_rate=1e-3, **changes)
        seen: dict[str, Any] = {"losses": [], "reads": [], "uploads": [], "norms": []}
        WORK.waited.clear()
        for step in range(2):
            await engine.begin_step()
            for number in range(2):
                TRAFFIC.clear()
                (result,) = await engine.forward_backward([micro_batch(2 * step + number)], Sum(policy_gradient))
                seen["losses"].append(result.loss_sum)
                seen["reads"].append(dict(TRAFFIC.reads))
                seen["uploads"].append(sum(TRAFFIC.uploads.values()))
            TRAFFIC.clear()
            seen["norms"].append((await engine.optim_step(20)).grad_norm)
            seen["update"], seen["update_uploads"] = dict(TRAFFIC.reads), sum(TRAFFIC.uploads.values())
        seen["waited"] = dict(WORK.waited)
        seen["weights"] = {name: tensor.numpy() for name, tensor in (await weights_of(engine)).items()}
        await engine.close()
        return seen

    return asyncio.run(steps())


@pytest.fixture(scope="module")
def of_training(own: Processes, model_path: ModelPath) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same training on the CPU and on the stand-in."""
    path = model_path("qwen2-tiny")
    (there,) = own.run(trained, path, KIND)
    return trained(path, "cpu"), there


def test_training_on_a_device_is_that_of_the_cpu(of_training: tuple[dict[str, Any], dict[str, Any]]) -> None:
    here, there = of_training
    np.testing.assert_allclose(there["losses"], here["losses"], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(there["norms"], here["norms"], rtol=1e-5)
    for name, weights in here["weights"].items():
        np.testing.assert_allclose(there["weights"][name], weights, atol=2e-5, err_msg=name)


def published_late(path: Path) -> dict[str, Any]:
    """Weights that travel while the next micro-step computes, and how often the host has waited for one."""

    async def steps() -> dict[str, Any]:
        engine = torch_engine(path, device=KIND, learning_rate=1e-2)
        await engine.begin_step()
        await engine.forward_backward([micro_batch(0)], Sum(policy_gradient))
        await engine.optim_step(20)
        WORK.waited.clear()
        tensors, seen = (await engine.export_weights()).tensors(), {}
        for turn in range(2):
            async for name, tensor in tensors:
                seen[name] = tensor.clone().numpy()
                if not turn:
                    break
            await engine.forward_backward([micro_batch(1)], Sum(policy_gradient))
        waited, fingerprint = dict(WORK.waited), await engine.fingerprint()
        await engine.close()
        return {"seen": seen, "waited": waited, "fingerprint": fingerprint}

    return asyncio.run(steps())


def test_weights_travel_beside_the_next_micro_step_and_each_is_waited_for(own: Processes, model_path: ModelPath) -> None:
    (found,) = own.run(published_late, model_path("qwen2-tiny"))
    assert found["waited"] == {"event": len(found["seen"])}
    for name, weights in found["seen"].items():
        assert hashlib.sha256(weights.tobytes()).hexdigest() == found["fingerprint"][f"weights/{name}"]


def gathered() -> list[list[float]]:
    """Copies of three gathered weights, the first as it is after the second."""
    tensors = {str(number): torch.full((3,), float(number), device=KIND) for number in range(3)}
    copies = HostCopies({name: TensorSpec.of(tensor) for name, tensor in tensors.items()})
    first, second = copies.of(tensors["0"]), copies.of(tensors["1"])
    return [first.tolist(), second.tolist(), copies.of(tensors["2"]).tolist()]


def test_copies_of_gathered_weights_are_there_when_they_are_handed_out(own: Processes) -> None:
    assert own.run(gathered) == [[[0.0] * 3, [1.0] * 3, [2.0] * 3]]


def test_an_optimizers_state_in_host_memory_changes_no_weight_on_a_device(
    own: Processes, model_path: ModelPath, of_training: tuple[dict[str, Any], dict[str, Any]]
) -> None:
    (found,) = own.run(partial(trained, offload_optimizer=True), model_path("qwen2-tiny"), KIND)
    for name, weights in of_training[1]["weights"].items():
        np.testing.assert_array_equal(found["weights"][name], weights, err_msg=name)


FIGURES = {"tolist": 1}  # all together
MICRO_STEP_UPLOADS = 9  # four of the layout, mask, advantages and log-probs of the tokens, which are the policy's, which are fresh
OF_ONE_PROCESS: dict[str, tuple[dict[str, Any], int]] = {
    "policy": ({}, 1),
    "adapter": ({"lora": ADAPTER}, 1),
    "reference": ({"has_reference": True}, 2),
    "adapter and reference": ({"lora": ADAPTER, "has_reference": True}, 2),
    "reference and old policy": ({"has_reference": True, "old": "step_start"}, 3),
}
"""Options, and the models whose passes a micro-step has."""


@pytest.mark.parametrize("case", in_gate("policy", "adapter and reference", of=OF_ONE_PROCESS))
def test_the_host_waits_so_often_in_a_micro_step_and_an_update(case: str, own: Processes, model_path: ModelPath) -> None:
    changes, models = OF_ONE_PROCESS[case]
    (there,) = own.run(partial(trained, **changes), model_path("qwen2-tiny"), KIND)
    positions = {"aten.equal.default": models}  # of each model's pass: are they those of the layout
    assert there["reads"][1:] == [positions | FIGURES] * 3  # the first one is computed twice, to compare
    assert there["uploads"][1:] == [MICRO_STEP_UPLOADS] * 3
    assert (there["update"], there["update_uploads"]) == (FIGURES, 0)
    assert there["waited"] == {}, "for an event, a stream or all of the device, besides"


def helped(path: Path, device: str, helper: str, **changes: Any) -> dict[str, Any]:
    """Two steps on a device; of each round a helper on another one computes two passes of three."""
    kernels = {KIND: attention.kernel_for}
    attention.kernel_for = lambda place, dtype: kernels[KIND](torch.device(KIND), dtype)  # the CPU's has other bits

    async def steps() -> dict[str, Any]:
        options = {"device": device, "learning_rate": 1e-2, "check_shared_prompt": False, "accumulate": "exact", **changes}
        engine = torch_engine(path, helpers=(helper,) * bool(helper), **options)
        if helper:
            hold_back(engine, 2)
        results = []
        for step in range(2):
            await engine.begin_step()
            some = [micro_batch(3 * step + number, lengths=(5, 2)) for number in range(3)]
            results += await engine.forward_backward(some, Sum(policy_gradient))
            await engine.optim_step(20)
        seen: dict[str, Any] = {"hashes": await engine.fingerprint(), "results": results, "places": set()}
        for passes in () if engine.helpers is None else engine.helpers.passes:
            models = [passes.policy, *passes.models.frozen]
            seen["places"] |= {each.device.type for model in models for each in model.parameters.values()}
        await engine.close()
        return seen

    try:
        return asyncio.run(steps())
    finally:
        attention.kernel_for = kernels[KIND]


OF_MODELS = [
    {"old": "step_start", "has_reference": True},
    {"old": "previous", "has_reference": True, "dtype": "bfloat16", "activation_checkpointing": True},
    {"old": "step_start", "has_reference": True, "offload": True},
    {"lora": ADAPTER, "has_reference": True},
]


@pytest.mark.parametrize("changes", in_gate(OF_MODELS[3], of=OF_MODELS))
def test_bits_do_not_depend_on_which_device_of_a_kind_has_computed_a_pass(
    changes: dict[str, Any], own: Processes, model_path: ModelPath
) -> None:
    """The stand-in has one device: by another name it is taken for another one, with weights and sums of its own."""
    path = model_path("qwen2-tiny")
    (alone,), (found,) = (own.run(partial(helped, **changes), path, KIND, beside) for beside in ("", f"{KIND}:0"))
    assert found["results"] == alone["results"]
    assert found["hashes"] == alone["hashes"], [key for key, value in alone["hashes"].items() if found["hashes"][key] != value]


@pytest.mark.parametrize(
    ("device", "helper", "changes"),
    in_gate(
        (KIND, "cpu", OF_MODELS[0]),
        of=[(KIND, "cpu", OF_MODELS[0]), (KIND, "cpu", {"accumulate": "fp32"}), ("cpu", f"{KIND}:0", OF_MODELS[3])],
    ),
)
def test_a_helper_has_all_that_it_computes_with_on_its_own_device(
    device: str, helper: str, changes: dict[str, Any], own: Processes, model_path: ModelPath
) -> None:
    path = model_path("qwen2-tiny")
    (alone,), (found,) = (own.run(partial(helped, **changes), path, device, beside) for beside in ("", helper))
    assert found["places"] == {helper.partition(":")[0]}
    losses = [[result.loss_sum for result in each["results"]] for each in (alone, found)]
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-3, atol=1e-4)  # those of a second update, too


def generated(device: str, length: int) -> dict[str, Any]:
    """Four responses of so many tokens to one prompt, and what crossed."""
    from asyncflow.engines.base import SampleKey, Sampling
    from asyncflow.engines.rollout import ROLLOUT_ENGINES
    from asyncflow.registry import build

    async def responses() -> dict[str, Any]:
        options = {"model_path": MODEL, "num_slots": 6, "max_context": 128, "stop_ids": (), "device": device, "speculation": 0}
        engine: Any = await asyncio.to_thread(build, "rollout engine", "slots", options, ROLLOUT_ENGINES)
        TRAFFIC.clear()
        WORK.waited.clear()
        stream = engine.generate(np.arange(7, 27), samples=range(4), sampling=Sampling(1.0, length), key=SampleKey(11, 5))
        found = {each.sample: (each.token_ids.tolist(), each.logprobs.tolist()) async for each in stream}
        seen = {"found": found, "reads": dict(TRAFFIC.reads), "uploads": sum(TRAFFIC.uploads.values())}
        seen["waited"] = dict(WORK.waited)
        await engine.close()
        return seen

    return asyncio.run(responses())


DECODE_READS = 2  # the tokens, and their log-probs
DECODE_UPLOADS = 3  # what the pass is of, and of the sampling temperatures and draws


def test_generation_on_a_device_is_that_of_the_cpu_and_a_decode_step_waits_so_often(own: Processes) -> None:
    here = generated("cpu", 24)
    (short,), (long,) = (own.run(generated, KIND, length) for length in (24, 48))
    for sample, (tokens, logprobs) in here["found"].items():
        assert short["found"][sample][0] == tokens
        np.testing.assert_allclose(short["found"][sample][1], logprobs, atol=1e-4)
        assert long["found"][sample][0][:24] == tokens
    assert sum(long["reads"].values()) - sum(short["reads"].values()) == 24 * DECODE_READS, (short["reads"], long["reads"])
    assert long["waited"] == short["waited"] == {}, "for an event, a stream or all of the device, besides"
    assert long["uploads"] - short["uploads"] == 24 * DECODE_UPLOADS, (short["uploads"], long["uploads"])


SUITES = {
    "train": ("tests/contract/test_train_engine.py", "npu and torch"),
    "rollout": ("tests/contract/test_rollout_engine.py", "slots-npu"),
    "general rollout": ("tests/contract/test_rollout_engine.py", "transformers-npu"),
}
LEAST_PASSED = 30  # of each; some of the rollout engine's are about bits, which only a CPU promises


@deep
@pytest.mark.parametrize("engine", SUITES)
def test_the_contract_of_an_engine_holds_over_the_stand_in(engine: str, tmp_path: Path) -> None:
    tests, keyword = SUITES[engine]
    command = [sys.executable, "-m", "pytest", "-v", "-p", "tests.stand_in", "-k", keyword, f"--basetemp={tmp_path}", tests]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True, timeout=patience(1200), check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    assert (passed := re.search(r"(\d+) passed", done.stdout)) and int(passed[1]) >= LEAST_PASSED, done.stdout[-400:]
