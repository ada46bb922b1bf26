"""Runs whose workers Ray places: on this machine, and over nodes that share nothing but the network: suite `ray`."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from asyncflow.telemetry.certificate import read_certificate
from asyncflow.telemetry.trace import read_spans
from tests.conftest import MODEL
from tests.e2e.commands import command_line, processes_of, rows, run_command, wait_for, write_config
from tests.forked import Command
from tests.patience import patience
from tests.processes import alive, below, name_of, words_of

pytestmark = pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed: make test-deep SUITES=ray")

Small = Callable[..., dict[str, Any]]
SECONDS = 200.0
"""A cluster takes some seconds to start, and on a busy machine a minute."""


def recipe(small: Small, **changes: Any) -> dict[str, Any]:
    return small(
        **{
            "telemetry": {"fingerprints": True},
            "train": {"prompts_per_step": 8, "accumulate": "exact"},
            "rollout": {"num_workers": 2},
        }
        | changes
    )


def learned(run_dir: Path) -> list[Any]:
    """Of each step, all groups with their rows, losses, and the bits of weights and optimiser."""
    files = sorted(run_dir.glob("fingerprints*.jsonl"))  # one of each data-parallel rank, which takes groups as they come
    steps = zip(*([json.loads(line) for line in file.read_text().splitlines()] for file in files), strict=True)
    return [
        (sorted((g for part in step for g in part["groups"]), key=lambda g: g["group"]), [part.get("tensors") for part in step])
        for step in steps
    ]


def num_steps(run_dir: Path) -> int:
    return len(rows(run_dir / "metrics.jsonl")) if (run_dir / "metrics.jsonl").exists() else 0


def leaves_of(command: Command) -> list[psutil.Process]:
    return below(command.pid)


@pytest.mark.smoke
def test_the_same_recipe_on_ray_gives_the_same_bits_though_a_worker_is_killed(
    small: Small, tmp_path: Path, background: Callable[..., Command]
) -> None:
    config = write_config(tmp_path, recipe(small, run={"steps": 6}))
    local = run_command("train", config, "run.name=local", seconds=SECONDS)
    assert local.returncode == 0, local.stderr
    command = background("train", config, "run.name=ray", "cluster=ray")
    run_dirs = [tmp_path / "runs" / name for name in ("local", "ray")]
    wait_for(lambda: num_steps(run_dirs[1]) >= 1, command)
    everyone = leaves_of(command)
    victim = next(p for p in processes_of(run_dirs[1]) if "rollout/1" in words_of(p))
    assert [p for p in victim.parents() if name_of(p).startswith("ray::RayHost")]
    victim.kill()
    output, errors = command.communicate(timeout=patience(SECONDS))
    assert command.returncode == 0, output + errors
    assert "worker rollout/1 (process" in output and "was ended by SIGKILL" in output and "it is started again in 0.5 s" in output

    assert learned(run_dirs[0]) == learned(run_dirs[1])
    models = [(run_dir / "model" / "model.safetensors").read_bytes() for run_dir in run_dirs]
    assert models[0] == models[1] != (MODEL / "model.safetensors").read_bytes()
    assert {span.worker for span in read_spans(run_dirs[1] / "spans.jsonl")} == {"rollout/0", "rollout/1", "trainer/0"}
    certificate = read_certificate(run_dirs[1])
    assert certificate is not None and not certificate.voided
    assert {path.name for path in (run_dirs[1] / "logs").iterdir()} == {
        "rollout-0.log",
        "rollout-1.log",
        "trainer-0.log",
        "ray.log",
    }
    wait_for(lambda: not alive(everyone), seconds=20.0)


def test_evaluators_on_ray_give_the_figures_and_the_training_of_a_run_without_them(small: Small, tmp_path: Path) -> None:
    evaluation = {"path": "generated:arithmetic", "num_prompts": 4, "every_steps": 2}
    config = write_config(tmp_path, recipe(small, run={"steps": 4}, schedule="delayed", eval=evaluation))
    local = run_command("train", config, "run.name=local", seconds=SECONDS)
    assert local.returncode == 0, local.stderr
    ray = run_command("train", config, "run.name=ray", "cluster=ray", "eval.num_workers=1", seconds=SECONDS)
    assert ray.returncode == 0, ray.stdout + ray.stderr
    run_dirs = [tmp_path / "runs" / name for name in ("local", "ray")]
    assert [row["step"] for row in rows(run_dirs[1] / "eval.jsonl")] == [0, 2, 4]
    assert (run_dirs[1] / "eval.jsonl").read_bytes() == (run_dirs[0] / "eval.jsonl").read_bytes()
    assert learned(run_dirs[1]) == learned(run_dirs[0])
    assert not processes_of(run_dirs[1])


def test_workers_join_and_leave_a_run_on_ray(small: Small, tmp_path: Path, background: Callable[..., Command]) -> None:
    run_dir = tmp_path / "runs" / "test"
    tree = recipe(small, run={"steps": 5000}, rollout={"num_workers": 1})
    command = background("train", write_config(tmp_path, tree), "cluster=ray")
    wait_for(lambda: num_steps(run_dir) >= 1, command)
    more = run_command("cluster", "scale", "rollout=2", "--run", run_dir)
    assert more.returncode == 0, more.stderr
    wait_for(
        lambda: "rollout/1" in {span.worker for span in read_spans(run_dir / "spans.jsonl") if span.task == "generate"}, command
    )
    everyone = leaves_of(command)
    assert sum(name_of(process).startswith("ray::RayHost") for process in everyone) == 3
    fewer = run_command("cluster", "scale", "rollout=1", "--run", run_dir, "--grace", "20")
    assert fewer.returncode == 0, fewer.stderr
    wait_for(lambda: sum(name_of(p).startswith("ray::RayHost") for p in alive(leaves_of(command))) == 2, command)
    before = num_steps(run_dir)
    wait_for(lambda: num_steps(run_dir) > before + 1, command)
    command.send_signal(signal.SIGINT)
    assert command.wait(patience(SECONDS)) == 130
    wait_for(lambda: not alive(everyone), seconds=20.0)


def test_a_killed_driver_leaves_neither_worker_nor_ray(small: Small, tmp_path: Path, background: Callable[..., Command]) -> None:
    run_dir = tmp_path / "runs" / "test"
    command = background("train", write_config(tmp_path, recipe(small, run={"steps": 500})), "cluster=ray")
    wait_for(lambda: num_steps(run_dir) >= 1, command)
    everyone = leaves_of(command)
    assert len([p for p in everyone if "asyncflow.cluster.child" in words_of(p)]) == 3
    assert {"gcs_server", "raylet"} <= {name_of(process) for process in everyone}
    scratch = Path(next(words for p in everyone if "asyncflow.cluster.ray.guard" in (words := words_of(p)))[-1])
    assert scratch.is_dir()
    command.kill()
    wait_for(lambda: not alive(everyone), seconds=20.0)
    assert not scratch.exists()


def test_a_run_on_ray_ends_in_order_when_it_is_told_to(small: Small, tmp_path: Path, background: Callable[..., Command]) -> None:
    """Ray has handlers of its own for signals, which must not be in the way."""
    run_dir = tmp_path / "runs" / "test"
    command = background("train", write_config(tmp_path, recipe(small, run={"steps": 500})), "cluster=ray")
    wait_for(lambda: num_steps(run_dir) >= 1, command)
    everyone = leaves_of(command)
    command.send_signal(signal.SIGTERM)
    output, errors = command.communicate(timeout=patience(SECONDS))
    assert command.returncode == 143, errors
    assert (
        "interrupted after" in output and (run_dir / "model" / "model.safetensors").exists() and (run_dir / "report.html").exists()
    )
    assert [*(run_dir / "checkpoints").glob("step-*")]
    assert not alive(everyone)


RayDies = Callable[..., tuple[Command, str, str]]


@pytest.fixture(params=["gcs_server", "raylet"])
def ray_dies(request: pytest.FixtureRequest, small: Small, tmp_path: Path, background: Callable[..., Command]) -> RayDies:
    """A run whose Ray dies after some steps: its command, and what it said. No process is left of it."""

    def run(steps: int, after: int, *overrides: str) -> tuple[Command, str, str]:
        config = write_config(tmp_path, recipe(small, run={"steps": steps}))
        command = background("train", config, "cluster=ray", *overrides)
        wait_for(lambda: num_steps(tmp_path / "runs" / "test") >= after, command)
        everyone = leaves_of(command)
        next(process for process in everyone if name_of(process) == request.param).kill()
        output, errors = command.communicate(timeout=patience(SECONDS))
        wait_for(lambda: not alive(everyone), seconds=20.0)
        return command, output, errors

    return run


def test_a_run_whose_ray_dies_says_so_and_saves_its_model(ray_dies: RayDies, tmp_path: Path) -> None:
    """Ray by itself would end the driver's process a minute later, as it stands."""
    command, _, errors = ray_dies(5000, 1, "train.max_restarts=0")
    run_dir = tmp_path / "runs" / "test"
    assert command.returncode == 1 and "its host is gone" in errors and "worker trainer/0" in errors, errors
    assert re.search("(gcs_server|raylet) has ended", (run_dir / "logs" / "ray.log").read_text())
    assert (run_dir / "model" / "model.safetensors").exists() and (run_dir / "report.html").exists()


