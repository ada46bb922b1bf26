"""Growth of whole runs over thousands of steps, `python -m tests.soak.growth --steps 5000 --minutes 60 --folder runs/growth`.

    a mode: asyncflow train --resume, sitting after sitting --after each step--> taken.jsonl --> what has grown

A sitting is one attempt of a run of the tiny model in real processes; when its minutes are over it is told to stop, and the next
one goes on from its checkpoint. So a mode's steps may be spread over days. Compared are steps 500 to 1,000 with the last 500 (of
shorter runs the second tenth with the last), over the whole run, and within each sitting that is long enough: the first is about
what a run of many steps costs a new process, the second about what a process does not give back. `--virtual` is one more mode: a
simulated run in one process, of as many steps as one likes.

Noise that is allowed: a sixteenth of the resident memory and 8 MiB on top of it (allocators give back late, in steps), two file
handles and two threads (of libraries' pools), no file in shared memory, and half of a step's time, whose quickest quarter is
compared since other work shares the machine. In the process that has the queue, besides, what this remembers of rows, their groups
and leases, for requests that come again: `ROW_BYTES` a row, of the last `REMEMBERED` rows. The exit code is 1 if anything has grown
by more.
"""

from __future__ import annotations

import argparse
import contextlib
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
LEAST: Final = 8
"""Samples of a window from which on it is compared."""
ROW_BYTES: Final = 640
"""Of a row in what a queue remembers; 575 were seen."""
ROWS_PER_STEP: Final = 8
"""Or fewer."""
WITH_QUEUE: Final = ("driver", "simulation")
MEMORY_SHARE, MEMORY_BYTES, POOLED, SECONDS_SHARE = 1 / 16, 8 << 20, 2, 0.5


class Taken(msgspec.Struct, frozen=True):
    """What a run takes of the machine after a step. `processes`: resident bytes, file handles and threads of each; `shared`: its
    files in shared memory; `seconds`: real ones of a step of a simulated run, mean since the last sample."""

    sitting: int
    step: int
    processes: dict[str, tuple[int, int, int]]
    shared: int
    seconds: float = 0.0


class Windows(NamedTuple):
    """Steps that are compared, each from the first to before the last."""

    early: range
    late: range


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


def grown(taken: Sequence[Taken], seconds: Mapping[int, float], what: Windows, where: str = "") -> list[str]:
    """What has grown by more than noise between two windows, in words. `seconds`: of each step."""
    found = []
    early, late = ([each for each in taken if each.step in window] for window in what)
    if min(len(early), len(late)) < LEAST:
        return []
    names = set.intersection(*(set(each.processes) for each in (*early[-LEAST:], *late[-LEAST:])))
    for name in sorted(names):
        kinds = ("resident bytes", "file handles", "threads")
        for number, kind in enumerate(kinds):
            before, after = (
                statistics.median(each.processes[name][number] for each in window if name in each.processes)
                for window in (early, late)
            )
            allowed = before * MEMORY_SHARE + MEMORY_BYTES if number == 0 else POOLED
            if number == 0 and name in WITH_QUEUE:
                allowed += ROW_BYTES * min(REMEMBERED, ROWS_PER_STEP * (what.late.stop - what.early.start))
            if after > before + allowed:
                found.append(f"{where}{name}: {kind} {before:,.0f} -> {after:,.0f}")
    before, after = (max(each.shared for each in window) for window in (early, late))
    if after > before:
        found.append(f"{where}files in shared memory {before} -> {after}")
    quick, later = (_quick(seconds, window) for window in what)
    if later > (1 + SECONDS_SHARE) * quick:
        found.append(f"{where}seconds a step {quick:.3f} -> {later:.3f}")
    return found


