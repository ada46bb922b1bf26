"""A served run with a generator and a trainer outside, in threads, through deaths of its server and of its clients.

Every prompt, every acknowledged row and every trained row is written down, so that `check` can say what was lost or trained twice.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file

from asyncflow.client import Client, ResponseData
from asyncflow.types import RunError, UserError
from tests.patience import patience

TREE: dict[str, Any] = {
    "model": {"max_context_tokens": 128},
    "rollout": {"num_workers": 0, "group_size": 2, "max_new_tokens": 16},
    "train": {"engine": "outside", "prompts_per_step": 2, "max_restarts": 100},
    "queue": {"lease_seconds": 3.0},
    "checkpoint": {"every_steps": 1},
}


class Outsiders:
    """The clients of one run of so many steps."""

    def __init__(self, connect: Callable[[], Client], steps: int) -> None:
        self._connect, self.steps = connect, steps
        self.put: list[str] = []  # prompts that the service has taken
        self.acknowledged: dict[int, int] = {}  # by row, the token that was stored
        self.trained: dict[int, dict[int, tuple[bytes, int]]] = {}  # by step and row: the prompt, and the token
        self.errors: list[str] = []
        self.committed = 0
        self._weights: dict[str, np.ndarray] | None = None
        self._tokens = itertools.count(5)
        self._over = threading.Event()
        self._dies = {"generate": threading.Event(), "train": threading.Event()}
        self._threads = [threading.Thread(target=self._live, args=(work,), daemon=True) for work in (self.generate, self.train)]

    def start(self) -> None:
        """Let generator and trainer work."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Let them end."""
        self._over.set()
        for thread in self._threads:
            thread.join(patience(30))

    def die(self, which: str) -> None:
        """The generator, or the trainer, forgets all that it has, as a process that is killed; another one takes its place."""
        self._dies[which].set()

    def put_prompts(self, client: Client, count: int) -> None:
        """Put prompts that nobody has put before."""
        for _ in range(count):
            text = f"Prompt {len(self.put)} has {len(self.put) * 7} coins."
            client.put_prompts_data([{"prompt": text, "answer": "1"}])
            self.put.append(text)

    def generate(self, client: Client) -> None:
        """Answer each row with one token, another one each time."""
        worker = client.join_generators()
        while not self._over.is_set() and not self._has_died("generate"):
            work = worker.get_prompts_data(2, timeout_seconds=0.5)
            if work.install is not None:
                worker.installed(work.install)
            tokens = {row: next(self._tokens) % 60 for prompt in work.prompts for row in prompt.rows}
            if not tokens or self._has_died("generate"):
                continue
            given = [
                ResponseData(row=row, token_ids=[token], logprobs=[-1.0], finish_reason="stop") for row, token in tokens.items()
            ]
            for row, outcome in zip(tokens, worker.put_experience_data(given), strict=True):
                if outcome == "stored":
                    if self.acknowledged.get(row, tokens[row]) != tokens[row]:
                        self.errors.append(f"row {row} was stored twice")
                    self.acknowledged[row] = tokens[row]

    def train(self, client: Client) -> None:
        """Train what comes, and publish the weights that the run started from, each time."""
        if self._weights is None:
            with tempfile.TemporaryDirectory() as folder:
                self._weights = load_file(client.model(folder) / "model.safetensors")
        rows: dict[int, tuple[bytes, int]] = {}
        worker, step = client.join_trainers(), -1
        while not self._over.is_set() and self.committed < self.steps and not self._has_died("train"):
            experience = worker.get_experience_data(timeout_seconds=0.5)
            if experience.step != step:
                step, rows = experience.step, {}
            for group in experience.groups:
                for row, ids in zip(group.indices.tolist(), group.response_ids, strict=True):
                    if row in rows:
                        self.errors.append(f"row {row} was given out twice")
                    rows[row] = (group.prompt_ids.tobytes(), int(ids[0]))
            worker.acknowledge(experience.groups)
            if experience.normaliser is not None and not self._has_died("train"):
                self.trained[step] = rows
                self.committed = worker.publish(step, self._weights)

    def check(self, decode: Callable[[np.ndarray], str]) -> list[str]:
        """Sentences about everything that was lost, or trained twice."""
        found, last = list(self.errors), dict[int, int]()
        if sorted(self.trained) != list(range(self.steps)):
            found.append(f"steps {sorted(self.trained)} were trained, of {self.steps}")
        for step, rows in self.trained.items():
            for row, (_, token) in rows.items():
                if row in last:
                    found.append(f"row {row} was trained in steps {last[row]} and {step}")
                last[row] = step
                if self.acknowledged.get(row, token) != token:
                    found.append(f"row {row} was acknowledged with token {self.acknowledged[row]}, and trained with {token}")
        texts = [
            decode(np.frombuffer(prompt, np.int64)).strip()
            for rows in self.trained.values()
            for prompt in dict.fromkeys(prompt for prompt, _ in rows.values())
        ]
        needed = self.put[: self.steps * 2]
        if sorted(texts) != sorted(needed):
            found.append(f"prompts that were put and not trained: {sorted(set(needed) - set(texts))}, or trained twice")
        return found

    def _live(self, work: Callable[[Client], None]) -> None:
        """Work, and begin anew with another client whenever the last one has lost its place."""
        name = work.__name__
        while not self._over.is_set() and not (name == "train" and self.committed >= self.steps):
            self._dies[name].clear()
            try:
                with self._connect() as client:
                    work(client)
            except (RunError, UserError):
                time.sleep(0.1)

    def _has_died(self, name: str) -> bool:
        return self._dies[name].is_set()


def tree_of(folder: Path, model: Path, steps: int) -> dict[str, Any]:
    """Configuration of such a run."""
    return {
        **TREE,
        "run": {"name": "killed", "dir": str(folder / "runs"), "steps": steps},
        "model": {"path": str(model), **TREE["model"]},
        "telemetry": {"trackers": []},
    }
