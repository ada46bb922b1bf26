"""The other side of `transfer_queue.py`: the same work on the public package TransferQueue, over its default storage.

Run by `transfer_queue.py` in a virtual environment of its own; prints one JSON object.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from typing import Any

os.environ.setdefault("RAY_DEDUP_LOGS", "0")
os.environ.setdefault("TQ_LOGGING_LEVEL", "ERROR")

import numpy as np
import ray
import torch
import transfer_queue as tq
from omegaconf import OmegaConf
from tensordict import TensorDict


def small_payload(rng: np.random.Generator, rows: int = 1024) -> dict[str, list[np.ndarray]]:
    """The payload of the issue: ragged ids and log-probs."""
    prompts, responses = rng.integers(64, 193, rows), rng.integers(128, 385, rows)
    return {
        "prompt_ids": [rng.integers(0, 1 << 15, n) for n in prompts],
        "response_ids": [rng.integers(0, 1 << 15, n) for n in responses],
        "logprobs": [rng.random(n, np.float32) for n in responses],
    }


def as_tensordict(columns: dict[str, list[np.ndarray]]) -> TensorDict:
    nested = {
        name: torch.nested.nested_tensor([torch.from_numpy(a) for a in arrays], layout=torch.jagged)
        for name, arrays in columns.items()
    }
    return TensorDict(nested, batch_size=len(next(iter(columns.values()))))


def fetch(client: Any, fields: list[str], count: int, partition: str, task: str) -> tuple[Any, Any]:
    meta = client.get_meta(data_fields=fields, batch_size=count, partition_id=partition, task_name=task)
    return meta, client.get_data(meta)


def put_get_small(client: Any, repeats: int) -> tuple[float, float]:
    rng, puts, gets = np.random.default_rng(0), [], []
    for i in range(repeats):
        columns = small_payload(rng)
        size = sum(a.nbytes for arrays in columns.values() for a in arrays)
        payload, partition = as_tensordict(columns), f"small{i}"
        start = time.perf_counter()
        client.put(data=payload, partition_id=partition)
        middle = time.perf_counter()
        _, got = fetch(client, list(columns), 1024, partition, "train")
        end = time.perf_counter()
        for name, arrays in columns.items():
            rows = got[name].unbind()
            if not all(np.array_equal(a, r.numpy()) for a, r in zip(arrays, rows, strict=True)):
                raise SystemExit(f"column {name} came back changed")
        client.clear_partition(partition)
        puts.append(size / (middle - start))
        gets.append(size / (end - middle))
    return statistics.median(puts), statistics.median(gets)


def one_row_puts(client: Any, seconds: float) -> float:
    rng, count = np.random.default_rng(1), 0
    columns = {name: arrays[:1] for name, arrays in small_payload(rng, 1).items()}
    payload = as_tensordict(columns)
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        client.put(data=payload, partition_id="one")
        count += 1
    rate = count / (time.perf_counter() - start)
    client.clear_partition("one")
    return rate


def put_get_large(client: Any, rows: int, repeats: int) -> tuple[float, float]:
    rng, puts, gets = np.random.default_rng(2), [], []
    for i in range(repeats):
        values = rng.integers(0, 256, (rows, 1 << 20), np.uint8)
        payload, partition = TensorDict({"blob": torch.from_numpy(values)}, batch_size=rows), f"large{i}"
        start = time.perf_counter()
        client.put(data=payload, partition_id=partition)
        middle = time.perf_counter()
        _, got = fetch(client, ["blob"], rows, partition, "train")
        end = time.perf_counter()
        if not np.array_equal(np.stack([r.numpy() for r in got["blob"].unbind(0)]), values):
            raise SystemExit("the large rows came back changed")
        client.clear_partition(partition)
        puts.append(values.nbytes / (middle - start))
        gets.append(values.nbytes / (end - middle))
    return statistics.median(puts), statistics.median(gets)


def leases(client: Any, held: int, count: int) -> tuple[float, float]:
    """(leases of 8 rows a second, median seconds of one), with `held` rows there."""
    partition = f"leases{held}"
    for first in range(0, held, 8192):
        n = min(8192, held - first)
        client.put(data=TensorDict({"x": torch.arange(n).unsqueeze(1)}, batch_size=n), partition_id=partition)
    times = []
    for _ in range(count):
        start = time.perf_counter()
        client.get_meta(data_fields=["x"], batch_size=8, partition_id=partition, task_name="t")
        times.append(time.perf_counter() - start)
    client.clear_partition(partition)
    return len(times) / sum(times), statistics.median(times)


@ray.remote(num_cpus=0)
class Consumer:
    """Waits for single rows and tells when each one was in hand."""

    def __init__(self) -> None:
        tq.init()
        self.client = tq.get_client()

    def receive(self) -> float:
        fields = ["prompt_ids", "response_ids", "logprobs"]
        while not (meta := self.client.get_meta(fields, 1, "latency", task_name="train")).size:
            time.sleep(0.0005)
        self.client.get_data(meta)
        return time.monotonic()

    def ready(self) -> bool:
        return True


def latencies(client: Any, count: int) -> tuple[float, float]:
    """(p50, p99) in seconds from the call of put to the row in the hand of a consumer that waits for it."""
    consumer = Consumer.remote()
    ray.get(consumer.ready.remote(), timeout=60)
    payload = as_tensordict({name: arrays[:1] for name, arrays in small_payload(np.random.default_rng(3), 1).items()})
    client.put(data=payload, partition_id="latency")  # the partition is there
    ray.get(consumer.receive.remote(), timeout=60)
    took = []
    for _ in range(count):
        future = consumer.receive.remote()
        time.sleep(0.03)
        sent = time.monotonic()
        client.put(data=payload, partition_id="latency")
        took.append(ray.get(future, timeout=60) - sent)
    took.sort()
    return took[len(took) // 2], took[int(len(took) * 0.99)]


def main() -> None:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
    # A consumer that waits inside the controller holds up every other request, put included: so it asks again and again.
    tq.init(OmegaConf.create({"controller": {"polling_mode": True}}))
    client, seen = tq.get_client(), {}
    seen["put_small"], seen["get_small"] = put_get_small(client, 7)
    seen["one_row_puts"] = one_row_puts(client, 3.0)
    seen["put_large"], seen["get_large"] = put_get_large(client, 16, 7)
    seen["leases"], seen["lease_1k_seconds"] = leases(client, 8 * 1000, 200)
    if "--million" in sys.argv:
        _, seen["lease_1m_seconds"] = leases(client, 1 << 20, 20)
    seen["latency_p50"], seen["latency_p99"] = latencies(client, 200)
    print("RESULT " + json.dumps(seen), flush=True)
    tq.close()
    ray.shutdown()


if __name__ == "__main__":
    main()
