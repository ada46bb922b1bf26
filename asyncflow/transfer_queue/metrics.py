"""The queue's state as metrics: in Prometheus' text form, and as the `queue/...` columns of a run's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from asyncflow.transfer_queue.controller import TaskStatus
from asyncflow.transfer_queue.unit import UnitStatus

STATES = ("waiting", "ready", "leased", "done", "dead", "filtered")
TOTALS = {
    "done_total": "rows done",
    "dead_total": "rows that failed for good",
    "filtered_total": "rows taken out",
    "redelivered": "rows delivered again",
    "expired": "rows whose lease ran out",
}

RUN_METRICS = {
    "ready": "ready",
    "leased": "leased",
    "done": "done_total",
    "dead": "dead_total",
    "filtered": "filtered_total",
    "redelivered": "redelivered",
}


def prometheus_text(tasks: Mapping[str, TaskStatus], units: Mapping[int, UnitStatus]) -> str:
    """Metrics in Prometheus' text format, for a scrape or for node_exporter's textfile collector."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(tasks, units))
    return generate_latest(registry).decode()


def run_metrics(tasks: Mapping[str, TaskStatus], units: Mapping[int, UnitStatus]) -> dict[str, float]:
    """Row of the run's own metrics, see docs/metrics.md."""
    row: dict[str, float] = {}
    for name, task in tasks.items():
        for metric, key in RUN_METRICS.items():
            row[f"queue/{metric}/{name}"] = float(task.counts[key])
        row[f"queue/oldest_ready_seconds/{name}"] = task.oldest_ready_seconds
    row["queue/stored_bytes"] = float(sum(unit.stored_bytes for unit in units.values()))
    row["queue/rows"] = float(sum(unit.rows for unit in units.values()))
    row["queue/admission_wait_seconds"] = sum(unit.capacity.waited_seconds for unit in units.values())
    return row


class _Collector(Collector):
    """The families of one moment."""

    def __init__(self, tasks: Mapping[str, TaskStatus], units: Mapping[int, UnitStatus]) -> None:
        self._tasks, self._units = tasks, units

    def collect(self) -> Iterator[Metric]:
        rows = GaugeMetricFamily("asyncflow_queue_rows", "Rows of a task by state", labels=["task", "state"])
        oldest = GaugeMetricFamily("asyncflow_queue_oldest_ready_seconds", "Age of a task's oldest ready row", labels=["task"])
        lost = CounterMetricFamily("asyncflow_queue_lost", "Rows lost with a storage unit's process", labels=["task"])
        parked = GaugeMetricFamily("asyncflow_queue_parked_requests", "Lease requests that wait", labels=["task"])
        totals = {k: CounterMetricFamily(f"asyncflow_queue_{k.removesuffix('_total')}", f"{v} by a task", labels=["task"])
                  for k, v in TOTALS.items()}  # fmt: skip
        for name, task in self._tasks.items():
            for state in STATES:
                rows.add_metric([name, state], task.counts[state])
            for key, family in totals.items():
                family.add_metric([name], task.counts[key])
            lost.add_metric([name], len(task.lost))
            oldest.add_metric([name], task.oldest_ready_seconds)
            parked.add_metric([name], task.parked)
        yield from (rows, oldest, parked, lost, *totals.values())
        yield from self._units_families()

    def _units_families(self) -> Iterator[Metric]:
        gauges: dict[str, tuple[str, Callable[[UnitStatus], float]]] = {
            "rows_held": ("Rows on a storage unit", lambda unit: unit.rows),
            "stored_bytes": ("Bytes of values on a storage unit", lambda unit: unit.stored_bytes),
            "reserved_bytes": ("Bytes reserved at admission", lambda unit: unit.capacity.reserved_bytes),
            "reserved_rows": ("Rows reserved at admission", lambda unit: unit.capacity.reserved_rows),
            "admissions_waiting": ("Admissions that wait for room", lambda unit: unit.capacity.waiting),
            "longest_admission_wait_seconds": ("Longest wait for room", lambda unit: unit.capacity.longest_wait_seconds),
        }
        for key, (text, value) in gauges.items():
            family = GaugeMetricFamily(f"asyncflow_queue_unit_{key}", text, labels=["unit"])
            for number, unit in self._units.items():
                family.add_metric([str(number)], value(unit))
            yield family
        waited = CounterMetricFamily("asyncflow_queue_unit_admission_wait_seconds", "Seconds admissions waited", labels=["unit"])
        for number, unit in self._units.items():
            waited.add_metric([str(number)], unit.capacity.waited_seconds)
        yield waited
