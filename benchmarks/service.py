"""The service: requests a second, bulk experience, and runs that are generated for or trained from outside.

    python benchmarks/service.py [--parts requests bulk trainer generator kills fuzz] [--dir FOLDER] [--json FILE]

`requests`: one server process and one client process, 32 requests at a time; a bare FastAPI echo under uvicorn, asked
by the same library in the same run, is what it is compared with. Put to received: from a prompt that is put until a generator that
waits has it. `bulk`: a step of 50 MB of experience, got as msgpack over HTTP, and its columns by the queue's client. `trainer` and
`generator`: the quickstart with tests/e2e/outside_trainer.py and tests/e2e/outside_generator.py. `kills`: 20 deaths of server and
clients. `fuzz`: requests of every schema.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import yaml
from figures import Figure, finish, parser, runs_folder

from asyncflow.client import AsyncClient, Client, ResponseData
from asyncflow.run_dir import control_socket
from asyncflow.transfer_queue.client import TransferQueueClient

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "recipes" / "models" / "tiny-arithmetic"
AT_ONCE = 32
SECONDS = 5.0
ECHO = """
import uvicorn
from fastapi import FastAPI
from pydantic import BaseModel

class Body(BaseModel):
    rows: list[dict]

app = FastAPI()

@app.post("/echo")
async def echo(body: Body) -> dict[str, int]:
    return {"rows": len(body.rows)}

uvicorn.run(app, uds=PATH, http="httptools", log_level="error", access_log=False)
"""


@contextmanager
def served(folder: Path, name: str, tree: dict[str, Any]) -> Iterator[tuple[str, Path]]:
    """Address and key file of `asyncflow serve` of a run."""
    config = folder / f"{name}.yaml"
    run = {"name": name, "dir": str(folder), "overwrite": True, **tree.pop("run", {})}
    config.write_text(yaml.safe_dump({"run": run, "telemetry": {"trackers": []}, **tree}))
    command = [sys.executable, "-m", "asyncflow", "serve", str(config), "--listen", f"unix:{folder / name}.sock"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        while "serving" not in (line := process.stdout.readline()):
            assert line, "the server did not start"
        yield f"unix:{folder / name}.sock", folder / f"{name}.service" / "keys.json"
    finally:
        process.terminate()
        process.wait(60)


@contextmanager
def echo(folder: Path) -> Iterator[str]:
    """Path of the unix socket of a bare FastAPI echo."""
    path = str(folder / "echo.sock")
    process = subprocess.Popen([sys.executable, "-c", ECHO.replace("PATH", repr(path))])
    try:
        while not Path(path).exists():
            assert process.poll() is None, "the echo did not start"
            time.sleep(0.05)
        time.sleep(0.3)
        yield path
    finally:
        process.terminate()
        process.wait(10)


async def rate(ask: Callable[[], Awaitable[Any]], at_once: int = AT_ONCE, seconds: float = SECONDS) -> float:
    """Requests a second, so many at a time."""
    count, end = 0, time.monotonic() + seconds

    async def go_on() -> None:
        nonlocal count
        while time.monotonic() < end:
            await ask()
            count += 1

    await asyncio.gather(*(go_on() for _ in range(at_once)))
    return count / seconds


async def times(ask: Callable[[], Awaitable[Any]], count: int = 300) -> list[float]:
    """Seconds of requests, one after another."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        await ask()
        taken.append(time.perf_counter() - began)
    return taken


Measure = Callable[[AsyncClient, Callable[[], Awaitable[None]]], Awaitable[list[tuple[float, float]]]]
ROW = {"prompt": "7 + 5", "answer": "12"}


