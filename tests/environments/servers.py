"""A real OpenEnv server."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

from tests.patience import patience


@contextlib.contextmanager
def echo_server() -> Iterator[str]:
    """A real OpenEnv server, in a thread: an environment that counts letters, and is done when told so."""
    import uvicorn
    from openenv.core.env_server.http_server import create_fastapi_app
    from openenv.core.env_server.interfaces import Environment
    from openenv.core.env_server.types import Action as EnvAction
    from openenv.core.env_server.types import Observation, State

    class Said(EnvAction):
        message: str

    class Heard(Observation):
        text: str = ""

    class Echo(Environment):
        SUPPORTS_CONCURRENT_SESSIONS = True

        def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Heard:
            self.seed = seed
            return Heard(text=f"Say something. Seed {seed}.", done=False, reward=None)

        def step(self, action: Said, timeout_s: float | None = None, **kwargs: Any) -> Heard:
            return Heard(text=f"You said {action.message}.", done=action.message == "stop", reward=len(action.message) / 10)

        @property
        def state(self) -> State:
            return State()

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    app = create_fastapi_app(Echo, Said, Heard, max_concurrent_envs=4)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="warning"))
    thread = threading.Thread(target=server.run)
    thread.start()
    deadline = time.monotonic() + patience(20)
    while not server.started and time.monotonic() < deadline:
        time.sleep(0.05)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:  # a thread that goes on would keep pytest from ending
        server.should_exit = True
        thread.join()
