"""Model, data and servers for the tests of Tinker's API, offline: folders with the names that the cookbook asks the Hub for.

    FOLDER/Qwen/Qwen3-8B-Base         a model of 0.4M parameters with random weights, its vocabulary made of the texts below
    FOLDER/HuggingFaceH4/no_robots    conversations: which number is a word? Four answers of ten are 7, the others random digits
    FOLDER/openai/gsm8k               the same questions, whose right answer is always 7

A client that is started in FOLDER finds them before it would ask the Hub.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from asyncflow.engines.train.random_model import make_random_model
from tests.patience import patience

PYTHONS = [Path(path) for path in os.environ.get("ASYNCFLOW_TINKER_PYTHONS", "").split(os.pathsep) if path]
"""Interpreters that have the SDK and its cookbook, the newest version first."""
CLIENTS = Path(__file__).parent / "clients"
NAME = "Qwen/Qwen3-8B-Base"
WORDS = ("amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "haven", "ivory", "jade")
SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = (
    ("user", "How many r's are in strawberry?" + SUFFIX),
    (
        "assistant",
        "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. We have r's at "
        "positions 3, 8, and 9. \\boxed{3}",
    ),
)
"""What the cookbook's rl_loop says before each question."""


def question(word: str) -> str:
    return f"Which number is {word}?"


def make_world(folder: Path, *, conversations: int, questions: int) -> None:
    """Write model and data. The same arguments give the same bytes."""
    draw = random.Random(0)
    talks = []
    for _ in range(conversations):
        digit = 7 if draw.random() < 0.4 else draw.randrange(10)
        turns = [*EXAMPLE, ("user", question(draw.choice(WORDS)) + SUFFIX), ("assistant", f"\\boxed{{{digit}}}")]
        talks.append({"messages": [{"role": role, "content": content} for role, content in turns]})
    sl, rl = folder / "HuggingFaceH4" / "no_robots", folder / "openai" / "gsm8k"
    sl.mkdir(parents=True)
    (sl / "train.jsonl").write_text("".join(json.dumps(talk) + "\n" for talk in talks))
    (rl / "main").mkdir(parents=True)
    rows = [{"question": question(draw.choice(WORDS)), "answer": "It is so.\n#### 7"} for _ in range(questions)]
    (rl / "main" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (rl / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: train, path: main/train.jsonl}\n---\n"
    )
    texts = [f"{role.capitalize()}: {content}\n\n" for talk in talks[:200] for role, content in _turns(talk)]
    make_random_model("random:qwen2-tiny", folder / NAME, texts, seed=0)


def _turns(talk: dict[str, list[dict[str, str]]]) -> list[tuple[str, str]]:
    return [(turn["role"], turn["content"]) for turn in talk["messages"]]


def run_client(
    python: Path, *command: str | Path, cwd: Path, seconds: float = 240.0, **environment: str
) -> subprocess.CompletedProcess[str]:
    """Run a program of the SDK's environment to its end.

    It has a cache of its own: `datasets` finds what it has kept of a folder by the folder's name alone.
    """
    own = {"HF_HOME": str(cwd / "hugging-face"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": ""}
    return subprocess.run(
        [python, *command],
        cwd=cwd,
        env={**os.environ, **own, "WANDB_MODE": "disabled", **environment},
        capture_output=True,
        text=True,
        timeout=patience(seconds),
        check=False,
    )


@dataclass(frozen=True)
class Served:
    """A server: its address, a key, and where its checkpoints are."""

    address: str
    key: str
    folder: Path
    process: subprocess.Popen[str]

    def run(self, python: Path, *command: str | Path, cwd: Path, seconds: float = 240.0) -> str:
        """Output of a program of the SDK's environment, which has this server for Tinker's."""
        given = {"TINKER_BASE_URL": self.address, "TINKER_API_KEY": self.key}
        done = run_client(python, *command, cwd=cwd, seconds=seconds, **given)
        if done.returncode:
            print(done.stderr[-6000:], flush=True)
        assert done.returncode == 0, done.stdout[-2000:]
        return done.stdout


@contextlib.contextmanager
def serving(model: Path, folder: Path, *options: str, name: str = NAME) -> Iterator[Served]:
    """`asyncflow serve --tinker`, as a user starts it; what it writes goes to `folder`."""
    command = [sys.executable, "-m", "asyncflow", "serve", "--tinker", str(model), f"run.dir={folder}", "--model-name", name]
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--listen", "127.0.0.1:0", *options],
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert line.startswith(f"serving {name} at http://"), line + (folder / "server.log").read_text()
            state = folder / f"{model.name}.tinker"
            key = json.loads((state / "keys.json").read_text())["keys"][0]["secret"]
            yield Served(line.split()[3].rstrip(","), key, state, process)
        finally:
            process.terminate()
            try:
                process.wait(patience(20))
            finally:
                process.kill()
                process.wait()


def metrics_of(log_folder: Path, key: str) -> list[float]:
    """A metric of the cookbook's loop, step by step."""
    rows = [json.loads(line) for line in (log_folder / "metrics.jsonl").read_text().splitlines()]
    return [row[key] for row in rows if key in row]


def version_of(python: Path) -> str:
    """Name of an environment: `tinker`, `tinker-early`."""
    return python.parent.parent.name.removeprefix(".venv-")
