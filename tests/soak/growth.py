"""Growth of whole runs over thousands of steps, `python -m tests.soak.growth --steps 5000 --minutes 60 --folder runs/growth`.

    a mode: asyncflow train --resume, sitting after sitting --after each step--> taken.jsonl --> what has grown

A sitting is one attempt of a run of the tiny model in real processes; when its minutes are over it is told to stop, and the next
one goes on from its checkpoint. So a mode's steps may be spread over days. Compared are steps 500 to 1,000 with the last 500 (of
shorter runs the second tenth with the last), over the whole run, and within each sitting that is long enough: the first is about
what a run of many steps costs a new process, the second about what a process does not give back. With `--virtual` the modes are
simulated runs, each in one process, of as many steps as one likes.

A slope is what has come between the two, by the steps between their middles. Within noise is, from the one to the other: a
sixteenth of the resident memory and 8 MiB on top of it (allocators give back late, in steps), two file handles and two threads (of
libraries' pools), and half of a step's time, whose quickest quarter is compared since other work shares the machine. Of the files
in shared memory no more may come, neither of those that are there at any time, nor of the most at once, which is compared with
the first half: what is there for a moment (two whole checkpoints, before the older one goes) is not seen in every window. In the
process that has the queue, besides, what this remembers of rows, their groups and leases, for requests that come again: `ROW_BYTES`
a row, of the last `REMEMBERED` rows. The exit code is 1 if a slope is steeper.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final, NamedTuple

import msgspec
import psutil
import yaml

from asyncflow.cluster.clock import VirtualLoop
from asyncflow.config import parse
from asyncflow.engines.costs import Costs
from asyncflow.run.factories import make_schedule, shape_of
from asyncflow.run.job import Listener
from asyncflow.simulation.audit import Audit
from asyncflow.simulation.run import NO_FAULTS, SimulatedJob
from asyncflow.transfer_queue.durable_state import REMEMBERED
from tests.conftest import merged
from tests.soak.laws import lines
from tests.soak.modes import ROOT
from tests.soak.run import Attempt, num_steps

MODES: Final[dict[str, dict[str, Any]]] = {
    "synchronous": {},
    "periodic": {},
    "delayed": {"train": {"old": "previous"}},
    "sub_step": {},
    "bounded": {},
}
VIRTUAL: Final = "virtual"
EVERY: Final = 50
"""Steps of a simulated run between two samples."""
STOP_SECONDS: Final = 90.0
FIRST, WINDOW = 500, 500
LOOKS: Final = 20
"""At files in shared memory, between two looks at all else."""
LEAST: Final = 8
"""Samples of a window from which on it is compared."""
ROW_BYTES: Final = 640
"""Of a row in what a queue remembers; 575 were seen."""
ROWS_PER_STEP: Final = 8
"""Or fewer."""
WITH_QUEUE: Final = ("driver", "simulation")
MEMORY_SHARE, MEMORY_BYTES, POOLED, SECONDS_SHARE = 1 / 16, 8 << 20, 2, 0.5


class Taken(msgspec.Struct, frozen=True):
    """What a run takes of the machine after a step. `processes`: resident bytes, file handles and threads of each; `shared`: the
    most files that it has had in shared memory since the sample before; `seconds`: real ones of a step of a simulated run, mean
    since then."""

    sitting: int
    step: int
    processes: dict[str, tuple[int, int, int]]
    shared: int
    seconds: float = 0.0


class Windows(NamedTuple):
    """Steps that are compared, each from the first to before the last."""

    early: range
    late: range

    @property
    def distance(self) -> float:
        """Steps between their middles."""
        return (self.late.start + self.late.stop - self.early.start - self.early.stop) / 2


class Slope(NamedTuple):
    """What has come of something between two windows. `noise`: what may come."""

    what: str
    before: float
    after: float
    noise: float
    steps: float

    @property
    def is_growth(self) -> bool:
        """Whether it is steeper than noise."""
        return self.after - self.before > self.noise

    def __str__(self) -> str:
        a_step, noise = (self.after - self.before) / self.steps, self.noise / self.steps
        return f"{self.what} {self.before:,.5g} -> {self.after:,.5g}, {a_step:+,.3g} a step (noise: {noise:,.3g})"


def windows(first: int, last: int) -> Windows:
    """The windows of a run, or a sitting, of these steps: 500 steps after 500, and the last 500; less where it is short."""
    size = min(WINDOW, (last - first) // 10)
    begin = first + min(FIRST, size)
    return Windows(range(begin, begin + size), range(last - size, last))


def tree(mode: str, folder: Path, steps: int) -> dict[str, Any]:
    """Configuration of the tiny run."""
    return {
        "run": {"name": "run", "dir": str(folder), "steps": steps},
        "model": {"path": str(ROOT / "recipes" / "models" / "tiny-arithmetic")},
        "data": {"path": "generated:arithmetic"},
        "schedule": mode,
        "rollout": {"num_workers": 2, "num_slots": 8, "group_size": 2, "max_new_tokens": 16},
        "train": {"prompts_per_step": 4, "learning_rate": 1e-5, **MODES[mode].get("train", {})},
        "eval": {"path": None},
        "telemetry": {"trackers": []},
        "checkpoint": {"every_steps": 50},
    }


def slopes(taken: Sequence[Taken], seconds: Mapping[int, float], what: Windows) -> list[Slope]:
    """Slopes of all that a run takes, from one window to the other; none where one has few samples. `seconds`: of each step."""
    early, late = ([each for each in taken if each.step in window] for window in what)
    if min(len(early), len(late)) < LEAST:
        return []
    found = []
    names = set.intersection(*(set(each.processes) for each in (*early[-LEAST:], *late[-LEAST:])))
    for name in sorted(names):
        for number, kind in enumerate(("resident bytes", "file handles", "threads")):
            before, after = (
                statistics.median(each.processes[name][number] for each in window if name in each.processes)
                for window in (early, late)
            )
            noise = before * MEMORY_SHARE + MEMORY_BYTES if number == 0 else POOLED
            if number == 0 and name in WITH_QUEUE:
                noise += ROW_BYTES * min(REMEMBERED, ROWS_PER_STEP * (what.late.stop - what.early.start))
            found.append(Slope(f"{name}: {kind}", before, after, noise, what.distance))
    before, after = (min(each.shared for each in window) for window in (early, late))
    found.append(Slope("files in shared memory, at any time", before, after, 0.0, what.distance))
    half = [each for each in taken if each.step < (what.early.start + what.late.stop) / 2]
    before, after = (max(each.shared for each in window) for window in (half, late))
    found.append(Slope("files in shared memory, at most", before, after, 0.0, what.distance))
    before, after = (_quick(seconds, window) for window in what)
    return [*found, Slope("seconds a step", before, after, SECONDS_SHARE * before, what.distance)]


def grown(taken: Sequence[Taken], seconds: Mapping[int, float], what: Windows, where: str = "") -> list[str]:
    """What has grown by more than noise between two windows, in words."""
    return [f"{where}{slope}" for slope in slopes(taken, seconds, what) if slope.is_growth]


def all_grown(taken: Sequence[Taken], seconds: Mapping[int, float]) -> list[str]:
    """What has grown over the run, and within each of its sittings."""
    if not taken:
        return []
    found = grown(taken, seconds, windows(0, max(seconds) + 1))
    for number in sorted({each.sitting for each in taken}):
        own = [each for each in taken if each.sitting == number]
        found += grown(own, seconds, windows(own[0].step, own[-1].step), f"sitting {number}: ")
    return found


def sit(mode: str, folder: Path, steps: int, until: float) -> None:
    """One sitting of a mode, until it has made its steps or the time (`time.monotonic`) has come."""
    folder.mkdir(parents=True, exist_ok=True)
    config, log = folder / "config.yaml", folder / "taken.jsonl"
    config.write_text(yaml.safe_dump(tree(mode, folder, steps)))
    number = 1 + max((each.sitting for each in read(log)), default=-1)
    attempt, known, told, shared = Attempt(config, folder / "said.log"), num_steps(folder / "run"), False, 0
    with log.open("ab") as file:
        while attempt.is_running():
            if time.monotonic() > until and not told:
                attempt.driver.send_signal(signal.SIGTERM)
                told = True
            elif time.monotonic() > until + STOP_SECONDS:
                attempt.end()
                raise SystemExit(f"{mode} has not stopped in {STOP_SECONDS:g} s")
            if (found := num_steps(folder / "run")) > known and not told:
                known = found
                with contextlib.suppress(psutil.NoSuchProcess, OSError):
                    file.write(msgspec.json.encode(Taken(number, found, processes(attempt.driver), shared)) + b"\n")
                    shared = 0
            for _ in range(LOOKS):  # a checkpoint's files, for one, are there for a moment
                shared = max(shared, shared_files(attempt.driver))
                time.sleep(0.1 / LOOKS)
    if attempt.status not in (0, 143):
        raise SystemExit(f"{mode} has failed: {(folder / 'said.log').read_text()[-800:]}")


class OfSimulation(Listener):
    """Observer of a simulated run. `job`: the run."""

    job: SimulatedJob | None = None


class Sampler(OfSimulation):
    """Samples of a simulated run, every `EVERY` steps, until the time has come."""

    def __init__(self, log: IO[bytes], sitting: int, until: float) -> None:
        self._log, self._sitting, self._until = log, sitting, until
        self._last: tuple[int, float] | None = None

    def step(self, step: int, row: Mapping[str, float]) -> None:
        """See `Listener`."""
        if step % EVERY:
            return
        now = time.process_time()  # other work on the machine is none of the run's
        if self._last is not None:
            each = (now - self._last[1]) / (step - self._last[0])
            sample = Taken(self._sitting, step, {"simulation": _of(psutil.Process())}, 0, each)
            self._log.write(msgspec.json.encode(sample) + b"\n")
        self._last = step, now
        if time.monotonic() > self._until and self.job is not None:
            self.job.interrupt()


class Unaudited(Audit):
    """An audit that keeps no rows: they would grow with the run."""

    def reply(self, *_: Any) -> None:
        """See `Audit`."""

    def go_back(self, version: int, rows: set[int]) -> None:
        """See `Audit`."""


def simulate(mode: str, folder: Path, steps: int, listener: OfSimulation) -> None:
    """One sitting of a mode's simulated run."""
    folder.mkdir(parents=True, exist_ok=True)
    small = {"rollout": {"num_workers": 1, "num_slots": 1, "group_size": 2, "max_new_tokens": 2}, "train": {"prompts_per_step": 1}}
    config = parse(merged(tree(mode, folder, steps), merged(small, {"checkpoint": {"every_steps": 1_000, "keep": 1}})))
    loop, audit = VirtualLoop(), Unaudited(make_schedule(config), shape_of(config))
    listener.job = SimulatedJob(config, Costs(), NO_FAULTS, loop, listener, keeps_report=False, audit=audit)
    try:
        loop.run_until_complete(loop.create_task(listener.job.run(), name="run"))
    finally:
        loop.finish()


