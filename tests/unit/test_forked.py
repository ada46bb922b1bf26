"""Whole runs of the tests begin with everything imported."""

from __future__ import annotations

import os
from multiprocessing.connection import Connection

from asyncflow.cluster.forking import ForkServer
from asyncflow.threads import thread_environment
from tests import forked


def say_whose(says: Connection, environment: dict[str, str]) -> None:
    """What a command does before its run, and whether its workers' fork server is a fork of the tests'."""
    forked.set_environment(environment)
    forked.fork_workers_from_here()
    for settings in ({}, {"HF_HUB_OFFLINE": "no"}):
        server = ForkServer({**os.environ, **thread_environment(1), **settings})
        says.send(isinstance(server._process, forked._Child))
        server._process.kill()
        server._process.wait()


def test_a_command_s_workers_are_forks_but_where_imports_read_another_environment() -> None:
    context = forked.context()
    hears, says = context.Pipe(duplex=False)
    process = context.Process(target=say_whose, args=(says, dict(os.environ)))
    process.start()
    says.close()
    assert [hears.recv(), hears.recv()] == [True, False]
    process.join()
