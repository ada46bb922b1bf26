"""The transfer queue's speed, against the public package TransferQueue, this machine's memcpy and a plain unix socket.

    python benchmarks/transfer_queue.py [--json FILE] [--no-package]

Everything runs in one go, on one machine, and every read is compared with what was written. The public package (0.1.11, over its
default storage) runs in a virtual environment that is made for it; `--no-package` leaves it out.

The queue under test is a process of its own: controllers and one storage unit over memory, on a private unix socket. Producers and
consumers are other processes. Rates are medians over repetitions.

Seconds say as much about the machine as about the queue. So the time from put to received and the rate of leases have no target in
seconds; they are compared with a plain request, which the queue's process answers over the same kind of socket in the same run, in
turn with them. A plain request is two messages. With nothing but messages a row that a consumer waits for would take

    unit in the controllers' process    put, answer to the parked lease with the row                          1 request
    unit in a process of its own        put, notice to the controller, answer to the lease, get, its answer   2.5 requests

and a lease 1 request. The rest is work: the client checks, the unit stores, the controller chooses. Each of them may take as long
as one plain request. So the targets are 1 + 3 requests from put to received (p50 and p99, each against that of plain requests with
the same row, there and back), and 1 + 2 for a lease, which the unit has no part in.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
from figures import Figure, finish, parser
from queue_payloads import SCHEMA, Payloads, check_equal, fingerprint, size_of
from queue_processes import NUM_WINDOWS, WINDOW_SECONDS, a_queue, end, plain_requests, start

from asyncflow.transfer_queue.batches import WireBatch
from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.table import Table
from asyncflow.types import Batch

PACKAGE = "TransferQueue==0.1.11"


# -- what is measured -------------------------------------------------------------------------------------------------------


def memcpy_rate() -> float:
    source, target = np.ones(64 << 20, np.uint8), np.ones(64 << 20, np.uint8)
    return statistics.median(source.nbytes / seconds for seconds in _times(lambda: np.copyto(target, source), 7))


def socket_rate(num_bytes: int) -> float:
    """Bytes a second through a unix socket from one process to another: copied in, copied out, nothing else. Other bytes each time,
    as in the measurements that it is held against, so none of them are in a cache."""
    here, there = socket.socketpair()
    payloads, rates = [np.ones(num_bytes, np.uint8) for _ in range(2 + (64 << 20) // num_bytes)], []
    pid = os.fork()
    if pid == 0:
        here.close()
        buffers = [memoryview(np.ones(num_bytes, np.uint8).data) for _ in payloads]  # touched before
        for buffer in itertools.cycle(buffers):
            if not (got := there.recv_into(buffer)):
                break
            while got < num_bytes:
                got += there.recv_into(buffer[got:])
            there.sendall(b"k")
        os._exit(0)
    there.close()
    for payload in itertools.islice(itertools.cycle(payloads), 25):
        start = time.perf_counter()
        here.sendall(payload.data)
        here.recv(1)
        rates.append(num_bytes / (time.perf_counter() - start))
    here.close()
    os.waitpid(pid, 0)
    return statistics.median(rates[5:])


def _times(work: object, repeats: int) -> Iterator[float]:
    for _ in range(repeats):
        start = time.perf_counter()
        work()  # type: ignore[operator]
        yield time.perf_counter() - start


async def put_get(client: TransferQueueClient, payloads: Payloads, task: str, rows: int, repeats: int) -> tuple[float, float]:
    """(put, get) in bytes a second. Get is the lease and the data in hand."""
    puts, gets = [], []
    for _ in range(repeats):
        metas, batch = payloads.small(rows) if task == "train" else payloads.large(rows)
        start = time.perf_counter()
        await client.put(metas, batch)
        middle = time.perf_counter()
        leased = await client.lease(task, Want(rows=rows, at_least=rows))
        ended = time.perf_counter()
        assert leased is not None
        check_equal(batch, leased.batch, client.schema.task(task).reads)
        puts.append(size_of(batch) / (middle - start))
        gets.append(size_of(batch) / (ended - middle))
        await client.drop(leased.lease.indices)
        del leased
    return statistics.median(puts[2:]), statistics.median(gets[2:])


async def one_row_puts(client: TransferQueueClient, payloads: Payloads, count: int) -> tuple[float, float]:
    """(puts a second, mean bytes of a row), one after another."""
    made = [payloads.small(1) for _ in range(count)]
    start = time.perf_counter()
    for metas, batch in made:
        await client.put(metas, batch)
    rate = count / (time.perf_counter() - start)
    leased = await client.lease("train", Want(rows=count, at_least=count))
    assert leased is not None
    written = {int(batch.indices[0]): fingerprint(batch, 0) for _, batch in made}
    if written != {row: fingerprint(leased.batch, i) for i, row in enumerate(leased.batch.indices.tolist())}:
        raise SystemExit("a row came back changed")
    await client.drop(leased.lease.indices)
    return rate, statistics.mean(size_of(batch) for _, batch in made)


async def leases_per_second(client: TransferQueueClient, payloads: Payloads, path: str, num_processes: int) -> tuple[float, float]:
    """(plain requests, leases) a second, of all client processes together, measured in turn."""
    for _ in range(40):
        metas, indices = payloads.admit(16384)
        await client.put(metas, Batch(indices, np.array([m.group for m in metas]), {"x": indices}))
    processes = [start("lease", path, 16) for _ in range(num_processes)]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write(b"go\n")
        process.stdin.flush()
    counts = []
    for process in processes:
        assert process.stdout is not None
        counts.append(json.loads(await asyncio.to_thread(process.stdout.readline)))
        end(process)
    plain, leases = map(sum, zip(*counts, strict=True))
    if leases * 8 > 40 * 16384 * 0.98:
        raise SystemExit("the rows ran out: the figure would be too low")
    seconds = NUM_WINDOWS * WINDOW_SECONDS
    return plain / seconds, leases / seconds


async def put_to_received(
    client: TransferQueueClient, payloads: Payloads, path: str, count: int
) -> tuple[list[float], list[float], float]:
    """Seconds, sorted, of plain requests and from the call of put to the row in another process's hand; the mean bytes of a row.

    The two are measured in turn with the same row, which a plain request takes to the queue's process and back.
    """
    consumer = start("receive", path, count)
    await asyncio.sleep(0.3)
    plain, sent, sizes, written = [], {}, [], {}
    async with plain_requests(path) as requests:
        for _ in range(count):
            metas, batch = payloads.small(1)
            row, wire = int(batch.indices[0]), WireBatch.of(batch)
            sizes.append(size_of(batch))
            written[row] = fingerprint(batch, 0)
            await asyncio.sleep(0.003)
            began = time.monotonic()
            answer = await requests.rows(wire)
            plain.append(time.monotonic() - began)
            if fingerprint(answer.batch(), 0) != written[row]:
                raise SystemExit("a plain request's answer was not what was sent")
            await asyncio.sleep(0.003)
            sent[row] = time.monotonic()
            await client.put(metas, batch)
    assert consumer.stdout is not None
    received = json.loads(await asyncio.to_thread(consumer.stdout.readline))
    end(consumer)
    if written != {row: mark for row, _, mark in received}:
        raise SystemExit("a row came back changed")
    await client.drop(np.array(list(sent)))
    return sorted(plain), sorted(moment - sent[row] for row, moment, _ in received), statistics.mean(sizes)


async def lease_seconds(few: int, many: int) -> tuple[float, float]:
    """Median seconds of a lease of 8 rows over the socket, with so few and so many rows held: two queues, asked in turn."""
    async with a_queue() as (small, _, _), a_queue() as (large, _, _):
        for client, num_rows in ((small, few), (large, many)):
            payloads = Payloads(5)
            for first in range(0, num_rows, 16384):
                metas, indices = payloads.admit(min(16384, num_rows - first))
                await client.put(metas, Batch(indices, np.array([m.group for m in metas]), {"x": indices}))
        times: dict[TransferQueueClient, list[float]] = {small: [], large: []}
        for _ in range(few // 8 - 4):
            for client, seen in times.items():
                start = time.perf_counter()
                await client.lease("meta", Want(rows=8), columns=())
                seen.append(time.perf_counter() - start)
        return statistics.median(times[small][20:]), statistics.median(times[large][20:])


def table_bytes_per_row(rows: int) -> float:
    """Resident bytes of a task's table for each of so many ready rows, in groups of 8."""
    script = (
        "import psutil\n"
        "from transfer_queue import grow_a_table\n"
        "me = psutil.Process(); before = me.memory_info().rss\n"
        f"table = grow_a_table({rows}); print((me.memory_info().rss - before) / {rows})\n"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=Path(__file__).parent, check=True)
    return float(out.stdout)