def sit_simulated(mode: str, folder: Path, steps: int, until: float) -> None:
    """One sitting of a mode's simulated run, whose samples go to `taken.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "taken.jsonl"
    with log.open("ab") as file:
        simulate(mode, folder, steps, Sampler(file, 1 + max((each.sitting for each in read(log)), default=-1), until))


def processes(driver: psutil.Process) -> dict[str, tuple[int, int, int]]:
    """What the processes of a run take, by their names; those that a worker has started itself together. Forks that score a
    sample are left out: they come and go."""
    found, names = {"driver": _of(driver)}, {driver.pid: "driver"}
    for process in driver.children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            words, parent = process.cmdline(), names.get(process.ppid())
            if "asyncflow.cluster.child" in words:
                name = words[words.index("asyncflow.cluster.child") + 2]
                names[process.pid] = name
                found[name] = _of(process)
            elif parent is not None:
                name = f"processes of {parent}"
                before = found.get(name, (0, 0, 0))
                memory, handles, threads = _of(process)
                found[name] = before[0] + memory, before[1] + handles, before[2] + threads
    return found


def shared_files(driver: psutil.Process) -> int:
    """Number of files of a run in shared memory: weights that travel, and checkpoints."""
    folders = Path("/dev/shm").glob(f"asyncflow-{driver.pid}-*")
    return sum(len(there) + len(files) for folder in folders for _, there, files in os.walk(folder))


def read(path: Path) -> list[Taken]:
    """Samples of all sittings so far."""
    return [msgspec.json.decode(line, type=Taken) for line in path.read_bytes().splitlines()] if path.exists() else []


def step_seconds(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds of each step, from the rows of metrics."""
    return {row["step"]: row["perf/step_seconds"] for row in rows}


