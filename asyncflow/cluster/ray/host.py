"""Host of a worker's process on a node of a Ray cluster. Ray makes an actor of it.

consumes: what its driver asks and tells it: sees, start, kill, leave
waits for: what its worker prints, and its end; for the driver to take that
is unblocked by: the worker; the driver's next `listen`
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from asyncflow.cluster.ray.node_folders import NodeFolders
from asyncflow.cluster.remote_node import RemoteNode
from asyncflow.devices import VISIBLE

OUTPUT_BYTES: Final = 1 << 20  # of a worker, kept until the driver takes it; then the worker waits
DEVICE_SECONDS: Final = 60.0  # so long PyTorch may take to find a device
LISTEN_SECONDS: Final = 20.0
KILL_SECONDS: Final = 20.0  # so long a killed process may take to be gone
READ_SECONDS: Final = 1.0  # so long its output may stay open after that, in processes below it


class Letter(msgspec.Struct, frozen=True):
    """Message to a host about its worker. `files` are those of the run's folder that it has to be given, the key among them."""

    name: str
    entry: str
    run_dir: str
    cwd: str
    run_id: str
    is_remote: bool
    environment: dict[str, str]
    files: dict[str, bytes]


class RayHost:
    """An actor: what holds a worker's process on a node. Its methods are called in threads, by one `RayCluster`."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None
        self._folders: NodeFolders | None = None
        self._output = bytearray()
        self._has_room_since = 0.0  # the reader waited for room until then
        self._status: int | None = None
        self._changed = threading.Condition()

    def node(self) -> str:
        """Ray's id of the node that it is on."""
        import ray  # the process that it is in has it

        return str(ray.get_runtime_context().get_node_id())

    def sees(self, job_file: str, digest: str) -> bool:
        """Whether the run's folder is seen here: its job file has this SHA-256."""
        try:
            return hashlib.sha256(Path(job_file).read_bytes()).hexdigest() == digest
        except OSError:
            return False

    def lacks(self, device: str) -> str:
        """Reason why PyTorch does not find a device (`rollout.device=cuda`) here; empty if it does. A process of its own asks
        it."""
        command = [sys.executable, "-m", "asyncflow.engines.devices", f"{device}=1"]
        try:
            done = subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False, timeout=DEVICE_SECONDS
            )
        except subprocess.TimeoutExpired:
            return f"PyTorch has not said within {DEVICE_SECONDS:g} s whether {device} is there"
        return "" if not done.returncode else (done.stderr.strip().splitlines() or [f"{device} is not there"])[-1]

    def start(self, letter: bytes) -> int:
        """Start the worker of a `Letter`. Returns its process id.

        The one before has ended, or is ended now: the caller has not heard of it, and must not have two of a name.
        """
        self._end_predecessor()
        order = msgspec.msgpack.decode(letter, type=Letter)
        run_dir, environment = Path(order.run_dir), {**order.environment}
        if order.is_remote:
            environment = {**os.environ, **environment}
            places = self._hold(order.run_id)
            environment |= places.environment()
            if order.files:
                run_dir = places.files / "run" / run_dir.name  # apart from what else lies there, whatever the run's name is
                write_private(run_dir, order.files)
        environment |= {name: os.environ[name] for name in VISIBLE if os.environ.get(name)}  # so Ray says which are its own
        environment = {name: value for name, value in environment.items() if not name.startswith("RAY_")}
        with self._changed:
            self._output.clear()
            self._status = None
        process = subprocess.Popen(
            [sys.executable, "-m", "asyncflow.cluster.child", order.entry, order.name, str(run_dir)],
            stdin=subprocess.PIPE,  # the control pipe: it closes with this process, however that ends
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=environment,
            cwd=order.cwd if os.path.isdir(order.cwd) else None,
            start_new_session=True,
            bufsize=0,
        )
        self._process = process
        reader = threading.Thread(target=self._read, args=[process], daemon=True)
        reader.start()
        threading.Thread(target=self._wait, args=[process, reader], daemon=True).start()
        return process.pid

    def listen(self) -> tuple[bytes, int | None]:
        """Output of the worker since the last call, and its exit status once it has ended. Waits a while for either."""
        with self._changed:
            self._changed.wait_for(lambda: self._output or self._status is not None, LISTEN_SECONDS)
            output = bytes(self._output)
            if self._is_full():
                self._has_room_since = time.monotonic()
            self._output.clear()
            self._changed.notify_all()
            return output, self._status

    def kill(self) -> None:
        """End the worker at once."""
        if self._process is not None:
            self._process.kill()

    def leave(self) -> None:
        """Release what the worker had: it has ended, and there will be no other."""
        if self._process is not None and self._process.stdin is not None:
            self._process.stdin.close()
        if self._folders is not None:
            self._folders.release()

    def _end_predecessor(self) -> None:
        before = self._process
        if before is not None and before.poll() is None:
            before.kill()
            before.wait(KILL_SECONDS)
        with self._changed:  # what it has printed is nobody's any more
            self._process = None
            self._changed.notify_all()

    def _hold(self, run_id: str) -> RemoteNode:
        if self._folders is None:
            self._folders = NodeFolders(run_id)
            self._folders.sweep()
            self._folders.hold()
        return self._folders.places

    def _read(self, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None
        while chunk := process.stdout.read(1 << 16):
            with self._changed:  # the driver asks for as long as it lives, and this process ends with it
                self._changed.wait_for(lambda: not self._is_full() or process is not self._process)
                if process is self._process:
                    self._output += chunk
                    self._changed.notify_all()

    def _wait(self, process: subprocess.Popen[bytes], reader: threading.Thread) -> None:
        status = process.wait()
        while True:
            reader.join(READ_SECONDS)  # processes below it that have its output open may live a little longer
            with self._changed:
                if process is not self._process:
                    return
                had_room = not self._is_full() and time.monotonic() - self._has_room_since >= READ_SECONDS
                if not reader.is_alive() or had_room:  # else its last words wait for room, or have just got some
                    self._status = status
                    self._changed.notify_all()
                    return

    def _is_full(self) -> bool:
        return len(self._output) >= OUTPUT_BYTES


def write_private(folder: Path, files: Mapping[str, bytes]) -> None:
    """Files that only this user can read, in a folder of that kind, each there whole or not at all."""
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    folder.mkdir(mode=0o700, exist_ok=True)
    for name, content in files.items():
        partial = folder / f"{name}.{uuid.uuid4().hex}"
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(content)
        partial.rename(folder / name)
