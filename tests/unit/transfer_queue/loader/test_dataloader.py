"""The data loader, over a queue that is served at a unix socket."""

from __future__ import annotations

import asyncio
import functools
import multiprocessing.connection
import os
import signal
import stat
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import CancelledError, ThreadPoolExecutor
from multiprocessing import AuthenticationError
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from asyncflow.transfer_queue.client import TransferQueueClient
from asyncflow.transfer_queue.loader.dataloader import Jagged, Padded, StreamBatch, StreamDataLoader
from asyncflow.transport import ConnectionLost
from asyncflow.types import Ragged, RunError
from tests.depth import in_gate
from tests.patience import patience
from tests.processes import alive, children_called, kill
from tests.unit.transfer_queue.served import ServedQueue, length, prompt, response, rows_of, served_queue

SECONDS = 300.0
"""For what must come: a reader is a new process that imports torch, which takes half a minute on a busy machine."""
open_loader = functools.partial(StreamDataLoader, timeout_seconds=SECONDS)


@pytest.fixture
def queue(tmp_path: Path) -> Iterator[ServedQueue]:
    with served_queue(tmp_path / "queue.sock") as served:
        yield served


@pytest.fixture(autouse=True)
def nothing_is_left() -> Iterator[None]:
    """No test leaves a thread of a loader, or a process."""
    yield
    until(lambda: not [t.name for t in threading.enumerate() if "feed" in t.name or "Executor" in t.name])
    until(lambda: not children_called("spawn_main"))


