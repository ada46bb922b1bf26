"""Environment processes on another machine: this one, reached by ssh, whose server is a real one where there is one."""

from __future__ import annotations

import asyncio
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from asyncflow.environments.base import Action, EnvironmentFailure
from asyncflow.environments.pool import EnvironmentPool
from asyncflow.sandbox.interpreter import command_of
from asyncflow.sandbox.limits import ProcessLimits
from asyncflow.types import UserError
from tests.patience import patience

SSH, SSHD, KEYGEN = shutil.which("ssh"), shutil.which("sshd", path="/usr/sbin:/usr/local/sbin"), shutil.which("ssh-keygen")
HAS_SERVER = None not in (SSH, SSHD, KEYGEN) and os.getuid() == 0
FILE = """
import os, time

class Where:
    def reset(self, example, seed): return f"{os.getpid()} {os.getppid()} {os.environ['WAY']}"
    def step(self, action):
        time.sleep(float(action))
        return None, 1.0, True, {}

class Agent(Where):
    is_captured = True
"""
SERVER = """
ListenAddress 127.0.0.1
HostKey {folder}/host
AuthorizedKeysFile {folder}/client.pub
PidFile none
StrictModes no
PasswordAuthentication no
SetEnv WAY=server
"""
CLIENT = """
IdentityFile {folder}/client
IdentitiesOnly yes
StrictHostKeyChecking no
UserKnownHostsFile /dev/null
LogLevel ERROR
"""


@pytest.fixture(params=["shell", pytest.param("server", marks=pytest.mark.skipif(not HAS_SERVER, reason="no sshd, or not root"))])
def address(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """How an interpreter's path begins there. `shell`: in the place of ssh, the command runs in a shell of this machine."""
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    monkeypatch.setenv("PATH", f"{bin_folder}{os.pathsep}{os.environ['PATH']}")
    ssh = bin_folder / "ssh"
    if request.param == "shell":
        ssh.write_text('#!/bin/sh\nfor last; do :; done\nexport WAY=shell\nexec sh -c "$last"\n')
        ssh.chmod(0o755)
        yield "ssh://other"
        return
    for name in ("host", "client"):
        subprocess.run([str(KEYGEN), "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    (tmp_path / "server").write_text(SERVER.format(folder=tmp_path))
    (tmp_path / "settings").write_text(CLIENT.format(folder=tmp_path))
    ssh.write_text(f'#!/bin/sh\nexec {SSH} -F {tmp_path}/settings "$@"\n')
    ssh.chmod(0o755)
    Path("/run/sshd").mkdir(exist_ok=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with subprocess.Popen(
        [str(SSHD), "-D", "-e", "-p", str(port), "-f", str(tmp_path / "server")], stderr=subprocess.PIPE
    ) as server:
        deadline = time.monotonic() + patience(20)
        while socket.socket().connect_ex(("127.0.0.1", port)) and server.poll() is None and time.monotonic() < deadline:
            time.sleep(0.02)
        yield f"ssh://root@127.0.0.1:{port}"
        server.kill()


def new_pool(tmp_path: Path, *pythons: str, seconds: float = 60.0, name: str = "Where") -> EnvironmentPool:
    (tmp_path / "where.py").write_text(FILE)
    limits = ProcessLimits(seconds, 1 << 30)
    return EnvironmentPool(f"{tmp_path / 'where.py'}:{name}", {}, limits, num_workers=1, name="test", pythons=pythons)


async def end_of(pid: int) -> None:
    deadline = time.monotonic() + patience(20)
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, f"{pid} is still there"
        await asyncio.sleep(0.02)


async def test_an_episode_is_played_there_and_nothing_of_it_stays(address: str, tmp_path: Path) -> None:
    pool = new_pool(tmp_path, address + sys.executable)
    await pool.start()
    try:
        episode, opening = await pool.begin({}, 0)
        assert opening is not None
        pid, parent, way = str(opening.words).split()
        assert way == ("server" if "127.0.0.1" in address else "shell")
        assert (await episode.step(Action("0"))).reward == 1.0
    finally:
        await pool.close()
    await end_of(int(pid))
    await end_of(int(parent))


async def test_an_environment_that_hangs_there_is_killed_there(address: str, tmp_path: Path) -> None:
    pool = new_pool(tmp_path, address + sys.executable, seconds=patience(2.0))
    await pool.start()
    try:
        episode, opening = await pool.begin({}, 0)
        assert opening is not None
        with pytest.raises(EnvironmentFailure, match="gave no answer within"):
            await episode.step(Action("600"))
        for pid in str(opening.words).split()[:2]:
            await end_of(int(pid))
        again, _ = await pool.begin({}, 0)
        assert (await again.step(Action("0"))).reward == 1.0
    finally:
        await pool.close()


async def test_an_interpreter_that_is_not_there_is_said_in_its_shells_words(address: str, tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"exited with status 127 before the environment was built; its last words: .*no-such-python"
    ):
        await new_pool(tmp_path, address + "/envs/no-such-python").start()


async def test_an_agent_that_calls_the_policy_stays_on_its_machine(address: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"its interpreter \(episodes\.python\) has to be there, too"):
        await new_pool(tmp_path, address + sys.executable, name="Agent").start()


async def test_processes_take_interpreters_in_turn(tmp_path: Path) -> None:
    here = tmp_path / "python"
    here.symlink_to(sys.executable)
    pool = new_pool(tmp_path, sys.executable, str(here))
    assert [next(pool._commands)[0] for _ in range(3)] == [sys.executable, str(here), sys.executable]


@pytest.mark.parametrize(
    "address", ["ssh://", "ssh://host", "ssh://-oProxyCommand=x/python", "ssh://a@-b/python", "ssh://host:x/python"]
)
def test_what_is_no_address_is_refused(address: str) -> None:
    with pytest.raises(UserError, match="write it as ssh://HOST/path/to/python"):
        command_of(address, "m")