def requests(folder: Path) -> list[Figure]:
    """Small requests, and the way from a put prompt to a generator; both beside a bare echo in turn."""

    def tree(prompts_per_step: int) -> dict[str, Any]:
        return {
            "run": {"steps": 100_000},
            "model": {"path": str(MODEL), "max_context_tokens": 128},
            "rollout": {"num_workers": 0, "group_size": 2, "max_new_tokens": 8},
            "train": {"engine": "outside", "prompts_per_step": prompts_per_step},
            "schedule": {"name": "bounded", "max_staleness": 1000},
        }

    async def puts(client: AsyncClient, ask_echo: Callable[[], Awaitable[None]]) -> list[tuple[float, float]]:
        return [(await rate(lambda: client.put_prompts_data([ROW])), await rate(ask_echo)) for _ in range(3)]

    async def ways(client: AsyncClient, ask_echo: Callable[[], Awaitable[None]]) -> list[tuple[float, float]]:
        worker = await client.join_generators()

        async def put_to_received() -> float:
            waiting = asyncio.create_task(worker.get_prompts_data(1))
            await asyncio.sleep(0.002)  # it waits by then
            began = time.perf_counter()
            await client.put_prompts_data([ROW])
            while not (prompts := (await waiting).prompts):
                waiting = asyncio.create_task(worker.get_prompts_data(1))
            seconds = time.perf_counter() - began
            rows = [row for prompt in prompts for row in prompt.rows]
            answers = [ResponseData(row=row, token_ids=[7], logprobs=[-1.0], finish_reason="length") for row in rows]
            await worker.put_experience_data(answers)  # or it would get no other: its share of a step is one prompt
            return seconds

        return [(await put_to_received(), (await times(ask_echo, 1))[0]) for _ in range(200)]

    async def measure(address: str, key_file: Path, bare: str, what: Measure) -> list[tuple[float, float]]:
        async with (
            AsyncClient.connect(address, key_file=key_file) as client,
            aiohttp.ClientSession("http://echo", connector=aiohttp.UnixConnector(bare)) as plain,
        ):

            async def ask_echo() -> None:
                async with plain.post("/echo", json={"rows": [ROW]}) as answer:
                    answer.raise_for_status()
                    await answer.read()

            await client.init_engines()
            await client.allow(100_000)
            return await what(client, ask_echo)

    seen: dict[str, tuple[float, float]] = {}
    with echo(folder) as bare:
        for name, size, what in (("puts", 64, puts), ("ways", 1, ways)):
            with served(folder, name, tree(size)) as (address, key_file):
                pairs = asyncio.run(measure(address, key_file, bare, what))
            seen[name] = statistics.median(ours for ours, _ in pairs), statistics.median(theirs for _, theirs in pairs)
    (ours, theirs), (way, answer) = seen["puts"], seen["ways"]
    return [
        Figure("small requests by the client", ours, "/s", ">= 2000"),
        Figure("  of a bare FastAPI echo by the same library", theirs, "/s"),
        Figure("put to received, p50", 1e3 * way, "ms"),
        Figure("  bare FastAPI echo, p50", 1e3 * answer, "ms"),
        Figure("  put to received / echo, p50", way / answer, "times", "<= 3"),
    ]


def bulk(folder: Path) -> list[Figure]:
    """A step of 50 MB of experience, over HTTP and through the queue."""
    prompts, group, length = 32, 16, 7_500
    model = folder / "bulk-model"
    shutil.copytree(MODEL, model)
    fields = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({**fields, "max_position_embeddings": 1 << 20}))
    tree: dict[str, Any] = {
        "run": {"steps": 1},
        "model": {"path": str(model), "max_context_tokens": length + 64},
        "reward": {"scorer": "exact_match"},
        "rollout": {"num_workers": 0, "group_size": group, "max_new_tokens": length},
        "train": {"engine": "outside", "prompts_per_step": prompts},
    }
    with served(folder, "bulk", tree) as (address, key_file), Client.connect(address, key_file=key_file) as client:
        client.init_engines()
        client.put_prompts_data([{"prompt": f"{n} coins", "answer": "1"} for n in range(prompts)])
        worker = client.join_generators(num_slots=4096)
        done, ids, logprobs = 0, [7] * length, [-1.0] * length
        while done < prompts * group:
            for prompt in worker.get_prompts_data(1).prompts:
                given = [ResponseData(row=r, token_ids=ids, logprobs=logprobs, finish_reason="length") for r in prompt.rows]
                done += len(worker.put_experience_data(given))
        trainer = client.join_trainers()
        groups: list[Any] = []
        began = time.perf_counter()
        while len(groups) < prompts:
            groups += trainer.get_experience_data(groups=4).groups
        http = time.perf_counter() - began
        rows = np.concatenate([each.indices for each in groups])
        num_bytes = sum(
            ids.nbytes + mask.nbytes + logprobs.nbytes
            for each in groups
            for ids, mask, logprobs in zip(each.response_ids, each.loss_mask, each.rollout_logprobs, strict=True)
        )

        async def read() -> tuple[float, int]:
            queue = await TransferQueueClient.connect(f"unix:{control_socket(folder / 'bulk')}", "bulk")
            began = time.perf_counter()
            batches = await queue.read({0: np.sort(rows)}, ["response_ids", "loss_mask", "rollout_logprobs"])
            seconds = time.perf_counter() - began
            total = sum(values.nbytes for batch in batches for values in batch.columns.values())
            await queue.disconnect()
            return seconds, total

        queue_seconds, queue_bytes = asyncio.run(read())
    return [
        Figure("bulk experience, token ids, masks and log-probs", num_bytes / 1e6, "MB", ">= 45"),
        Figure("  over HTTP as msgpack, 4 groups a request", num_bytes / 1e6 / http, "MB/s"),
        Figure("  through the queue's client", queue_bytes / 1e6 / queue_seconds, "MB/s"),
    ]


