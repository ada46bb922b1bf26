"""Situation of a run: what its driver knows at one moment of which process waits for what. `why.py` makes words of it.

    driver --every second, whole or not at all--> runs/<name>/now.json --> `asyncflow why`, of a live, a killed or a finished run
                                                                      +--> the live page

Ages are in seconds at the moment of the situation.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import msgspec

from asyncflow.types import UserError
from asyncflow.waits import OpenWait

SITUATION_FILE: Final = "now.json"

WAITING: Final = "waiting"
READY: Final = "ready"
LEASED: Final = "leased"
DONE: Final = "done"
UNKNOWN: Final = "unknown"

IN_ORDER: Final = "it is done"
"""Reason of a run that ended in order."""


class SeenWorker(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A worker of the run. `task`, `cause` and `seconds`: the state of its lane. `silence`: since its last report; None: it has
    never reported. `rss_bytes`: resident memory, as it last reported.

    `process`: what the operating system says of its process (`stopped`, `running`, ...; `gone`), where it is on this machine.
    `serving`, `installing`: versions of a rollout worker or evaluator. `stale`: why it has no weights to serve.
    """

    name: str
    pid: int = 0
    process: str = ""
    task: str = ""
    cause: str = ""
    seconds: float = 0.0
    silence: float | None = None
    serving: int | None = None
    installing: int | None = None
    stale: str = ""
    waits: list[OpenWait] = []
    threads: list[str] = []
    rss_bytes: int = 0


class SeenGroup(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A group that lacks something. `task`: the first task that is not done with all of its rows; `state`: of the first such row
    in that task's queue. `holder`: the worker that has leased it, `seconds` ago; `left`: until the lease runs out. `error`: of a
    row that has failed for good."""

    group: int
    task: str
    rows: int
    state: str
    holder: str = ""
    seconds: float = 0.0
    left: float = 0.0
    low: int = 0
    high: int = 0


class SeenStep(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A step, or an evaluation, that is not committed. `lacking`: groups that lack something; `groups`: the first of them, the one
    that is waited for at the head. `members_left`: members that are still to be found. `asked`: by data-parallel rank, how many
    rounds it has asked for; `leaders`: the workers of these ranks."""

    topic: str
    step: int
    is_open: bool = True
    groups: list[SeenGroup] = []
    lacking: int = 0
    members_left: int = 0
    asked: list[int] = []
    leaders: list[str] = []


class Situation(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Processes and their waits at one moment, as the driver knows them.

    `time`: seconds since 1970. `pid`: the driver's, on the machine `host`.
    `idle`: since something has last moved. `published`: the newest version, `published_seconds` ago. `limits`: seconds by
    configuration key. `queue`: rows by task and state. `waits`: of the driver, and requests of others (`who`) that are parked
    there. `ended`: why the run has ended; empty while it goes on. `is_held`: a user who drives the run by hand, or works for it
    from outside, is waited for. `threads`: where the driver's threads are that are at files, if nothing has moved for some
    seconds.
    """

    run: str
    time: float
    pid: int
    host: str
    committed: int
    steps: int
    idle: float
    published: int = -1
    published_seconds: float | None = None
    max_staleness: int = 0
    is_held: bool = False
    limits: dict[str, float] = {}
    workers: list[SeenWorker] = []
    open_steps: list[SeenStep] = []
    queue: dict[str, dict[str, int]] = {}
    waits: list[OpenWait] = []
    threads: list[str] = []
    ended: str = ""


def write_situation(run_dir: Path, situation: Situation) -> None:
    """Write a situation, whole or not at all; what a machine that loses power keeps of it is the one before. Raises `OSError`."""
    partial = run_dir / f"{SITUATION_FILE}.partial"
    partial.write_bytes(msgspec.json.encode(situation))
    partial.replace(run_dir / SITUATION_FILE)


def read_situation(run_dir: Path) -> Situation:
    """Newest situation of a run. Raises `UserError` where there is none that can be read."""
    try:
        return msgspec.json.decode((run_dir / SITUATION_FILE).read_bytes(), type=Situation)
    except FileNotFoundError:
        raise UserError(f"{run_dir} has no {SITUATION_FILE}: no run has begun in it, or one of an older version") from None
    except (OSError, msgspec.DecodeError) as error:
        raise UserError(f"{run_dir / SITUATION_FILE} cannot be read: {error}") from error