def grow_a_table(rows: int) -> Table:
    table, payloads = Table(SCHEMA.task("meta"), SCHEMA, "benchmark"), Payloads(0)
    for _ in range(0, rows, 16384):
        metas, indices = payloads.admit(16384)
        table.admit(metas, 0)
        table.notify(indices, SCHEMA.mask(["x"]), None, 0.0)
    assert table.ready.take(Want(rows=8)) is not None
    return table


async def freed_by_drop() -> float:
    """Part of the memory of 256 rows of 1 MiB that is given back when 255 of them are dropped."""
    async with a_queue() as (client, _, pid):
        process, payloads = psutil.Process(pid), Payloads(6)
        before = process.memory_info().rss
        metas, batch = payloads.large(256)
        await client.put(metas, batch)
        full = process.memory_info().rss
        await client.drop(np.delete(batch.indices, 100))
        left = process.memory_info().rss
        leased = await client.lease("large", Want(rows=1))
        assert leased is not None
        if not np.array_equal(leased.batch.dense("blob")[0], batch.dense("blob")[100]):
            raise SystemExit("the row that was kept has changed")
        return (full - left) / (full - before)


def the_package() -> dict[str, float]:
    """Run the public package's side in an environment of its own."""
    with tempfile.TemporaryDirectory() as directory:
        python = Path(directory) / "bin" / "python"
        print(f"making a virtual environment with {PACKAGE} ...", flush=True)
        venv.create(directory, with_pip=True)
        pip = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "torch==2.13.0"], check=True)
        subprocess.run([*pip, PACKAGE], check=True)
        return run_the_package(python)