def slopes(taken: Sequence[Taken]) -> dict[str, float]:
    """Slope of each process's resident memory over a sitting, in bytes a step, after its first tenth: the median over pairs of
    samples (Theil and Sen), which a few odd ones do not move."""
    later = [each for each in taken if each.step >= taken[0].step + (taken[-1].step - taken[0].step) / 10]
    few = later[:: max(1, len(later) // 60)]
    found = {}
    for name in sorted(set.intersection(*(set(each.processes) for each in few)) if few else ()):
        pairs = [(a, b) for i, a in enumerate(few) for b in few[i + 1 :] if b.step > a.step]
        if pairs:
            rises = [(b.processes[name][0] - a.processes[name][0]) / (b.step - a.step) for a, b in pairs]
            found[name] = statistics.median(rises)
    return found


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
    attempt, known, told = Attempt(config, folder / "said.log"), num_steps(folder / "run"), False
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
                    sample = Taken(number, found, processes(attempt.driver), shared_files(attempt.driver))
                    file.write(msgspec.json.encode(sample) + b"\n")
            time.sleep(0.1)
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


def simulate(folder: Path, steps: int, listener: OfSimulation) -> None:
    """One sitting of a simulated run."""
    folder.mkdir(parents=True, exist_ok=True)
    small = {"rollout": {"num_workers": 1, "num_slots": 1, "group_size": 2, "max_new_tokens": 2}, "train": {"prompts_per_step": 1}}
    config = parse(merged(tree("delayed", folder, steps), merged(small, {"checkpoint": {"every_steps": 1_000, "keep": 1}})))
    loop, audit = VirtualLoop(), Unaudited(make_schedule(config), shape_of(config))
    listener.job = SimulatedJob(config, Costs(), NO_FAULTS, loop, listener, keeps_report=False, audit=audit)
    try:
        loop.run_until_complete(loop.create_task(listener.job.run(), name="run"))
    finally:
        loop.finish()


def sit_simulated(folder: Path, steps: int, until: float) -> None:
    """One sitting of a simulated run, whose samples go to `taken.jsonl`."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / "taken.jsonl"
    with log.open("ab") as file:
        simulate(folder, steps, Sampler(file, 1 + max((each.sitting for each in read(log)), default=-1), until))


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
    return sum(1 for folder in Path("/dev/shm").glob(f"asyncflow-{driver.pid}-*") for _ in folder.rglob("*"))


def read(path: Path) -> list[Taken]:
    """Samples of all sittings so far."""
    return [msgspec.json.decode(line, type=Taken) for line in path.read_bytes().splitlines()] if path.exists() else []


def step_seconds(rows: Iterable[Mapping[str, Any]]) -> dict[int, float]:
    """Seconds of each step, from the rows of metrics."""
    return {row["step"]: row["perf/step_seconds"] for row in rows}


def report(mode: str, folder: Path) -> list[str]:
    """Print what a mode's run takes. Returns what has grown."""
    taken = read(folder / "taken.jsonl")
    if mode == VIRTUAL:
        seconds = {each.step: each.seconds for each in taken}
    else:
        seconds = step_seconds(lines(folder / "run" / "metrics.jsonl"))
    if not taken or not seconds:
        return []
    what = windows(0, max(seconds) + 1)
    found = all_grown(taken, seconds)
    print(f"{mode}: {max(seconds) + 1} steps in {taken[-1].sitting + 1} sittings; compared {what.early} with {what.late}")
    print(f"  seconds a step, quickest quarter: {_quick(seconds, what.early):.3f} -> {_quick(seconds, what.late):.3f}")
    for name in sorted(taken[-1].processes):
        of_windows = [[each.processes[name] for each in taken if each.step in window and name in each.processes] for window in what]
        if all(of_windows):
            before, after = ([statistics.median(column) for column in zip(*of, strict=True)] for of in of_windows)
            print(
                f"  {name}: {before[0] / 2**20:.1f} -> {after[0] / 2**20:.1f} MiB, handles {before[1]:g} -> {after[1]:g}, "
                f"threads {before[2]:g} -> {after[2]:g}"
            )
    longest = max(({each.sitting for each in taken}), key=lambda n: sum(each.sitting == n for each in taken))
    for name, slope in slopes([each for each in taken if each.sitting == longest]).items():
        print(f"  {name}: {slope / 1024:+.2f} KiB a step in sitting {longest}")
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
    parser.add_argument("--virtual", action="store_true", help="a simulated run alone, of 200,000 steps, say")
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    if options.virtual:
        if num_steps(options.folder / VIRTUAL / "run") < options.steps:
            sit_simulated(options.folder / VIRTUAL, options.steps, end)
        return int(bool(report(VIRTUAL, options.folder / VIRTUAL)))
    modes = options.mode or list(MODES)
    while time.monotonic() < end:
        done = {mode: num_steps(options.folder / mode / "run") for mode in modes}
        left = [mode for mode in sorted(done, key=lambda mode: done[mode]) if done[mode] < options.steps]
        if not left:
            break
        sit(left[0], options.folder / left[0], options.steps, end)
    found = [line for mode in modes for line in report(mode, options.folder / mode)]
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main())