def test_a_run_whose_ray_dies_goes_on_with_another_one(ray_dies: RayDies, tmp_path: Path) -> None:
    """Where it was the run's own: the death of a trainer is what the run sees of it."""
    command, output, errors = ray_dies(60, 4, "checkpoint.every_steps=2")
    assert command.returncode == 0 and "the run is resumed from its newest checkpoint" in output + errors, output + errors
    assert [row["step"] for row in rows(tmp_path / "runs" / "test" / "metrics.jsonl")] == [*range(60)]


NODE = """
import os, sys
from ray._private.node import Node
from ray._private.parameter import RayParams

address, cpus = sys.argv[1:]
Node(RayParams(gcs_address=address, num_cpus=int(cpus), object_store_memory=80 << 20), head=False, shutdown_at_exit=True)
print("is there", flush=True)
sys.stdin.read()
"""

HEAD = """
import sys
import ray

context = ray.init("local", num_cpus=1, include_dashboard=False, object_store_memory=80 << 20, _temp_dir=sys.argv[1])
print(context.address_info["gcs_address"], flush=True)
sys.stdin.read()
"""


def can_hide() -> bool:
    """Whether a process may have mounts of its own here."""
    return subprocess.run(["unshare", "--mount", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(params=["apart"])
def nodes(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A cluster of two nodes on this machine, of 1 and 4 CPUs; the second one sees neither the run's folder nor the model's, where
    this can be had. With the parameter `sharing` it sees both.

    Yields its address, which the environment now has the token for.
    """
    from asyncflow.cluster.ray.connection import _ALONE
    from asyncflow.cluster.ray.host import write_private

    scratch = Path("/tmp") / f"asyncflow-ray-test-{os.getpid()}"
    write_private(scratch, {"token": secrets.token_hex(32).encode()})
    environment = {**os.environ, **_ALONE, "RAY_AUTH_TOKEN_PATH": str(scratch / "token")}
    started: list[subprocess.Popen[str]] = []

    def start(*command: str) -> str:
        process = subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(tmp_path / "node.log").open("a"),
            text=True,
        )
        started.append(process)
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        assert line, (tmp_path / "node.log").read_text()
        return line

    try:
        address = start(sys.executable, "-c", HEAD, str(scratch))
        hide = f"mount -t tmpfs none {tmp_path / 'runs'} && mount -t tmpfs none {MODEL} && exec "
        apart = ["unshare", "--mount", "sh", "-c", hide + '"$0" "$@"', sys.executable, "-c", NODE, address, "4"]
        (tmp_path / "runs").mkdir()
        assert start(*(apart if can_hide() and request.param == "apart" else apart[5:])) == "is there"
        for name in (*_ALONE, "RAY_AUTH_TOKEN_PATH"):
            monkeypatch.setenv(name, environment[name])
        yield address
    finally:
        everyone = [child for process in started for child in psutil.Process(process.pid).children(recursive=True)]
        for process in started:
            process.kill()
            process.communicate()
        for child in alive(everyone):
            child.kill()
        shutil.rmtree(scratch)


def test_nodes_that_share_no_files_give_the_same_bits_over_tls(
    small: Small, tmp_path: Path, nodes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_SECRET", "of the driver's shell")
    config = write_config(tmp_path, recipe(small, run={"steps": 4}))
    local = run_command("train", config, "run.name=local", seconds=SECONDS)
    assert local.returncode == 0, local.stderr
    units = ["queue.place=workers", "queue.num_units=2", *SPREAD_UNITS]
    arguments = ["train", config, "run.name=nodes", *on_nodes(nodes), *units]
    command = subprocess.Popen(command_line(*arguments), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    run_dirs = [tmp_path / "runs" / name for name in ("local", "nodes")]
    try:
        far = wait_for(lambda: [p for p in psutil.process_iter() if works_in(p, "asyncflow-node-")], command)
        wait_for(lambda: num_steps(run_dirs[1]) >= 1, command)
        far = [p for p in psutil.process_iter() if works_in(p, "asyncflow-node-")]
        names = sorted(words_of(p)[-2] for p in far)
        assert names[:2] == ["rollout/0", "rollout/1"]  # on the head there is no room for them
        assert len(names) == 3 and names[2].startswith("storage/")
        folder = Path(far[0].environ()["ASYNCFLOW_NODE_FILES"])
        assert (folder / "model" / "model.safetensors").exists() == can_hide()  # sent to it
        for process in far:
            assert "A_SECRET" not in process.environ()
            connections = process.net_connections("inet")
            assert connections and not [c for c in process.net_connections("unix") if "control.sock" in str(c.laddr) + str(c.raddr)]
        key = (run_dirs[1] / "key.pem").read_text().splitlines()[1]
        assert not [p for p in psutil.process_iter() if key in " ".join(words_of(p))]
        output, errors = command.communicate(timeout=patience(SECONDS))
    finally:
        command.kill()
    assert command.returncode == 0, output + errors
    assert learned(run_dirs[0]) == learned(run_dirs[1])
    spans = read_spans(run_dirs[1] / "spans.jsonl")
    assert {span.worker for span in spans} == {"rollout/0", "rollout/1", "trainer/0"}
    wait_for(lambda: not alive(far), seconds=20.0)
    wait_for(lambda: not folder.parent.exists(), seconds=20.0)
    assert not [*Path("/dev/shm").glob(f"{folder.parent.name}*")]


@pytest.mark.parametrize("nodes", ["sharing"], indirect=True)
def test_ranks_and_storage_units_on_two_nodes_give_the_same_bits_when_the_run_is_killed_and_resumed_too(
    small: Small, tmp_path: Path, nodes: str, background: Callable[..., Command]
) -> None:
    config = write_config(tmp_path, recipe(small, run={"steps": 4}, plan={"train": {"dp": 2}}, checkpoint={"every_steps": 2}))
    local = run_command("train", config, "run.name=local", seconds=SECONDS)
    assert local.returncode == 0, local.stderr
    apart = ["cluster.trainers=anywhere", "cluster.placement.trainer=STRICT_SPREAD", "cluster.resources.trainer.CPU=0.5"]
    units = ["queue.place=workers", "queue.num_units=2", *SPREAD_UNITS]
    command = background("train", config, "run.name=nodes", *on_nodes(nodes), *apart, *units)
    run_dirs = [tmp_path / "runs" / name for name in ("local", "nodes")]
    wait_for(lambda: num_steps(run_dirs[1]) >= 1, command)
    workers = {words_of(process)[-2]: process for process in psutil.process_iter() if works_in(process, str(run_dirs[1]))}
    far = {name for name, process in workers.items() if "ASYNCFLOW_NODE_FILES" in process.environ()}
    assert len(workers) == 6 and {name.partition("/")[0] for name in far} == {"trainer", "storage", "rollout"}
    assert "trainer/1" in far and "trainer/0" not in far and len(far & {"storage/0", "storage/1"}) == 1
    for rank in ("trainer/0", "trainer/1"):
        assert workers[rank].environ()["LOCAL_WORLD_SIZE"] == "1"
    wait_for(lambda: num_steps(run_dirs[1]) >= 2, command)
    command.kill()  # and whoever comes back goes on from the checkpoint of both nodes' ranks
    wait_for(lambda: not alive([*workers.values()]), seconds=SECONDS)
    resumed = run_command("train", config, "run.name=nodes", *on_nodes(nodes), *apart, *units, "--resume", seconds=SECONDS)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert learned(run_dirs[0]) == learned(run_dirs[1])
    models = [(run_dir / "model" / "model.safetensors").read_bytes() for run_dir in run_dirs]
    assert models[0] == models[1]
    shards = [sorted(path.name for path in run_dir.glob("checkpoints/step-000004/trainer/*")) for run_dir in run_dirs]
    assert shards[0] == shards[1] and len(shards[0]) >= 2


def test_a_cluster_without_room_is_named_while_the_run_waits(
    small: Small, tmp_path: Path, nodes: str, background: Callable[..., Command]
) -> None:
    """The driver's node has one CPU, which the trainer gets; without `queue.listen` the others may not be elsewhere."""
    run_dir, seconds = tmp_path / "runs" / "test", round(patience(10.0))
    on_ray = ["cluster=ray", f"cluster.address={nodes}", f"cluster.start_seconds={seconds}"]
    command = background("train", write_config(tmp_path, recipe(small)), *on_ray)
    words = r"the driver waits for room in the Ray cluster for rollout/0, rollout/1, since ([\d.]+) s"

    def says() -> re.Match[str] | None:
        said = run_command("why", run_dir).stdout if (run_dir / "now.json").exists() else ""
        found = re.search(rf"{words} \[at the latest until: start_seconds of the cluster, in ([\d.]+) s\]", said)
        return found if found is not None and float(found[1]) >= 3 else None

    since, left = (float(number) for number in wait_for(says, command).groups())
    assert seconds - 2 < since + left < seconds + 2  # of the whole wait, however often Ray is asked
    _, errors = command.communicate(timeout=patience(SECONDS))
    assert command.returncode == 2 and f"has had no room for 2 rollout worker(s) of {{'CPU': 1.0}} each for {seconds} s" in errors
    assert not [process for process in psutil.process_iter() if works_in(process, str(run_dir))]


@pytest.mark.skipif(not can_hide(), reason="no mounts of its own here")
def test_a_rank_that_would_not_see_the_runs_folder_is_refused(small: Small, tmp_path: Path, nodes: str) -> None:
    config = write_config(tmp_path, recipe(small, plan={"train": {"dp": 2}}))
    apart = ["cluster.trainers=anywhere", "cluster.placement.trainer=STRICT_SPREAD"]
    refused = run_command("train", config, *on_nodes(nodes), *apart, seconds=SECONDS)
    assert refused.returncode == 2, refused.stdout + refused.stderr
    assert "trainer/1 would be on a node that does not see" in refused.stderr and "share it" in refused.stderr
    assert not [process for process in psutil.process_iter() if works_in(process, str(tmp_path))]


SPREAD_UNITS = ("cluster.placement.storage=STRICT_SPREAD", "cluster.resources.storage.CPU=0.1", "cluster.resources.trainer.CPU=0.9")
"""One on each of the two nodes, beside a trainer on the first."""


def on_nodes(address: str) -> list[str]:
    listen = "tls:127.0.0.1:0"
    doors = [f"queue.listen={listen}", "weight_sync.name=network", f"weight_sync.listen={listen}"]
    return ["cluster=ray", f"cluster.address={address}", "cluster.start_seconds=180", *doors]


def works_in(process: psutil.Process, folder: str) -> bool:
    words = words_of(process)
    return "asyncflow.cluster.child" in words and folder in words[-1]


def test_tasks_that_share_devices_are_in_one_bundle_and_change_no_bit(small: Small, tmp_path: Path) -> None:
    tree = recipe(
        small,
        algorithm={"name": "grpo", "kl_coefficient": 0.1},
        train={"prompts_per_step": 8, "accumulate": "exact", "reference": "task"},
        plan={"train": {"dp": 2}, "reference": {"num_workers": 2}},
    )
    config = write_config(tmp_path, tree)
    for name, given in (("apart", []), ("shared", ["plan.shares={reference: train}"])):
        command = run_command("train", config, f"run.name={name}", "cluster=ray", *given)
        assert command.returncode == 0, command.stderr
    assert learned(tmp_path / "runs" / "apart") == learned(tmp_path / "runs" / "shared")
    spans = read_spans(tmp_path / "runs" / "shared" / "spans.jsonl")
    assert {span.worker for span in spans if span.task == "reference" and span.rows} == {"reference/0", "reference/1"}
