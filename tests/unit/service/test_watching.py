"""The live page, asked without a socket: who may read it, and what it tells."""

from __future__ import annotations

import asyncio
import html
import importlib.util
import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import httpx2
import msgspec
import numpy as np
import pytest
import yaml

from asyncflow.loops.transcript import EpisodeEnd
from asyncflow.run import situations
from asyncflow.service import watching
from asyncflow.service.app import AuditLog, GatePaths, make_app
from asyncflow.service.keys import KeyRing
from asyncflow.service.limits import Limits
from asyncflow.service.watching import PUBLIC, LocalOnly, Watched, WatchedRun, comparisons, watch_routes
from asyncflow.telemetry.advice import Advice
from asyncflow.telemetry.batches import BatchLog
from asyncflow.telemetry.certificate import Observed
from asyncflow.telemetry.hub import UnscoredResponse
from asyncflow.telemetry.run_reader import RunReader
from asyncflow.telemetry.sample_search import FAILED
from asyncflow.telemetry.situation import IN_ORDER, SeenWorker, Situation, write_situation
from asyncflow.telemetry.tokens import TrainedTokens
from asyncflow.types import Batch, Ragged
from tests.patience import patience, until

_path = Path(__file__).parents[1] / "telemetry" / "synthetic_run.py"
_spec = importlib.util.spec_from_file_location("synthetic_run", _path)
assert _spec is not None and _spec.loader is not None
synthetic_run = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(synthetic_run)