def until(is_so: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + patience(seconds)
    while not is_so():
        assert time.monotonic() < deadline, "it has not become so"
        time.sleep(0.01)


def settled_counts(queue: ServedQueue, task: str) -> dict[str, int]:
    """As they are when they have not changed for a while."""
    before, now = None, queue.counts(task)
    while before != now:
        time.sleep(0.15)
        before, now = now, queue.counts(task)
    return now


def outputs(batch: Any) -> dict[str, Any]:
    return {"score": batch["reward"] + 1, "logprobs": Jagged(batch["response"].values.float(), batch["response"].offsets)}


def check(loader: StreamDataLoader, batch: dict[str, Any], indices: torch.Tensor) -> None:
    """All columns of a batch of the task `score` are those of its rows."""
    rows = indices.tolist()
    assert indices.dtype == torch.int64 and batch["response"].values.dtype == torch.int32
    groups = list(dict.fromkeys(row >> 2 for row in rows))
    assert [e.tolist() for e in batch["response"].entries()] == [response(row).tolist() for row in rows]
    assert [e.tolist() for e in batch["hidden"].entries()] == [[[t, t] for t in response(row).tolist()] for row in rows]
    assert batch["hidden"].values.dtype == torch.float16
    assert [e.tolist() for e in batch["prompt"].entries()] == [prompt(group).tolist() for group in groups]
    assert batch["difficulty"].tolist() == [group / 2 for group in groups] and batch["difficulty"].dtype == torch.float64
    assert batch["reward"].tolist() == rows
    assert batch["image"].shape == (len(rows), 2, 3) and batch["image"][:, 1, 2].tolist() == [(row + 5) % 256 for row in rows]
    assert batch["is_right"].tolist() == [row % 3 == 0 for row in rows] and batch["is_right"].dtype == torch.bool
    assert [groups[i] for i in loader.group_of(indices).tolist()] == [row >> 2 for row in rows]


@pytest.mark.parametrize("num_workers", in_gate(0, 2, of=[0, 1, 2]))
def test_every_row_comes_once_and_results_go_back(queue: ServedQueue, num_workers: int) -> None:
    rows = queue.put(range(11))
    queue.when_done("score", len(rows), lambda: queue.end_partition("score"))
    seen: list[int] = []
    with open_loader(queue.address, "score", batch_size=6, partition=0, num_workers=num_workers) as loader:
        assert (loader.batch_size, loader.num_workers) == (6, num_workers)
        for batch, indices in loader:
            assert len(indices) <= 6
            check(loader, batch, indices)
            kept = loader.complete(indices, outputs(batch))
            assert kept is not None and kept.tolist() == [True] * len(indices)
            seen += indices.tolist()
        later = queue.put(range(20, 23), step=1)  # the same loader, another pass
        queue.when_done("score", len(rows) + len(later), lambda: queue.end_partition("score", 1))
        loader.partition = 1
        for batch, indices in loader:
            loader.complete(indices, outputs(batch))
            seen += indices.tolist()
    assert sorted(seen) == rows + later, "a row is missing, or came twice"
    assert queue.counts("score") == {"done": 56} and queue.counts("update") == {"ready": 56}
    some = [row for row in rows if (row >> 2) % 2 == 0]  # the first unit's
    written = queue.read(some, ["score", "logprobs"])
    assert written.dense("score").tolist() == [row + 1 for row in some]
    assert [e.tolist() for e in written.ragged("logprobs")] == [response(row).tolist() for row in some]


def test_the_example_runs(queue: ServedQueue) -> None:
    rows = queue.put(range(5))
    queue.when_done("score", len(rows), lambda: queue.close_task("score"))
    text = str(StreamDataLoader.__doc__)
    example = text[text.index("        with ") : text.index("    A batch is held")]
    exec(textwrap.dedent(example), {"StreamDataLoader": open_loader, "torch": torch, "address": queue.address})
    assert queue.read([1, 2], ["score"]).dense("score").tolist() == [length(1), length(2)]


def test_two_loaders_share_a_task(queue: ServedQueue) -> None:
    rows = queue.put(range(30))
    queue.when_done("train", len(rows), lambda: queue.end_partition("train"))

    def consume(together: threading.Barrier) -> list[int]:
        with open_loader(queue.address, "train", batch_size=3, partition=0, name="same") as loader:
            seen = []
            for i, (_, indices) in enumerate(loader):
                if i == 0:
                    together.wait(patience(SECONDS))
                seen += indices.tolist()
            return seen

    with ThreadPoolExecutor(2) as threads:
        together = threading.Barrier(2)
        first, second = threads.map(consume, [together] * 2)
    assert first and second and sorted(first + second) == rows


def test_loaders_of_the_same_name_do_not_give_each_others_rows_back(queue: ServedQueue) -> None:
    queue.put(range(2))
    with open_loader(queue.address, "train", groups=1, prefetch=0, name="same") as loader:
        stream = iter(loader)
        next(stream)
        with open_loader(queue.address, "train", groups=1, prefetch=0, name="same") as other:
            next(iter(other))
        until(lambda: queue.counts("train") == {"ready": 4, "leased": 4})
        assert settled_counts(queue, "train") == {"ready": 4, "leased": 4}
        stream.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_leaving_the_loop_gives_rows_back(queue: ServedQueue, num_workers: int) -> None:
    rows = queue.put(range(5))
    loader = open_loader(queue.address, "score", batch_size=4, num_workers=num_workers)
    for i, (batch, indices) in enumerate(loader):
        if i == 1:
            break
        loader.complete(indices, outputs(batch))
        first = indices
    until(lambda: queue.counts("score") == {"ready": 16, "done": 4})
    assert not [t for t in threading.enumerate() if "feed" in t.name], "not even `close` was needed"
    with pytest.raises(ValueError, match=f"row {int(indices[0])} is not held by this loader"):
        loader.complete(indices, outputs(batch))
    with pytest.raises(ZeroDivisionError):
        for _ in loader:
            1 / 0  # noqa: B018
    until(lambda: queue.counts("score")["ready"] == 16)
    queue.when_done("score", len(rows), lambda: queue.close_task("score"))
    seen = first.tolist()
    for batch, indices in loader:
        loader.complete(indices, outputs(batch))
        seen += indices.tolist()
    loader.close()
    assert sorted(seen) == rows


def test_a_loader_that_is_forgotten_gives_rows_back(queue: ServedQueue) -> None:
    queue.put(range(3))
    stream = iter(open_loader(queue.address, "score", groups=1, prefetch=1))
    next(stream)
    until(lambda: queue.counts("score") == {"ready": 4, "leased": 8})
    del stream
    until(lambda: queue.counts("score") == {"ready": 12})
    loader = open_loader(queue.address, "score", groups=3, partition=0)
    for _ in loader:
        queue.end_partition("score")
    assert settled_counts(queue, "score") == {"leased": 12}, "the stream has ended, its rows may be completed yet"
    del loader
    until(lambda: queue.counts("score") == {"ready": 12})


def test_closing_the_task_ends_all(queue: ServedQueue) -> None:
    def consume(prefetch: int) -> int:
        with open_loader(queue.address, "train", groups=2, prefetch=prefetch) as loader:
            return sum(1 for _ in loader)

    with ThreadPoolExecutor(3) as threads:
        counts = [threads.submit(consume, prefetch) for prefetch in (0, 1, 2)]
        until(lambda: queue.status("train").parked == 3)
        queue.close_task("train")
        assert [count.result(patience(SECONDS)) for count in counts] == [0, 0, 0]


def test_rows_that_are_ready_when_the_step_ends_still_come(queue: ServedQueue) -> None:
    rows = queue.put(range(3))
    queue.end_partition("train")
    with open_loader(queue.address, "train", batch_size=5, at_least=5, partition=0, timeout_seconds=SECONDS) as loader:
        assert sorted(row for _, indices in loader for row in indices.tolist()) == rows


def test_close_within_a_loop_ends_it(queue: ServedQueue) -> None:
    queue.put(range(3))
    loader = open_loader(queue.address, "train", groups=1)
    assert sum(1 for _ in loader if loader.close() is None) == 1
    until(lambda: queue.counts("train") == {"ready": 12})


@pytest.mark.parametrize("prefetch", [0, 2])
def test_what_is_leased_ahead_is_bounded(queue: ServedQueue, prefetch: int) -> None:
    queue.put(range(15))
    with open_loader(queue.address, "score", batch_size=4, prefetch=prefetch) as loader:
        for i, (batch, indices) in enumerate(loader):
            assert settled_counts(queue, "score")["leased"] == 4 * (1 + prefetch)
            loader.complete(indices, outputs(batch))
            if i == 3:
                break


def test_the_next_request_does_not_wait_for_the_transfer(queue: ServedQueue) -> None:
    queue.put(range(8))
    may_read = asyncio.Event()
    for unit in queue.queue.units:
        at_once = unit.unit_store.storage.read

        async def read(*asked: Any, at_once: Any = at_once) -> Any:
            await may_read.wait()
            return await at_once(*asked)

        unit.unit_store.storage.read = read  # type: ignore[method-assign]
    loader = open_loader(queue.address, "train", batch_size=4, prefetch=2)
    with ThreadPoolExecutor(1) as thread, loader:
        stream = iter(loader)
        first = thread.submit(next, stream)
        until(lambda: queue.counts("train").get("leased") == 12)  # while nothing has been read yet
        assert not first.done()
        queue._loop.call_soon_threadsafe(may_read.set)
        assert first.result(patience(SECONDS)).indices.tolist() == rows_of([0])


def test_a_slow_consumer_keeps_its_rows(tmp_path: Path) -> None:
    renewed: list[float] = []
    with served_queue(tmp_path / "queue.sock", lease_seconds=6.0) as queue, open_loader(queue.address, "score", groups=1) as loader:
        renew = queue.queue.controllers["score"].renew

        async def counted(tokens: Any) -> Any:
            renewed.append(queue._loop.time())
            return await renew(tokens)

        queue.queue.controllers["score"].renew = counted  # type: ignore[method-assign]
        queue.put(range(1))
        batch, indices = next(iter(loader_kept := iter(loader)))
        taken = queue._loop.time()
        until(lambda: bool(renewed) and renewed[-1] > taken + 6.0)  # longer than a lease lasts
        kept = loader.complete(indices, outputs(batch))
        assert kept is not None and kept.all() and queue.status("score").counts["expired"] == 0
        loader_kept.close()


def test_rows_are_done_when_the_next_batch_is_taken(queue: ServedQueue) -> None:
    queue.put(range(3))
    with open_loader(queue.address, "train", groups=1, prefetch=0) as loader:
        stream = iter(loader)
        for num_done in (0, 4, 8):
            next(stream)
            assert queue.counts("train").get("done", 0) == num_done
        queue.end_partition("train", 0)
        stream.close()


def test_a_whole_step_is_acknowledged_at_its_end(queue: ServedQueue) -> None:
    rows = queue.put(range(3))
    with open_loader(queue.address, "train", groups=1, partition=0, acknowledge="manual") as loader:
        taken = []
        for _, indices in loader:
            taken.append(indices)
            if len(taken) == 3:
                assert queue.counts("train") == {"leased": 12}
                queue.end_partition("train")
        kept = loader.done(torch.cat(taken))  # of three leases, on two units
        assert kept is not None and kept.all()
        assert queue.counts("train") == {"done": len(rows)}
        with pytest.raises(ValueError, match="row 0 is not held"):
            loader.done([0])


def test_failed_rows_come_again_until_they_fail_for_good(queue: ServedQueue) -> None:
    queue.put(range(1))
    with open_loader(queue.address, "score", batch_size=4, prefetch=0) as loader:
        stream = iter(loader)
        _, indices = next(stream)
        loader.fail(indices[1:2], "an odd one")
        _, again = next(stream)
        assert again.tolist() == [1]
        loader.fail(again, "an odd one")
        until(lambda: queue.counts("score") == {"leased": 3, "dead": 1})
        assert queue.status("score").dead == {1: "an odd one"}
        rest = [0, 2, 3]
        kept = loader.complete(rest, {"score": np.ones(3, np.float32), "logprobs": [[0.5] * length(row) for row in rest]})
        assert kept is not None and kept.all()
        with pytest.raises(ValueError, match="writes score, logprobs"):
            loader._held._lease_of[0] = loader._held._lease_of.get(0, None)  # type: ignore[assignment]
            loader.done([0])
        stream.close()


def test_dropped_rows_are_left_out(queue: ServedQueue) -> None:
    queue.put(range(3))
    may_read = asyncio.Event()
    for unit in queue.queue.units:
        at_once = unit.read

        async def read(*asked: Any, at_once: Any = at_once) -> Any:
            await may_read.wait()
            return await at_once(*asked)

        unit.read = read  # type: ignore[method-assign]
    loader = open_loader(queue.address, "train", groups=1, prefetch=2)
    with ThreadPoolExecutor(1) as thread, loader:
        stream = iter(loader)
        first = thread.submit(next, stream)
        until(lambda: queue.counts("train").get("leased") == 12)
        queue.run(lambda client: client.drop([0, 1, 2, 3, 5]))
        queue._loop.call_soon_threadsafe(may_read.set)
        batches = [first.result(patience(SECONDS)), next(stream)]
        assert sorted(indices.tolist() for _, indices in batches) == [[4, 6, 7], [8, 9, 10, 11]]
        assert all(batch["reward"].tolist() == indices.tolist() for batch, indices in batches)
        stream.close()


def test_padding(queue: ServedQueue) -> None:
    queue.put(range(2))
    options: dict[str, Any] = {"batch_size": 8, "pad_to_multiple_of": 4, "pad_values": {"response": -1}}
    with open_loader(queue.address, "score", **options) as loader:
        batch, indices = next(iter(stream := iter(loader)))
        padded, hidden = batch["response"], batch["hidden"]
        assert isinstance(padded, Padded) and padded.lengths.tolist() == [length(row) for row in range(8)]
        assert padded.values.shape == (8, 12) and padded.values.dtype == torch.int32 and hidden.values.shape == (8, 12, 2)
        for row in range(8):
            assert padded.values[row].tolist() == response(row).tolist() + [-1] * (12 - length(row))
            assert hidden.values[row, length(row) :].eq(0).all()
        assert batch["prompt"].values.shape == (2, 4) and isinstance(batch["reward"], torch.Tensor)
        kept = loader.complete(indices, {"score": batch["reward"], "logprobs": Padded(padded.values.float(), padded.lengths)})
        assert kept is not None and kept.all()
        assert [e.tolist() for e in queue.read([2, 3], ["logprobs"]).ragged("logprobs")] == [response(r).tolist() for r in (2, 3)]
        stream.close()
    with pytest.raises(ValueError, match="'reward', which is no ragged column"):
        next(iter(open_loader(queue.address, "score", batch_size=8, pad_to_multiple_of=4, pad_values={"reward": 1})))


def test_batches_by_tokens_and_of_at_least(queue: ServedQueue) -> None:
    queue.put(range(4))
    with open_loader(queue.address, "train", tokens=20, prefetch=0) as loader:
        (first, _), stream = next(stream := iter(loader)), stream
        assert 9 < len(first["response"].values) <= 20
        stream.close()
    with open_loader(queue.address, "train", batch_size=18, at_least=18, timeout_seconds=0.3, prefetch=0) as loader:
        with pytest.raises(TimeoutError, match=r"waiting for rows that are ready for task 'train' took more than 0\.3 s"):
            next(iter(loader))
        queue.put([9])
        assert len(next(iter(loader)).indices) == 18


def test_what_can_be_written_back(queue: ServedQueue) -> None:
    queue.put(range(1))
    with open_loader(queue.address, "score", batch_size=4) as loader:
        stream = iter(loader)
        _, indices = next(stream)
        entries = [torch.full((length(row),), row + 0.5) for row in range(4)]
        ragged = Ragged.from_arrays([e.numpy() for e in entries], "float32")
        nested = torch.nested.nested_tensor(entries, layout=torch.jagged, requires_grad=True)
        score = torch.ones(4, requires_grad=True)
        with pytest.raises(ValueError, match="row 0, column 'score': declared float32, written float64"):
            loader.complete(indices, {"score": score.double(), "logprobs": ragged})
        with pytest.raises(ValueError, match=r"column 'score' cannot be written.*BFloat16"):
            loader.complete(indices, {"score": score.bfloat16(), "logprobs": ragged})
        with pytest.raises(ValueError, match="row 2, column 'logprobs': 2 entries for 4 rows"):
            loader.complete(indices, {"score": score, "logprobs": entries[:2]})
        for row, logprobs in enumerate((entries, [e.tolist() for e in entries], ragged, nested)):
            one = logprobs if row == 3 else [list(logprobs)[row]]
            where = [row] if row < 3 else indices[3:]
            if row == 3:
                one = Jagged(nested.values()[nested.offsets()[3] :], torch.tensor([0, length(3)]))
            kept = loader.complete(where, {"score": score[row : row + 1], "logprobs": one})
            assert kept is not None and kept.tolist() == [True]
        stream.close()
    written = queue.read(range(4), ["logprobs"]).ragged("logprobs")
    assert [e.tolist() for e in written] == [e.tolist() for e in entries]


def test_errors_surface(queue: ServedQueue, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    queue.put(range(2))

    async def lease(*asked: Any, **wanted: Any) -> None:
        raise RunError("no more leases")

    with monkeypatch.context() as patch, pytest.raises(RunError, match="no more leases"):
        patch.setattr(TransferQueueClient, "lease", lease)
        next(iter(open_loader(queue.address, "train", groups=1)))
    for options, why in (({"task": "nosuch"}, "no task 'nosuch'"), ({"columns": ["nosuch"]}, "'nosuch' is not declared")):
        with pytest.raises(ValueError, match=why):
            next(iter(open_loader(**{"address": queue.address, "task": "train", "groups": 1} | options)))
    with pytest.raises(LookupError, match="has no column 'score'"):
        next(iter(open_loader(queue.address, "train", groups=1, columns=["score"])))
    with pytest.raises(ConnectionLost, match="nothing answers at"):
        next(iter(open_loader(f"unix:{tmp_path}/nosuch.sock", "train", groups=1)))
    with open_loader(queue.address, "train", groups=1) as loader:
        stream = iter(loader)
        next(stream)
        with pytest.raises(RuntimeError, match="iterated already"):
            next(iter(loader))
        stream.close()


def test_leases_that_cannot_be_renewed_are_an_error(queue: ServedQueue, monkeypatch: pytest.MonkeyPatch) -> None:
    may_fail = threading.Event()

    async def renew_held(client: TransferQueueClient) -> None:
        while not may_fail.is_set():
            await asyncio.sleep(0.01)
        raise RunError("no more renewals")

    monkeypatch.setattr(TransferQueueClient, "renew_held", renew_held)
    with open_loader(queue.address, "train", groups=1) as loader:
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(next, iter(loader))
            until(lambda: queue.status("train").parked == 1)
            may_fail.set()
            with pytest.raises(RunError, match="no more renewals"):
                waiting.result(patience(SECONDS))
        feed = loader._opened()
        until(lambda: feed._failure is not None)  # before a pass has begun
        with pytest.raises(RunError, match="no more renewals"):
            next(iter(loader))


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({}, "a batch needs a limit"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"batch_size": 4, "at_least": 5}, "never fit"),
        ({"groups": 1, "prefetch": -1}, "prefetch is -1"),
        ({"groups": 1, "pad_values": {"response": 1}}, "nothing is padded"),
        ({"groups": 1, "acknowledge": "never"}, "not 'never'"),
    ],
)
def test_contradictions(options: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        open_loader("unix:/nowhere", "train", **options)


def test_a_queue_that_goes_ends_the_wait(tmp_path: Path) -> None:
    with ThreadPoolExecutor(1) as thread:
        with served_queue(tmp_path / "queue.sock") as queue:
            loader = open_loader(queue.address, "train", groups=1)
            waiting = thread.submit(next, iter(loader))
            until(lambda: queue.status("train").parked == 1)
        with pytest.raises((ConnectionLost, StopIteration)):
            waiting.result(patience(SECONDS))
        loader.close()


def test_a_reader_that_dies_is_told_of(queue: ServedQueue) -> None:
    queue.put(range(3))
    with open_loader(queue.address, "train", groups=1, num_workers=1, prefetch=0) as loader:
        stream = iter(loader)
        next(stream)
        (reader,) = children_called("spawn_main")
        kill(reader)
        with pytest.raises(RunError, match="a reader process of loader 'loader' has died"):
            for _ in range(2):
                next(stream)
    until(lambda: queue.counts("train").get("leased", 0) == 0)


def test_a_reader_takes_nothing_from_a_stranger(queue: ServedQueue) -> None:
    """What it sends is pickled, so nobody else may be there to send it anything: it has pipes, and a socket for shared memory."""
    queue.put(range(3))
    with open_loader(queue.address, "train", groups=1, num_workers=1, prefetch=0) as loader:
        stream = iter(loader)
        next(stream)
        (reader,) = children_called("spawn_main")
        (listener,) = {each.laddr for each in reader.net_connections("all") if each.laddr}
        assert stat.S_IMODE(Path(listener).parent.stat().st_mode) == 0o700
        with pytest.raises(AuthenticationError):
            multiprocessing.connection.Client(listener, authkey=b"a guess")
        next(stream)  # and it goes on


def test_a_consumer_that_is_killed_leaves_nothing(queue: ServedQueue, tmp_path: Path) -> None:
    queue.put(range(3))
    script = tmp_path / "consumer.py"
    script.write_text(
        "import sys, time\n"
        "from asyncflow.transfer_queue.loader.dataloader import StreamDataLoader\n"
        "if __name__ == '__main__':\n"
        "    for _ in StreamDataLoader(sys.argv[1], 'train', groups=1, num_workers=1):\n"
        "        time.sleep(100)\n"
    )
    consumer = subprocess.Popen([sys.executable, script, queue.address])
    try:
        until(lambda: queue.counts("train").get("leased", 0) == 12)
        until(lambda: bool(psutil.Process(consumer.pid).children()))
        readers = psutil.Process(consumer.pid).children()
    finally:
        os.kill(consumer.pid, signal.SIGKILL)
        consumer.wait()
    until(lambda: queue.counts("train") == {"ready": 12})
    psutil.wait_procs(readers, timeout=patience(SECONDS))
    assert not alive(readers)


def test_only_the_loader_needs_torch() -> None:
    loaded = "import sys, asyncflow.transfer_queue.client, asyncflow.transfer_queue.queue; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True).stdout == "False\n"


def test_a_batch_unpacks() -> None:
    columns, indices = StreamBatch({}, torch.arange(2))
    assert columns == {} and indices.tolist() == [0, 1]


def test_close_does_not_wait_for_a_unit_that_hangs(queue: ServedQueue) -> None:
    queue.put(range(2))
    loader = open_loader(queue.address, "train", groups=1, num_workers=1, prefetch=0)
    stream = iter(loader)
    next(stream)
    for unit in queue.queue.units:
        unit.read = lambda *asked: asyncio.Event().wait()  # type: ignore[method-assign,assignment,return-value]
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(next, stream)
        until(lambda: queue.counts("train").get("leased", 0) == 4 and queue.counts("train").get("done", 0) == 4)
        feed = loader._held.feed
        assert feed is not None
        closing = threading.Thread(target=feed.close, daemon=True)
        closing.start()
        closing.join(patience(SECONDS))
        is_closed = not closing.is_alive()
        if not is_closed:  # so that this test ends
            for reader in psutil.Process().children():
                reader.kill()
        assert is_closed
        with pytest.raises(CancelledError):
            waiting.result(patience(SECONDS))
    until(lambda: queue.counts("train").get("leased", 0) == 0)
