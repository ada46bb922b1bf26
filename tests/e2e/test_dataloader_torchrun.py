"""A loader in each of 4 ranks under torchrun with gloo: 2 data-parallel groups, and in each the lead reads for both ranks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

from tests.depth import deep
from tests.unit.transfer_queue.served import served_queue

SCRIPT = Path(__file__).with_name("dataloader_ranks.py")


@deep
def test_peers_see_what_their_lead_reads(tmp_path: Path) -> None:
    with served_queue(tmp_path / "queue.sock") as queue:
        rows = queue.put(range(6))
        more = list(range(24, 52))

        def put_late() -> None:
            while queue.counts("score").get("done", 0) < 24:
                time.sleep(0.02)
            time.sleep(3.0)  # longer than the groups' timeout: the lead has to tell its peers that it waits
            queue.put(range(6, 13))

        threading.Thread(target=put_late, daemon=True).start()
        for task in ("score", "train", "update"):
            queue.when_done(task, 52, lambda task=task: queue.end_step(task))  # type: ignore[misc]
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "4", "--master-port", "0", "--standalone"]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        ended = subprocess.run(
            [*torchrun, SCRIPT, queue.address, tmp_path], env=environment, capture_output=True, text=True, timeout=90
        )
        assert ended.returncode == 0, ended.stderr[-4000:]
        assert queue.counts("train") == {"done": 52}
    ranks = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(4)]
    for phase in ("score", "train", "update"):
        assert ranks[0][phase] == ranks[1][phase] and ranks[2][phase] == ranks[3][phase], "a peer saw something else"
        assert ranks[0][phase] and ranks[2][phase], "one group took everything"
        seen = [row for rank in (0, 2) for batch in ranks[rank][phase] for row in batch["rows"]]
        assert sorted(seen) == rows + more, "a row is missing, or came to both groups"
    for rank in ranks:
        assert rank["unknown"].startswith("ValueError: column 'nosuch' is not declared")
        assert rank["late"].startswith("TimeoutError: waiting for rows that are ready for task 'update' took more than 0.5 s")
