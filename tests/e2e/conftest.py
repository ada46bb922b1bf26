"""Commands and servers that run in the background of a test."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.forked import Command, fork_servers_from_ours
from tests.patience import patience


@pytest.fixture(autouse=True, scope="package")
def warm_forks() -> Iterator[None]:
    """Runs of the tests' own processes have workers that begin with everything imported, too."""
    with fork_servers_from_ours():
        yield


@pytest.fixture
def background() -> Iterator[Callable[..., Command]]:
    """Starts commands that are ended with the test."""
    started: list[Command] = []

    def start(*arguments: str | Path) -> Command:
        process = Command(*arguments)
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


@pytest.fixture
def redis_url() -> Iterator[str]:
    """A redis-server of this test that writes each change to its log before it answers."""
    if shutil.which("redis-server") is None:
        pytest.skip("there is no redis-server on this machine: apt-get install redis-server")
    with tempfile.TemporaryDirectory(prefix="afredis") as folder:
        command = ["redis-server", "--port", "0", "--unixsocket", f"{folder}/s", "--unixsocketperm", "700", "--dir", folder]
        command += ["--save", "", "--appendonly", "yes", "--appendfsync", "always"]
        server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            deadline = time.monotonic() + patience(10)
            while not Path(folder, "s").exists():
                assert time.monotonic() < deadline and server.poll() is None, "redis-server did not start"
                time.sleep(0.02)
            yield f"unix://{folder}/s"
        finally:
            server.terminate()
            server.wait(patience(10))


@pytest.fixture
def reward_model(tmp_path: Path) -> Path:
    """A randomly initialised classifier, without a tokenizer."""
    import torch
    from transformers import Qwen2Config, Qwen2ForSequenceClassification

    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=512, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=256, num_labels=1, pad_token_id=None,
    )  # fmt: skip
    model = Qwen2ForSequenceClassification(config)
    with torch.no_grad():
        model.score.weight.mul_(50)
    folder = tmp_path / "judge"
    model.save_pretrained(folder)
    return folder