class Page:
    """A folder of runs, and clients of its page."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder / "runs"
        synthetic_run.write_run(self.folder / "one")
        synthetic_run.write_run(self.folder / "two", num_steps=4)
        self.keys = KeyRing(folder / "keys.json", [], time.time)
        self.secret = self.keys.add("page", "read").secret
        paths, audit = GatePaths(public=PUBLIC), AuditLog(None)
        self.app = make_app(title="t", description="", keys=self.keys, limits=Limits(), audit=audit, paths=paths)
        self.app.add_middleware(LocalOnly)
        self.watched = Watched(self.folder)
        routes = watch_routes(self.watched)
        self.app.include_router(routes)
        self.paths = {route.path for route in (*self.app.routes, *routes.routes) if hasattr(route, "path")}

    def client(self, *, has_key: bool = True, host: str = "127.0.0.1:8000", **headers: str) -> httpx2.AsyncClient:
        sent = {"Authorization": f"Bearer {self.secret}"} if has_key else {}
        transport = httpx2.ASGITransport(app=self.app)
        return httpx2.AsyncClient(transport=transport, base_url=f"http://{host}", headers={**sent, **headers})

    async def get(self, path: str, **params: Any) -> Any:
        async with self.client() as client:
            response = await client.get(f"/watch/api/{path}", params=params)
            assert response.status_code == 200, response.text
            return response.json()


@pytest.fixture
def page(tmp_path: Path) -> Page:
    return Page(tmp_path)


ALL_THAT_IS_ASKED = "run=one&run=two&start=0&end=1&row=1&step=1&group=1"


async def test_nothing_of_a_run_is_told_without_the_key(page: Page) -> None:
    private = page.paths - {*PUBLIC, "/health"}
    assert private >= {
        f"/watch/api/{name}" for name in ("runs", "events", "gantt", "charts", "samples", "tokens", "groups", "group", "compare")
    }
    for path in private:
        for headers in ({}, {"Authorization": "Bearer af-wrong"}):
            async with page.client(has_key=False, **headers) as client:
                assert (await client.get(f"{path}?{ALL_THAT_IS_ASKED}")).status_code == 401, path
        async with page.client() as client:
            assert (await client.get(path)).status_code in (200, 422), f"{path} is there for who has the key"


@pytest.mark.parametrize(
    ("host", "headers", "status"),
    [
        ("localhost:9000", {}, 200),
        ("[::1]:9000", {}, 200),
        ("127.0.0.1:8000", {"Origin": "http://127.0.0.1:8000", "Sec-Fetch-Site": "same-origin"}, 200),
        ("rebound.example", {}, 403),
        ("127.0.0.1.example", {}, 403),
        ("127.0.0.1:8000", {"Origin": "http://elsewhere.example"}, 403),
        ("127.0.0.1:8000", {"Origin": "http://127.0.0.1:8001"}, 403),
        ("127.0.0.1:8000", {"Origin": "null"}, 403),
        ("127.0.0.1:8000", {"Sec-Fetch-Site": "cross-site"}, 403),
        ("127.0.0.1:8000", {"Sec-Fetch-Site": "same-site"}, 403),
    ],
)
async def test_only_this_page_of_this_machine_is_answered(page: Page, host: str, headers: dict[str, str], status: int) -> None:
    async with page.client(host=host, **headers) as client:
        assert (await client.get("/watch/api/runs")).status_code == status
        assert (await client.get("/watch/")).status_code == status


async def test_the_page_itself_holds_nothing_of_a_run_and_no_script_from_elsewhere(page: Page) -> None:
    async with page.client(has_key=False) as client:
        for path in PUBLIC:
            response = await client.get(path)
            assert response.status_code == 200 and "tiny arithmetic" not in response.text
            policy = response.headers["content-security-policy"]
            assert "default-src 'none'; script-src 'self';" in policy and "frame-ancestors 'none'" in policy
            assert response.headers["referrer-policy"] == "no-referrer"
        shell = (await client.get("/watch/")).text
        assert "http" not in shell.replace("http-equiv", "")
        assert (await client.get("/watch/../keys.json")).status_code in (401, 404)


async def test_what_is_asked_for_is_told(page: Page) -> None:
    assert sorted(await page.get("runs")) == ["one", "two"]
    run = WatchedRun(page.folder / "one")
    first = await anext(run.changes())
    assert first["facts"]["samples"] == 6 and not first["facts"]["is_live"]
    assert "&lt;b&gt;run&lt;/b&gt;" in first["header"] and "<b>run</b>" not in first["header"]
    assert "A step of" in first["times"] and any("delayed" in line for line in first["advice"])
    async with page.client() as client:
        assert (await client.get("/watch/api/gantt?run=../one&start=0&end=1")).status_code == 404
        assert (await client.get("/watch/api/samples?run=one&least_reward=much")).status_code == 422


async def test_samples_are_chosen_by_each_way_in_which_they_end(page: Page) -> None:
    ends = [*get_args(EpisodeEnd), FAILED]
    unscored = UnscoredResponse("raised", "ValueError", "", "2 + 2?", "4", {})
    (page.folder / "one" / "unscored.jsonl").write_bytes(msgspec.json.encode(unscored) + b"\n")
    with (page.folder / "one" / "samples.jsonl").open("a") as file:
        for end in get_args(EpisodeEnd):
            file.write(json.dumps({"step": 0, "purpose": "train", "row": 99, "response": end, "finish_reason": end}) + "\n")
    async with page.client() as client:
        (offered,) = re.findall(r'<select name="ended">(.*?)</select>', (await client.get("/watch/")).text)
    assert re.findall(r"<option>(\w+)</option>", offered) == ends
    await anext(page.watched.run("one").changes())
    for end in ends:
        found = (await page.get("samples", run="one", ended=end))["samples"]
        assert found and {sample["finish_reason"] for sample in found} == {end}


async def test_advice_about_a_run_that_has_ended_says_what_the_planner_predicts(page: Page) -> None:
    asked = []

    async def predict(run: Path, change: str) -> str:
        asked.append((run.name, change))
        return "It would take 1.5 s."

    run = WatchedRun(page.folder / "one", predict)
    changes = run.changes()
    first = await anext(changes)
    assert not any("It would take" in line for line in first["advice"])
    then = await asyncio.wait_for(anext(changes), patience(20))
    assert [line for line in then["advice"] if line.endswith("It would take 1.5 s.") and "schedule=delayed" in line]
    assert asked.count(("one", "schedule=delayed")) == 1
    live = WatchedRun(page.folder / "one", predict)
    words = live._with_prediction(Advice("Wait less.", "schedule=bounded"), is_live=True)
    assert words == "Wait less." and len(asked) == len({*asked})


async def test_events_tell_what_is_new_of_a_run_that_goes_on(page: Page) -> None:
    run = WatchedRun(page.folder / "two")
    changes = run.changes()
    first = await anext(changes)
    assert first["facts"]["steps"].startswith("4 ")
    with (page.folder / "two" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 0.5}) + "\n")
    second = await asyncio.wait_for(anext(changes), patience(10))
    assert second["facts"]["steps"].startswith("5 ")
    assert "config" not in second  # it has not changed
    await changes.aclose()


def situation(**known: Any) -> Situation:
    """One in which the trainer waits."""
    worker = SeenWorker(name="trainer/0", task="wait", cause="rows", seconds=41.0, silence=0.1)
    told = {"run": "one", "time": time.time(), "pid": os.getpid(), "host": socket.gethostname(), "committed": 3, "steps": 9}
    return Situation(**{**told, "idle": 41.0, "workers": [worker], **known})


async def now(page: Page, situation: Situation) -> str:
    """What the page says of a run with this situation."""
    write_situation(page.folder / "one", situation)
    return html.unescape((await anext(WatchedRun(page.folder / "one").changes()))["now"])


@pytest.mark.parametrize(
    ("ended", "has_waits"), [(IN_ORDER, False), ("it was interrupted", True), ("the scorer <b> raised ValueError", True)]
)
async def test_the_page_says_why_a_run_has_ended(page: Page, ended: str, *, has_waits: bool) -> None:
    facts = {"schedule": "periodic", "promised_staleness": 0, "steps": 3, "planned_steps": 9, "rows_redelivered": 0}
    certificate = Observed().certificate(**facts, reward_failures={}, why_not_deterministic="")
    certificate.write(page.folder / "one")  # at every end there is one
    shown = await now(page, situation(ended=ended))
    assert f"3 of 9 steps are committed; it ended 0 s ago: {ended}. When it ended, nothing has moved for 41 s." in shown
    assert ("What waits for what" in shown) == has_waits
    assert "What its workers did last" in shown
    shown = await now(page, situation())
    assert "The run has ended, and has not said why." in shown and "What waits for what" in shown


async def test_the_page_says_of_the_driver_what_asyncflow_why_says(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    hour_ago = time.time() - 3600
    seen = {
        "3 of 9 steps are committed; nothing has moved for 41 s.": situation(),
        f"its driver (process {gone.pid}) is gone without a word: it was killed, or its disk was full, 60 min ago or later. "
        "At last nothing has moved for 41 s.": situation(pid=gone.pid, time=hour_ago),
        "as of 60 min ago, on elsewhere, nothing has moved for 41 s.": situation(host="elsewhere", time=hour_ago),
    }
    for words, each in seen.items():
        shown = await now(page, each)
        assert words in shown and "What waits for what" in shown
    monkeypatch.setattr(situations.shutil, "disk_usage", lambda path: SimpleNamespace(free=12_345))
    folder = page.folder / "one"
    assert f"is gone without a word: {folder} has no room (12 kB), 60 min ago or later." in await now(
        page, situation(pid=gone.pid, time=hour_ago)
    )
    monkeypatch.setattr(situations, "DRIVER_SECONDS", -1.0)
    silent = rf"its driver \(process {os.getpid()}, \w+\) has written nothing for \d+ s\. Before that nothing has moved for 41 s\."
    assert re.search(silent, await now(page, situation()))


async def test_a_large_file_is_read_between_two_looks_and_requests_get_in_between(
    page: Page, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watching, "_CATCH_UP_SECONDS", patience(60.0))
    run = WatchedRun(page.folder / "one")
    monkeypatch.setattr(run.reader, "refresh_spans", partial(run.reader.refresh_spans, 2048))
    changes = run.changes()
    shares = [(await anext(changes))["facts"]["share"] for _ in range(2)]
    rest = asyncio.create_task(anext(changes))
    await asyncio.sleep(0)
    between = await run.of(lambda reader: reader.share_of_spans_read)
    assert 0 < shares[0] < shares[1] <= between < 1 == (await rest)["facts"]["share"]


async def test_a_page_that_is_closed_lets_nobody_in_before_its_thread_is_done(page: Page) -> None:
    """Two threads in one reader would each read a part of what comes, and sum it wrongly."""
    run, has_entered, may_leave, left = WatchedRun(page.folder / "one"), threading.Event(), threading.Event(), list[str]()

    def look(reader: RunReader) -> None:
        has_entered.set()
        may_leave.wait(patience(60))
        left.append("closed")

    closed = asyncio.create_task(run.of(look))
    await until(has_entered.is_set)
    closed.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closed
    other = asyncio.create_task(run.of(lambda reader: list(left)))
    for _ in range(20):  # time enough for a thread of its own
        await asyncio.sleep(0.01)
    assert not other.done()
    may_leave.set()
    assert await other == ["closed"]


async def test_a_comparison_follows_its_runs(page: Page, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watching, "LOOK_SECONDS", 0.01)
    monkeypatch.setattr(watching, "_QUIET_SECONDS", 0.02)
    compared = comparisons({name: WatchedRun(page.folder / name) for name in ("one", "two")})
    first = await anext(compared)
    assert "2 runs compared" in first["html"] and first["charts"][0]["title"] == "Reward"
    assert await asyncio.wait_for(anext(compared), patience(20)) == {}  # nothing is new
    with (page.folder / "two" / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 4, "reward/mean": 0.987}) + "\n")
    async with asyncio.timeout(patience(20)):
        second = await anext(filled async for filled in compared if filled)
    assert any(0.987 in trace["y"] for trace in second["charts"][0]["traces"]) and second["html"] != first["html"]
    await compared.aclose()
    async with page.client() as client:
        assert (await client.get("/watch/api/compare", params={"run": ["one", "three"]})).status_code == 404
        assert (await client.get("/watch/api/compare", params={"run": ["one"]})).status_code == 422


async def test_a_part_of_the_chart(page: Page) -> None:
    await page.watched.run("one").of(lambda reader: reader.refresh_spans())
    coarse = await page.get("gantt", run="one", start=0.0, end=40.0, most=100)
    assert coarse["levels"][0]["resolution"] > 0 and len(coarse["levels"][0]["start"]) <= 100
    part = await page.get("gantt", run="one", start=5.0, end=10.0, most=200)
    (level,) = part["levels"]
    assert part["lanes"] == ["rollout/0", "rollout/1", "trainer/0", "driver"]
    assert 0 < len(level["start"]) <= 200
    assert all(start < 10 and start + seconds > 5 for start, seconds in zip(level["start"], level["seconds"], strict=True))


async def test_a_sample_is_told_as_it_was_trained(page: Page) -> None:
    rows = [
        TrainedTokens(12, 3, epoch, 4, [7, 8], [-0.5, None], [1, 0], [3, 4], {"ratio": [1.0, 1.25], "clipped": [0.0, 1.0]})
        for epoch in range(2)
    ]
    other = msgspec.structs.replace(rows[0], row=112)
    lines = [msgspec.json.encode(row) for row in (other, *rows)]
    (page.folder / "one" / "tokens.jsonl").write_bytes(b"".join(line + b"\n" for line in lines) + lines[1][:30])  # half-written
    first, second = await page.get("tokens", run="one", row=12)
    assert (first["step"], first["epoch"], second["epoch"], first["num_more"]) == (3, 0, 1, 2)
    assert first["tokens"] == [
        {"text": "7 ", "logprob": -0.5, "mask": 1, "version": 3, "ratio": 1.0, "clipped": 0.0},
        {"text": "8 ", "logprob": None, "mask": 0, "version": 4, "ratio": 1.25, "clipped": 1.0},
    ]
    assert await page.get("tokens", run="one", row=2) == await page.get("tokens", run="two", row=12) == []


class Engine:
    async def fingerprint(self) -> dict[str, str]:
        return {}


def ragged(rows: list[list[float]], dtype: str) -> Ragged:
    return Ragged.from_arrays([np.array(row, dtype) for row in rows], dtype)


async def test_a_group_is_told_token_by_token_with_its_advantages(page: Page) -> None:
    folder = page.folder / "one"
    config = {"model": {"path": "m"}, "data": {"path": "d"}, "rollout": {"group_size": 2}, "reward": {"scorer": "exact_match"}}
    (folder / "config.yaml").write_text(yaml.safe_dump(config))
    columns = {
        "prompt_ids": ragged([[5, 6]], "int64"),
        "example": ragged([[]], "uint8"),
        "temperature": np.ones(1, np.float32),
        "response_ids": ragged([[7, 8], [9]], "int64"),
        "rollout_logprobs": ragged([[-0.5, -1.5], [-0.25]], "float32"),
        "loss_mask": ragged([[1, 0], [1]], "uint8"),
        "version_spans": ragged([[0, 3, 1, 4], [0, 3]], "int64"),
        "truncated": np.array([0, 1], np.uint8),
        "reward": np.array([1.0, 0.0], np.float32),
    }
    log = BatchLog(folder, 1, rank=0, first=0)
    log.group(Batch(np.array([6, 7]), np.array([3]), columns), [], np.zeros(2, np.float32))
    await log.step(2, Engine())
    assert await page.get("groups", run="one", step=2) == [{"group": 3, "size": 2, "mean": 0.5}]
    told = await page.get("group", run="one", step=2, group=3)
    one, other = told["rows"]
    assert told["prompt"] == "5 6"  # there is no tokenizer
    assert one["reward"] == 1.0 and one["advantage"] > 0 > other["advantage"] and other["truncated"]
    assert one["tokens"] == [
        {"text": "7 ", "logprob": -0.5, "mask": 1, "version": 3},
        {"text": "8 ", "logprob": -1.5, "mask": 0, "version": 4},
    ]
    async with page.client() as client:
        assert (await client.get("/watch/api/groups?run=one&step=9")).json() == []
        assert (await client.get("/watch/api/group?run=one&step=2&group=9")).status_code == 400
    trained = [TrainedTokens(6, 2, 0, 2, advantage=0.25), TrainedTokens(5, 2, 0, 2, advantage=9.0)]
    (folder / "tokens.jsonl").write_bytes(b"".join(msgspec.json.encode(each) + b"\n" for each in trained))
    assert await page.get("group", run="one", step=2, group=3) == told  # as the algorithm computes them
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"algorithm": f"{folder / 'mine.py'}:Mine"}))
    (folder / "mine.py").write_text("raise AssertionError('code of a run is never executed')")
    mine = await page.get("group", run="one", step=2, group=3)
    assert [row["advantage"] for row in mine["rows"]] == [0.25, None]  # of the rows that were sampled
    assert mine["rows"][0] | {"advantage": one["advantage"]} == one