def report(mode: str, folder: Path, *, is_virtual: bool = False) -> list[str]:
    """Print what a mode's run takes. Returns what has grown."""
    taken = read(folder / "taken.jsonl")
    rows = lines(folder / "run" / "metrics.jsonl")
    seconds = {each.step: each.seconds for each in taken} if is_virtual else step_seconds(rows)
    if not taken or not seconds:
        return []
    what = windows(0, max(seconds) + 1)
    print(f"{mode}: {max(seconds) + 1} steps in {taken[-1].sitting + 1} sittings; compared {what.early} with {what.late}")
    for slope in slopes(taken, seconds, what):
        print(f"  {slope}")
    found = all_grown(taken, seconds)
    for line in found:
        print(f"  GROWN: {line}")
    return found


def _of(process: psutil.Process) -> tuple[int, int, int]:
    with process.oneshot():
        return process.memory_info().rss, process.num_fds(), process.num_threads()


def _quick(seconds: Mapping[int, float], window: range) -> float:
    there = [seconds[step] for step in window if step in seconds]
    return statistics.quantiles(there, n=4)[0] if len(there) > 1 else float("nan")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5_000)
    parser.add_argument("--minutes", type=float, default=60.0, help="of this call; the next one goes on")
    parser.add_argument("--folder", type=Path, default=Path("runs/growth"))
    parser.add_argument(
        "--mode", choices=list(MODES), action="append", help="these alone; by default all, the one with the fewest steps first"
    )
    parser.add_argument("--virtual", action="store_true", help="simulated runs, of 200,000 steps, say")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    modes, folder = options.mode or list(MODES), options.folder / VIRTUAL if options.virtual else options.folder
    while time.monotonic() < end:
        done = {mode: num_steps(folder / mode / "run") for mode in modes}
        left = [mode for mode in sorted(done, key=lambda mode: done[mode]) if done[mode] < options.steps]
        if not left:
            break
        (sit_simulated if options.virtual else sit)(left[0], folder / left[0], options.steps, end)
    found = [line for mode in modes for line in report(mode, folder / mode, is_virtual=options.virtual)]
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