def quickstart(folder: Path, name: str, changes: dict[str, Any], program: str, *arguments: str) -> list[Figure]:
    """The quickstart with a program outside."""
    tree = yaml.safe_load((ROOT / "recipes" / "quickstart.yaml").read_text())
    steps = tree["run"]["steps"]
    for section, values in changes.items():
        tree[section] = {**tree.get(section, {}), **values}
    tree["run"] = {"steps": steps, "seed": 0}
    with served(folder, name, tree) as (address, key_file), Client.connect(address, key_file=key_file) as client:
        client.init_engines()
        client.allow(steps)
        began = time.monotonic()
        command = [sys.executable, str(ROOT / "tests" / "e2e" / program), address, str(key_file), *arguments]
        outside = subprocess.Popen(command, cwd=ROOT)
        evaluations = folder / name / "eval.jsonl"
        while not (rows := evaluations.exists() and evaluations.read_text().splitlines()) or json.loads(rows[-1])["step"] < steps:
            assert outside.poll() in (None, 0), "the program outside has failed"
            time.sleep(0.5)
        seconds = time.monotonic() - began
        client.stop()
        outside.terminate()
        outside.wait(30)
    lines = [json.loads(line) for line in evaluations.read_text().splitlines()]
    metrics = [json.loads(line) for line in (folder / name / "metrics.jsonl").read_text().splitlines()]
    certificate = json.loads((folder / name / "certificate.json").read_text())
    print(f"{name}: {certificate.get('line', '')}")
    return [
        Figure(f"{name}: held-out accuracy before", lines[0]["accuracy/sampled"], ""),
        Figure(f"{name}: held-out accuracy after", lines[-1]["accuracy/sampled"], "", ">= 0.90"),
        Figure(f"{name}: largest staleness", max(row["staleness/max"] for row in metrics), "versions", "<= 0"),
        Figure(f"{name}: seconds", seconds, "s"),
    ]


def trainer(folder: Path) -> list[Figure]:
    """The quickstart, trained by a plain PyTorch loop outside."""
    return quickstart(folder, "trainer", {"train": {"engine": "outside"}}, "outside_trainer.py", "40")


def generator(folder: Path) -> list[Figure]:
    """The quickstart, generated by transformers outside."""
    changes = {"rollout": {"num_workers": 0}, "eval": {"greedy": False, "num_prompts": 128}}
    return quickstart(folder, "generator", changes, "outside_generator.py")


def of_tests(test: str) -> Callable[[Path], list[Figure]]:
    """A test that has a long form: it is a figure whether it passes."""

    def run(folder: Path) -> list[Figure]:
        command = [sys.executable, "-m", "pytest", "-q", f"tests/e2e/{test}"]
        began = time.monotonic()
        done = subprocess.run(command, cwd=ROOT, env={**os.environ, "ASYNCFLOW_TESTS": "deep"})
        seconds = time.monotonic() - began
        return [Figure(f"{test} passes", float(done.returncode == 0), "", ">= 1"), Figure(f"{test}: seconds", seconds, "s")]

    return run


PARTS: dict[str, Callable[[Path], list[Figure]]] = {
    "requests": requests,
    "bulk": bulk,
    "trainer": trainer,
    "generator": generator,
    "kills": of_tests("test_service_kills.py"),
    "fuzz": of_tests("test_service_fuzz.py"),
}


def main() -> int:
    arguments = parser(__doc__, has_runs=True)
    arguments.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    given = arguments.parse_args()
    figures: list[Figure] = []
    with runs_folder(given.dir) as folder:
        for part in given.parts:
            figures += PARTS[part](folder)
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
