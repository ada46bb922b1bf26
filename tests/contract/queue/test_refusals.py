"""What does not fit is refused where it is made."""

from __future__ import annotations

import numpy as np
import pytest

from asyncflow.transfer_queue.batches import WireBatch
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.types import Batch, Values
from tests.builders import meta
from tests.contract.queue.house import (
    leased,
    outputs,
    over,
    put,
)


def of(rows: list[int], groups: list[int], **columns: Values) -> Batch:
    return Batch(np.array(rows, np.int64), np.array(groups), columns)


def floats(*shape: int) -> np.ndarray:
    return np.ones(shape, np.float32)


MISFITS = {
    "dtype": (of([1], [0], reward=np.ones(1)), r"row 1, column 'reward': declared float32, written float64"),
    "rank": (of([1], [0], reward=floats(1, 1)), r"row 1, column 'reward': declared entries of shape \(\)"),
    "shape": (of([0], [0], image=np.ones((1, 3, 2), np.uint8)), r"row 0, column 'image': declared entries of shape \(2, 3\)"),
    "length": (of([0, 1], [0], reward=floats(1)), r"row 1, column 'reward': 1 entries for 2 rows"),
    "of groups": (of([0, 1], [0], temperature=floats(2)), r"group .* column 'temperature': 2 entries for 1 groups"),
    "ragged": (of([0], [0], ids=np.ones(1, np.int64)), r"row 0, column 'ids': declared ragged, written dense"),
    "unknown": (of([0], [0], idz=np.ones(1)), r"column 'idz' is not declared; declared are .*ids"),
    "twice": (of([1, 1], [0], reward=floats(2)), r"row 1 is in the batch twice"),
    "strange": (of([9], [1], reward=floats(1)), r"the batch has rows of group 2, which is not one of its groups"),
    "not admitted": (of([9], [2], reward=floats(1)), r"row 9 is none: group 2 is not put with it"),
    "a group not admitted": (of([], [2], temperature=floats(1)), r"group 2 has columns in the batch and is not admitted with it"),
}


@over("process-1", "apart-3")
async def test_a_put_that_does_not_fit_is_refused_at_the_client_naming_row_and_column(
    client: TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "_unit", lambda number: pytest.fail("something was sent"))
    for batch, message in MISFITS.values():
        with pytest.raises(ValueError, match=message):
            await client.put([meta(0), meta(1)], batch)
    with pytest.raises(ValueError, match="group 1 has 5 rows"):
        await client.put([meta(1, size=5)], Batch(np.empty(0, np.int64), np.empty(0, np.int64), {}))
    monkeypatch.undo()
    assert (await client.status())[1][0].rows == 0


BY_ITS_UNIT = ("dtype", "rank", "shape", "length", "of groups", "ragged", "unknown", "twice", "strange")


@over("process-1", "apart-3")
async def test_a_unit_refuses_what_does_not_fit_by_itself(client: TransferQueueClient) -> None:
    """Whatever a client has let pass: what comes to a unit was sent by somebody."""
    await put(client, 0)
    lease = (await leased(client)).lease
    unit = client._unit(lease.units[0])
    for name in BY_ITS_UNIT:
        batch, message = MISFITS[name]
        with pytest.raises(ValueError, match=message):
            await unit.put([], WireBatch.of(batch), 0)
        with pytest.raises(ValueError, match=message):
            await unit.complete(lease.token, WireBatch.of(batch))
    with pytest.raises(ValueError, match="task 'rollout' completes with ids, reward, not with reward"):
        await unit.complete(lease.token, WireBatch.of(of([1], [0], reward=floats(1))))
    assert (await client.complete(lease, outputs(0, 1))).all()


async def test_outputs_that_do_not_fit_are_refused_at_the_client_and_the_lease_goes_on(
    client: TransferQueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    await put(client, 0)
    lease = (await leased(client)).lease
    with monkeypatch.context() as patched:
        patched.setattr(client, "_unit", lambda number: pytest.fail("something was sent"))
        with pytest.raises(ValueError, match="row 1, column 'reward': declared float32"):
            await client.complete(lease, Batch(np.array([1]), np.array([0]), {"reward": np.ones(1)}))
        with pytest.raises(ValueError, match="row 5 is not one of lease 1 of task 'rollout'"):
            await client.complete(lease, outputs(5))
    assert (await client.complete(lease, outputs(0, 1))).all()


async def test_unknown_tasks_and_columns_are_refused_by_name(client: TransferQueueClient) -> None:
    with pytest.raises(ValueError, match="there is no task 'trian'; there are rollout, train, eval"):
        await client.lease("trian")
    with pytest.raises(ValueError, match="'idz' is not declared"):
        await client.lease("train", columns=["idz"])
    for call in (client.end_partition("x", 0), client.close("x"), client.withdraw("x")):
        with pytest.raises(ValueError, match="there is no task 'x'"):
            await call
    await put(client, 0)
    with pytest.raises(LookupError, match="row 1 has no column 'ids'"):
        await client.read({0: np.array([1])}, ["ids"])