def run_the_package(python: Path) -> dict[str, float]:
    script = Path(__file__).with_name("transfer_queue_package.py")
    out = subprocess.run([str(python), "-P", str(script)], capture_output=True, text=True, timeout=900)
    line = next((line for line in out.stdout.splitlines() if line.startswith("RESULT ")), None)
    if line is None:
        raise SystemExit(f"the package's side failed:\n{out.stdout[-2000:]}\n{out.stderr[-4000:]}")
    return dict(json.loads(line.removeprefix("RESULT ")))


class Report:
    """The figures, told as they come. `package`: what the public package's side has seen, by key; maybe nothing."""

    def __init__(self, package: dict[str, float]) -> None:
        self.figures: list[Figure] = []
        self._package = package

    def add(self, name: str, value: float, unit: str, target: str | None = None) -> None:
        self.figures.append(Figure(name, value, unit, target))
        print(f"  {name}: {value:.4g} {unit}", flush=True)

    def against(self, name: str, value: float, unit: str, key: str, target: str | None = None, scale: float = 1.0) -> None:
        """A figure, the package's own, and their ratio, which is what has a target."""
        self.add(name, value / scale, unit)
        if key in self._package:
            self.add(f"  the public package's {name}", self._package[key] / scale, unit)
            self.add(f"  {name} / the public package's", value / self._package[key], "times", target)

    def package(self, name: str, key: str, unit: str, scale: float) -> None:
        if key in self._package:
            self.add(f"  the public package's {name}", self._package[key] * scale, unit)


