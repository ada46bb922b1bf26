"""kill -9 of a service and of its clients: nothing that was acknowledged is lost or trained twice."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from asyncflow.data.tokenizer import CheckpointTokenizer
from tests.conftest import MODEL
from tests.depth import in_gate
from tests.e2e.commands import kill_trainer, wait_for
from tests.e2e.service import Served
from tests.e2e.service_kills import Outsiders, tree_of
from tests.forked import Command
from tests.patience import patience


@pytest.mark.parametrize("kills", in_gate(2, of=[2, 20]))
def test_nothing_acknowledged_is_lost_when_the_server_its_trainer_or_a_client_is_killed(
    background: Callable[..., Command], tmp_path: Path, kills: int
) -> None:
    """The server and the process of its train engine in turn, and after each of them the other client."""
    rng, steps = random.Random(kills), 4 + 2 * kills
    served = Served(background, tmp_path, tree_of(tmp_path, MODEL, steps))
    outsiders = Outsiders(lambda: served.client(patience_seconds=patience(60)), steps)
    with served.client(patience_seconds=patience(60)) as client:
        client.init_engines()
        outsiders.start()
        for number in range(kills):
            outsiders.put_prompts(client, 4)
            goal = min(steps, outsiders.committed + 1 + number % 2)
            outsiders.die(("generate", "train")[number % 2])
            wait_for(lambda goal=goal: outsiders.committed >= goal or len(outsiders.put) < 2 * goal)
            time.sleep(rng.uniform(0.0, 0.3))
            if number % 2:
                kill_trainer(served.run_dir)
                continue
            served.command.kill()
            served.command.wait(patience(10))
            served.start("--resume")
            client.init_engines()
        while len(outsiders.put) < 2 * steps:
            outsiders.put_prompts(client, 2)
        wait_for(lambda: outsiders.committed == steps, served.command, 300)
        outsiders.stop()
        assert outsiders.check(CheckpointTokenizer(MODEL).decode) == []
        client.stop()
