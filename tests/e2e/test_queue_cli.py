"""`asyncflow queue`, as somebody uses it who wants the transfer queue alone; and a run's second door."""

from __future__ import annotations

import asyncio
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.loader.dataloader import StreamDataLoader
from asyncflow.transport import ConnectionLost, Credentials
from asyncflow.types import Batch, GroupMeta, Interval, Ragged
from tests.e2e.commands import run_command, write_config
from tests.forked import Command
from tests.patience import patience

SCHEMA = """
group_size: 2
columns:
  - {name: prompt_ids, dtype: int64, ragged: true, per: group}
  - {name: response_ids, dtype: int64, ragged: true, counts_tokens: true}
tasks:
  - {name: rollout, reads: [prompt_ids], writes: [response_ids], whole_groups: false}
  - {name: train, reads: [prompt_ids, response_ids], sampler: whole_groups}
"""


@contextmanager
def serving(*arguments: object, doors: int = 1, by: signal.Signals = signal.SIGINT) -> Iterator[list[str]]:
    """`asyncflow queue ARGUMENTS` until the end of the block; gives the addresses at which it says that it listens.

    It is started as a shell starts what is in the background: SIGINT is ignored.
    """
    process = Command("queue", *map(str, arguments), ignores=signal.SIGINT)
    try:
        said = [process.stdout.readline().strip() for _ in range(doors)]
        yield [line.removeprefix("listening at ") for line in said]
    finally:
        process.send_signal(by)
        try:
            assert process.wait(patience(60)) == 0
        finally:
            process.kill()


def asked(*arguments: object) -> str:
    done = run_command("queue", *map(str, arguments))
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture
def schema(tmp_path: Path) -> Path:
    path = tmp_path / "schema.yaml"
    path.write_text(SCHEMA)
    return path


async def put(client: TransferQueueClient, *groups: int) -> None:
    prompts = Ragged.from_arrays([np.arange(group + 1) for group in groups], "int64")
    metas = [GroupMeta(group, 2, 0, Interval(0, 0)) for group in groups]
    await client.put(metas, Batch(np.empty(0, np.int64), np.array(groups), {"prompt_ids": prompts}))


async def answer(client: TransferQueueClient) -> None:
    leased = await client.lease("rollout")
    assert leased is not None
    rows = np.array(leased.lease.indices)
    outputs = {"response_ids": Ragged.from_arrays([np.arange(row) for row in rows], "int64")}
    assert (await client.complete(leased.lease, Batch(rows, leased.batch.groups, outputs))).all()


def loaded(address: str, key: Path) -> list[int]:
    """The rows that a torch loader finds, to the end of the stream."""
    with StreamDataLoader(address, "train", groups=1, credentials=key, timeout_seconds=20) as loader:
        return [row for _, indices in loader for row in indices.tolist()]


async def test_a_queue_is_served_looked_into_saved_and_restored(schema: Path, tmp_path: Path) -> None:
    address, saved = f"unix:{tmp_path / 'q.sock'}", tmp_path / "saved"
    with serving("serve", schema, "--address", address, "--snapshot-dir", saved) as [at]:
        assert at == address
        client = await TransferQueueClient.connect(address, "test")
        await put(client, 0, 1)
        await answer(client)
        text = await asyncio.to_thread(asked, "metrics", address)
        assert 'asyncflow_queue_rows{state="ready",task="train"} 2.0' in text
        assert (await asyncio.to_thread(asked, "snapshot", address, "first")).startswith("4 rows, ")
        await client.disconnect()
    again = ("serve", schema, "--address", address, "--snapshot-dir", saved, "--restore", "first")
    with serving(*again, doors=2, by=signal.SIGTERM) as [restored, _]:
        assert restored == "4 rows restored"
        client = await TransferQueueClient.connect(address, "test")
        leased = await client.lease("train")
        assert leased is not None and leased.batch.ragged("response_ids").lengths.tolist() == [0, 1]
        await client.disconnect()


async def test_units_and_controllers_join_over_tls_and_nobody_else(schema: Path, tmp_path: Path) -> None:
    key, other = tmp_path / "key.pem", tmp_path / "other.pem"
    asked("key", key)
    asked("key", other)
    assert key.stat().st_mode & 0o777 == 0o600
    with ExitStack() as stack:
        parts = ("serve", schema, "--address", "tls:127.0.0.1:0", "--key", key, "--units", 0, "--no-controllers")
        [hub] = stack.enter_context(serving(*parts))
        for number in (0, 1):
            stack.enter_context(serving("unit", hub, "--number", number, "--address", "tls:127.0.0.1:0", "--key", key))
        for task in ("rollout", "train"):
            stack.enter_context(serving("controller", hub, task, "--address", "tls:127.0.0.1:0", "--key", key))
        credentials = Credentials.load(key)
        client = await TransferQueueClient.connect(hub, "test", credentials=credentials)
        await asyncio.wait_for(client.wait_for_units(2), patience(20))
        await asyncio.wait_for(put(client, 0, 1, 2), patience(20))
        for _ in range(3):
            await asyncio.wait_for(answer(client), patience(20))
        leased = await asyncio.wait_for(client.lease("train", Want(groups=3)), patience(20))
        assert leased is not None and sorted(leased.lease.units) == [0, 0, 1]
        await client.complete_marks([leased.lease])
        await put(client, 3)
        await answer(client)
        await client.close("train")
        assert await asyncio.to_thread(loaded, hub, key) == [6, 7]
        with pytest.raises(ConnectionLost):
            await TransferQueueClient.connect(hub, "stranger", credentials=Credentials.load(other))
        refused = await asyncio.to_thread(run_command, "queue", "metrics", hub)
        assert refused.returncode == 2 and "needs credentials" in refused.stderr
        await client.disconnect()


def test_what_is_wrong_is_one_sentence(schema: Path, tmp_path: Path) -> None:
    wrong = {
        "reads: [prompt_ids]": ("reads: [promt_ids]", "column 'promt_ids' is not declared"),
        "dtype: int64": ("dtipe: int64", "columns[0] has no 'dtipe': did you mean 'dtype'?"),
        "whole_groups: false": ("whole: false", "tasks[0] has no 'whole'"),
        "group_size: 2": ("group_size: two", "Expected `int`, got `str` - at `$.group_size`"),
    }
    for text, (mistake, log) in wrong.items():
        schema.write_text(SCHEMA.replace(text, mistake, 1))
        done = run_command("queue", "serve", schema, "--address", f"unix:{tmp_path}/s")
        assert done.returncode == 2 and done.stderr.count("\n") == 1 and log in done.stderr, done.stderr


def test_a_run_opens_a_second_door_with_its_own_key(small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    config = write_config(tmp_path, small(run={"steps": 500}, queue={"listen": "tls:127.0.0.1:0"}))
    process = Command("train", config)
    try:
        line = next(line for line in process.stdout if "the queue listens at" in line)
        found = re.search(r"(tls:\S+), with (\S+)", line)
        assert found is not None
        hub, key = found[1], found[2]
        deadline = time.monotonic() + patience(300)
        while "asyncflow_queue_rows" not in (text := asked("metrics", hub, "--key", key)) and time.monotonic() < deadline:
            time.sleep(0.2)
        assert 'task="rollout"' in text
    finally:
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=patience(300))
