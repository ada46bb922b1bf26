"""Clients of a served run, as the soak starts and kills them: `python -m tests.soak.clients ROLE ADDRESS KEY_FILE FOLDER`.

    client            starts the run, lets it train step by step, stops it
    client, prompts   likewise of a run that is trained outside, but it puts the prompts
    trainer outside   trains what comes: it publishes the weights that the run started from

What they do is in FOLDER: put.jsonl has a line [number, whether the service has answered] before and after each prompt is put,
trained.jsonl one [step, {first row of a group: number of its prompt}] before a step is published.
"""

from __future__ import annotations

import json
import re
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from safetensors.numpy import load_file

from asyncflow.client import Client
from asyncflow.data.tokenizer import CheckpointTokenizer
from tests.soak.laws import lines
from tests.soak.modes import PROMPTS, ROOT, STEPS

AHEAD = 3
"""Steps whose prompts are put before they are needed."""
PATIENCE_SECONDS = 60.0


def drive(client: Client, folder: Path) -> None:
    """Drive the run to its end."""
    client.init_engines()
    while client.step() is not None:
        pass
    client.stop()


def put(client: Client, folder: Path) -> None:
    """Put prompts, each once at most, until the steps are done."""
    while (done := client.init_engines() or 0) < STEPS:  # each time: a service that is begun again waits for it
        before = lines(folder / "put.jsonl")
        if sum(is_answered for _, is_answered in before) < PROMPTS * (done + AHEAD):
            number = max((number for number, _ in before), default=-1) + 1
            add(folder / "put.jsonl", [number, False])
            client.put_prompts_data([{"prompt": f"Prompt {number} has {number * 7} coins.", "answer": "1"}])
            add(folder / "put.jsonl", [number, True])
        else:
            time.sleep(0.1)
    client.stop()


def train(client: Client, folder: Path) -> None:
    """Train what comes until the steps are done."""
    decode = CheckpointTokenizer(ROOT / "recipes" / "models" / "tiny-arithmetic").decode
    with tempfile.TemporaryDirectory() as scratch:
        weights = load_file(client.model(scratch) / "model.safetensors")
    worker, done, step, groups = client.join_trainers(), 0, -1, dict[int, int]()
    while done < STEPS:
        experience = worker.get_experience_data()
        if experience.step != step:
            step, groups = experience.step, {}
        for group in experience.groups:
            (number,) = re.findall(r"Prompt (\d+)", decode(group.prompt_ids))
            groups[int(group.indices[0])] = int(number)
        worker.acknowledge(experience.groups)
        if experience.normaliser is not None:
            add(folder / "trained.jsonl", [step, groups])
            done = worker.publish(step, weights)
    worker.leave()


def add(path: Path, line: Any) -> None:
    """Add a line to a file, by one write."""
    with path.open("ab", buffering=0) as file:
        file.write(json.dumps(line).encode() + b"\n")


ROLES = {"client": drive, "client, prompts": put, "trainer outside": train}


def main(role: str, address: str, key_file: str, folder: str) -> None:
    with Client.connect(address, key_file=key_file, patience_seconds=PATIENCE_SECONDS) as client:
        ROLES[role](client, Path(folder))


if __name__ == "__main__":
    main(*sys.argv[1:])
