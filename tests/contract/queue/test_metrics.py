"""What the queue says of itself."""

from __future__ import annotations

from prometheus_client.parser import text_string_to_metric_families

from tests.contract.queue.house import (
    Open,
    leased,
    outputs,
    over,
    parked,
    put,
    room,
    stored_bytes,
    within,
)


@over("process-1", "units-1", "apart-tls-1")
async def test_the_metrics_are_prometheus_text_with_the_right_numbers(open_house: Open) -> None:
    house = await open_house(capacity_rows=8)
    client = await house.connect("w")
    await put(client, 0, 1, 2, 3, row_bytes=100)
    lease = (await leased(client, groups=3)).lease
    await client.complete(lease, outputs(*lease.rows[0], lease.rows[1][0]))
    await client.fail(lease, [lease.rows[1][1]], "broken")
    again = await leased(client, rows=1)
    await client.fail(again.lease, again.lease.indices, "broken")
    await client.filter([lease.rows[2][1]], "too easy")
    parked_lease, parked_put = await parked(client.lease("eval")), await parked(put(client, 4))
    await client.drop([lease.rows[0][0]])
    text = await within(house.queue.metrics())
    found: dict[tuple[str, ...], float] = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.type in ("gauge", "counter")
        for sample in family.samples:
            labels = (sample.labels[label] for label in ("task", "unit", "state") if label in sample.labels)
            found[(sample.name.removeprefix("asyncflow_queue_"), *labels)] = sample.value
    states = ("waiting", "ready", "leased", "done", "dead", "filtered")
    assert [found["rows", "rollout", state] for state in states] == [0, 2, 1, 2, 1, 1]
    assert [found["rows", "train", state] for state in states] == [3, 2, 0, 0, 1, 1]
    totals = ("done_total", "dead_total", "filtered_total", "redelivered_total")
    assert [found[total, "rollout"] for total in totals] == [3, 1, 1, 1]
    assert (found["parked_requests", "eval"], found["parked_requests", "train"]) == (1, 0)
    assert 0 < found["oldest_ready_seconds", "rollout"] < 5
    assert (found["unit_rows_held", "0"], found["unit_reserved_rows", "0"], found["unit_admissions_waiting", "0"]) == (7, 7, 1)
    assert found["unit_stored_bytes", "0"] == (await stored_bytes(client))
    assert found["unit_reserved_bytes", "0"] == 7 * (100 + 10)  # 80 bytes of prompts on 8 rows
    parked_lease.cancel()
    await client.drop([lease.rows[0][1]])
    await within(parked_put)
    waited = (await room(client)).waited_seconds
    assert f'asyncflow_queue_unit_admission_wait_seconds_total{{unit="0"}} {waited}' in await house.queue.metrics()
