"""A loader in each of 4 ranks with gloo: 2 data-parallel groups, and in each the lead reads for both ranks."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.patience import patience
from tests.unit.engines.train.parallel.processes import Processes
from tests.unit.transfer_queue.loader import dataloader_ranks
from tests.unit.transfer_queue.served import served_queue


@pytest.fixture
def ranks() -> Iterator[Processes]:
    processes = Processes(4, daemon=False)  # two of them read with processes of their own
    yield processes
    processes.close()


def test_peers_see_what_their_lead_reads(ranks: Processes, tmp_path: Path) -> None:
    timeout = patience(1.0)  # of the groups' collectives
    with served_queue(tmp_path / "queue.sock") as queue:
        rows = queue.put(range(6))
        more = list(range(24, 52))

        def put_late() -> None:
            while queue.counts("score").get("done", 0) < 24:
                time.sleep(0.02)
            time.sleep(1.5 * timeout)  # the meaning is a time: the lead has to tell its peers that it waits
            queue.put(range(6, 13))

        threading.Thread(target=put_late, daemon=True).start()
        for task in ("score", "train", "update"):
            queue.when_done(task, 52, lambda task=task: queue.end_partition(task))  # type: ignore[misc]
        ranks.run(dataloader_ranks.main, queue.address, tmp_path, timeout)
        assert queue.counts("train") == {"done": 52}
    seen_by = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for phase in ("score", "train", "update"):
        assert seen_by[0][phase] == seen_by[1][phase] and seen_by[2][phase] == seen_by[3][phase], "a peer saw something else"
        assert seen_by[0][phase] and seen_by[2][phase], "one group took everything"
        seen = [row for rank in (0, 2) for batch in seen_by[rank][phase] for row in batch["rows"]]
        assert sorted(seen) == rows + more, "a row is missing, or came to both groups"
    for each in seen_by:
        assert each["unknown"].startswith("ValueError: column 'nosuch' is not declared")
        assert each["late"].startswith("TimeoutError: waiting for rows that are ready for task 'update' took more than 0.5 s")