async def data_plane(report: Report) -> None:
    async with a_queue() as (client, path, _):
        payloads = Payloads(0)
        put, get = await put_get(client, payloads, "train", 1024, 17)
        report.against("put, 1,024 small rows", put, "MB/s", "put_small", ">= 20", 1e6)
        report.against("get, 1,024 small rows", get, "MB/s", "get_small", ">= 20", 1e6)
        rate, row_bytes = await one_row_puts(client, payloads, 2000)
        report.against(f"one-row put ({row_bytes:.0f} B a row)", rate, "a second", "one_row_puts", ">= 10")
        before = socket_rate(16 << 20)
        put, get = await put_get(client, payloads, "large", 16, 17)
        plain = (before + socket_rate(16 << 20)) / 2
        report.against("put, 16 rows of 1 MiB", put, "GB/s", "put_large", None, 1e9)
        report.add("  put, 1 MiB rows / plain socket", put / plain, "times", ">= 0.6")
        report.against("get, 16 rows of 1 MiB, by socket", get, "GB/s", "get_large", None, 1e9)
        report.add("  get, 1 MiB rows by socket / plain socket", get / plain, "times", ">= 0.6")
        plain_seconds, seconds, row_bytes = await put_to_received(client, payloads, path, 1000)
        for percent in (50, 99):
            took, request = (times[len(times) * percent // 100] for times in (seconds, plain_seconds))
            report.add(f"put to received, p{percent} ({row_bytes:.0f} B a row)", took * 1e3, "ms")
            report.add(f"  plain request with such a row, p{percent}", request * 1e3, "ms")
            report.add(f"  put to received / plain request, p{percent}", took / request, "times", "<= 4")
            report.package(f"p{percent}", f"latency_p{percent}", "ms", 1e3)


async def shared_memory(report: Report) -> None:
    async with a_queue(shared=True) as (client, _, _):
        before = socket_rate(16 << 20)
        put, get = await put_get(client, Payloads(1), "large", 16, 17)
        plain = (before + socket_rate(16 << 20)) / 2
        report.add("put, 1 MiB rows into shared memory / plain socket", put / plain, "times", ">= 0.6")
        report.add("get, 16 rows of 1 MiB, by shared memory", get / 1e9, "GB/s")
        report.add("  get by shared memory / plain socket", get / plain, "times", ">= 1")


async def control_plane(report: Report) -> None:
    async with a_queue() as (client, path, _):
        plain, rate = await leases_per_second(client, Payloads(2), path, 2)
        report.add("leases of 8 rows, metadata only, 2 client processes", rate, "a second")
        report.add("  plain requests, likewise", plain, "a second")
        report.add("  a lease / a plain request", plain / rate, "times", "<= 3")
        report.package("leases", "leases", "a second", 1.0)
    few, many = await lease_seconds(1024, 1 << 20)
    report.add("a lease with 1,024 rows held", few * 1e6, "us")
    report.add("  a lease with 1,048,576 rows held / with 1,024", many / few, "times", "<= 1.5")
    report.add("table memory, groups of 8", table_bytes_per_row(1 << 20), "bytes a row")
    report.add("freed by dropping 255 of 256 rows of 1 MiB", 100 * await freed_by_drop(), "%", ">= 90")


async def units(report: Report) -> None:
    for num_units in (1, 2, 4):
        async with a_queue(num_units) as (client, path, _):
            payloads = Payloads(3)
            put, get = await put_get(client, payloads, "train", 1024, 17)
            where = "a process each" if num_units > 1 else "in the controllers' process"
            report.add(f"put, small rows, {num_units} units ({where}), 2 cores", put / 1e6, "MB/s")
            report.add(f"get, small rows, {num_units} units ({where}), 2 cores", get / 1e6, "MB/s")
            if num_units == 2:
                plain_seconds, seconds, _ = await put_to_received(client, payloads, path, 1000)
                ratio = statistics.median(seconds) / statistics.median(plain_seconds)
                report.add(f"  put to received / plain request, p50, {num_units} units ({where})", ratio, "times")


async def measure(package: dict[str, float]) -> list[Figure]:
    report = Report(package)
    report.add("memcpy", memcpy_rate() / 1e9, "GB/s")
    for name, size in (("4 MiB", 4 << 20), ("16 MiB", 16 << 20)):
        report.add(f"plain unix socket, {name} messages", socket_rate(size) / 1e9, "GB/s")
    for part in (data_plane, shared_memory, control_plane, units):
        await part(report)
    return report.figures


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--no-package", action="store_true", help="leave the public package out")
    arguments.add_argument("--package-python", type=Path, help="an interpreter that has the public package already")
    options = arguments.parse_args()
    package: dict[str, float] = {}
    if not options.no_package:
        package = run_the_package(options.package_python) if options.package_python else the_package()
    return finish(asyncio.run(measure(package)), options.json)


if __name__ == "__main__":
    raise SystemExit(main())
