"""The queue's state as metrics."""

from __future__ import annotations

from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from asyncflow.transfer_queue.capacity import CapacityState
from asyncflow.transfer_queue.controller import TaskStatus
from asyncflow.transfer_queue.metrics import RUN_METRICS, STATES, TOTALS, prometheus_text, run_metrics
from asyncflow.transfer_queue.unit import UnitStatus


def task(first: int) -> TaskStatus:
    """Every number another one."""
    names = [*STATES, "done_total", "dead_total", "filtered_total", "redelivered", "expired"]
    return TaskStatus({name: first + i for i, name in enumerate(names)}, first + 0.5, first + 20, {"w": 3}, {7: "broken"}, [4, 5])


def unit(first: int) -> UnitStatus:
    return UnitStatus(first, first + 1, [], CapacityState(first + 2, first + 3, first + 4, first + 5.5, first + 6.5))


TASKS, UNITS = {"rollout": task(100), 'odd "name"\\\n': task(200)}, {0: unit(1000), 3: unit(2000)}


def samples(text: str) -> dict[tuple[Any, ...], float]:
    found = {}
    for family in text_string_to_metric_families(text):
        assert family.documentation and family.name.startswith("asyncflow_queue_"), family
        for sample in family.samples:
            key = (
                sample.name.removeprefix("asyncflow_queue_"),
                *(sample.labels[k] for k in ("task", "unit", "state") if k in sample.labels),
            )
            assert key not in found
            found[key] = sample.value
    return found


def test_prometheus_finds_every_number_where_it_belongs() -> None:
    found = samples(prometheus_text(TASKS, UNITS))
    for name, status in TASKS.items():
        for state in STATES:
            assert found.pop(("rows", name, state)) == status.counts[state]
        for key in TOTALS:
            assert found.pop((f"{key.removesuffix('_total')}_total", name)) == status.counts[key]
        assert found.pop(("oldest_ready_seconds", name)) == status.oldest_ready_seconds
        assert found.pop(("parked_requests", name)) == status.parked
        assert found.pop(("lost_total", name)) == len(status.lost)
    for number, status in UNITS.items():
        of_unit = {
            "rows_held": status.rows,
            "stored_bytes": status.stored_bytes,
            "reserved_rows": status.capacity.reserved_rows,
            "reserved_bytes": status.capacity.reserved_bytes,
            "admissions_waiting": status.capacity.waiting,
            "longest_admission_wait_seconds": status.capacity.longest_wait_seconds,
            "admission_wait_seconds_total": status.capacity.waited_seconds,
        }
        for name, value in of_unit.items():
            assert found.pop((f"unit_{name}", str(number))) == value
    assert found == {}


def test_a_queue_without_anything_is_no_error() -> None:
    assert samples(prometheus_text({}, {})) == {}


def test_the_runs_own_metrics_are_per_task_and_add_up_over_units() -> None:
    row = run_metrics(TASKS, UNITS)
    for name, status in TASKS.items():
        for metric, key in RUN_METRICS.items():
            assert row[f"queue/{metric}/{name}"] == status.counts[key]
        assert row[f"queue/oldest_ready_seconds/{name}"] == status.oldest_ready_seconds
    assert (row["queue/rows"], row["queue/stored_bytes"], row["queue/admission_wait_seconds"]) == (3000, 3002, 3011)
    assert all(isinstance(value, float) for value in row.values())
