"""Whole real runs under faults, `python -m tests.soak.run --minutes 60`; a round again: `--only SEED`.

    round: a mode, a seed --> asyncflow train --resume (or serve), again and again until it is finished
             ^ at random times: a fault of a role, which may be a Redis server or a client (companions.py), or a full disk
             after each attempt: the laws, on what is on the disk (laws.py)
             at the end: the bits of an undisturbed run, where the mode is deterministic

A sitting goes on with the seeds where the last one ended; docs/soak.jsonl and docs/soak.md have a line of each (record.py).
Measured are the seconds from each fault to the next committed step, less a step. The exit code is 1 if a law was violated.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Final

import psutil
import yaml

from asyncflow.cluster.fork_server import TITLE
from tests.soak.companions import ASYNCFLOW, Companions
from tests.soak.faults import FAULTS, Impossible, fill
from tests.soak.laws import Round, check_disk, check_end, check_gone, check_prompts, check_status, weights_hash
from tests.soak.modes import MODES, ROOT, configuration, plain
from tests.soak.record import RECORD, Sitting, read, write
from tests.suites import commit

DISK_BYTES: Final = 256 << 20
ATTEMPT_SECONDS: Final = 240.0
"""An attempt that has not ended by then, less what processes of it were stopped, hangs."""
HANG_SECONDS: Final = 150.0
"""An attempt that has trained no step for so long, less the same, hangs too."""
WORDS_SECONDS: Final = 10.0
"""For the words of a driver that is ended as it hangs."""
MOST_ATTEMPTS: Final = 60
KIND: Final = ("kill", "kill", "kill", "stop", "stop", "slow", "handles", "memory", "cut", "fill")
"""Kinds of faults, as often as they are drawn."""
BELOW: Final = {
    "asyncflow.rewards": "scorer",
    "asyncflow.environments": "environment",
    "fake_vllm.py": "vLLM",
    "vllm.entrypoints": "vLLM",
    TITLE: "fork server",
    "asyncflow.cluster.fork_server": "fork server",  # before it has that title
}
"""What the command lines of processes have that are no workers, and their roles."""


# -- the run ----------------------------------------------------------------------------------------------------------------


class Attempt:
    """One `asyncflow train --resume`, until it ends; `options` make another command of it."""

    def __init__(self, config: Path, said: Path, verb: str = "train", *options: str) -> None:
        command = [*ASYNCFLOW, verb, str(config), "--resume", *options]
        with said.open("ab") as output:
            self._process = subprocess.Popen(
                command,
                stdout=output,
                stderr=output,
                cwd=ROOT,
                start_new_session=True,
                env=os.environ | {"PYTHONFAULTHANDLER": "1"},
            )
        self.driver, self._said = psutil.Process(self._process.pid), said
        self.deadline = time.monotonic() + ATTEMPT_SECONDS
        self.num_steps, self.next_step_by = 0, time.monotonic() + HANG_SECONDS
        self.seen: set[psutil.Process] = set()
        self.faults: list[tuple[str, float]] = []  # kind and role, seconds
        self.status: int | None = None

    def is_running(self) -> bool:
        """Whether it has not ended yet."""
        self.status = self._process.poll()
        return self.status is None

    def roles(self) -> dict[str, list[psutil.Process]]:
        """Its processes by role."""
        found: dict[str, list[psutil.Process]] = {"driver": [self.driver]}
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in self.driver.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    if role := role_of(process.cmdline()):
                        found.setdefault(role, []).append(process)
                    self.seen.add(process)
        return found

    def end(self, *, hangs: bool = False) -> None:
        """Kill the driver; its workers end with it. One that hangs first says what it has below it, and where its threads are."""
        with contextlib.suppress(psutil.NoSuchProcess, psutil.TimeoutExpired):
            self.driver.resume()
            if hangs:
                with self._said.open("a") as said:
                    print(f"below the driver, {self.driver.status()}: {self.roles()}", file=said)
                self.driver.send_signal(signal.SIGABRT)
                self.driver.wait(WORDS_SECONDS)
        self._process.kill()
        self.status = self._process.wait()


def role_of(words: list[str]) -> str:
    """Role of a process below a driver, by its command line; empty: it has none of its own."""
    if "asyncflow.cluster.child" in words:
        return words[words.index("asyncflow.cluster.child") + 2].partition("/")[0]
    return next((role for part, role in BELOW.items() if any(part in word for word in words)), "")


def num_steps(run_dir: Path) -> int:
    """Number of steps whose metrics are written."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextlib.contextmanager
def own_disk() -> Iterator[tuple[Path, bool]]:
    """A folder for a run, on a small file system of its own where the system lets us mount one. What the soak itself writes is
    beside it."""
    base = Path(tempfile.mkdtemp(prefix="asyncflow-soak-"))
    (folder := base / "disk").mkdir(mode=0o700)
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES},mode=700", "tmpfs", str(folder)]
    is_own = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield folder, is_own
    finally:
        if is_own:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(base, ignore_errors=True)


def soak(seed: int, expected: dict[str, str]) -> Round:
    """One round. `expected`: by mode, hashes of the final weights of runs that nothing has disturbed, to which this may add one."""
    name = list(MODES)[seed % len(MODES)]
    mode, done, rng, began = MODES[name], Round(seed, name), random.Random(seed), time.monotonic()
    if mode.is_deterministic and name not in expected:
        expected[name] = undisturbed(name)
    with contextlib.ExitStack() as ending:
        folder, has_own_disk = ending.enter_context(own_disk())
        config, said, run_dir = folder / "config.yaml", folder / "said.log", folder / "run"
        companions = Companions(mode.companions, folder)
        ending.callback(companions.end)
        pids = set[int]()
        while done.attempts < MOST_ATTEMPTS and not done.violations:
            companions.until_ready()
            config.write_text(yaml.safe_dump(configuration(name, folder)))
            serve = ("serve", "--listen", f"unix:{folder / 'http.sock'}") if mode.is_served else ("train",)
            attempt = Attempt(config, said, *serve)
            ending.callback(attempt.end)
            done.attempts += 1
            pids.add(attempt.driver.pid)
            disturb(attempt, companions, run_dir, done, rng, has_own_disk)
            check_gone(run_dir, attempt.seen, done)
            gone = time.monotonic()
            check_disk(name, run_dir, done)
            done.checking += time.monotonic() - gone
            if attempt.status == 2 and not said.read_text().rstrip().endswith(AWAY):
                done.violations.append(f"an attempt was refused: {said.read_text().rstrip().splitlines()[-1]}")
            if attempt.status != 2 and not done.violations:
                check_status(attempt.status, attempt.faults, said.read_text(), done)
            if attempt.status == 0:
                if (kept := companions.num_keys()) and not any(name.endswith(" redis") for name, _ in attempt.faults):
                    done.violations.append(f"the run has left {kept} values in Redis")
                break
        else:
            if not done.violations:
                done.violations.append(f"the run has not come to its end in {done.attempts} attempts")
        if not done.violations:
            check_end(name, run_dir, done, expected)
            if mode.has_own_prompts:
                check_prompts(folder.parent, done)
        left = [path.name for path in Path("/dev/shm").glob("asyncflow-*") if path.name.split("-")[1] in map(str, pids)]
        if left and not done.violations:
            done.violations.append(f"files are left in shared memory: {left}")
        if done.violations:
            keep(seed, folder)
    done.seconds = time.monotonic() - began
    return done


AWAY: Final = "is it running, and may this user connect?"
"""The last words of a run that begins while its Redis server is away, which the soak has killed."""


def keep(seed: int, folder: Path) -> None:
    """Keep what a violated law is to be understood from."""
    kept = ROOT / "runs" / f"soak-{seed}"
    shutil.rmtree(kept, ignore_errors=True)
    shutil.copytree(folder.parent, kept, ignore=shutil.ignore_patterns("*.sock", "filler"))


def disturb(attempt: Attempt, companions: Companions, run_dir: Path, done: Round, rng: random.Random, has_own_disk: bool) -> None:
    """Faults at random times until the attempt ends. Every second one comes after a step: else slow machines would see none."""
    next_fault = time.monotonic() + rng.uniform(0.5, 8.0)
    awaited = num_steps(run_dir) if rng.random() < 0.5 else -1
    while attempt.is_running():
        companions.keep()
        now, steps = time.monotonic(), num_steps(run_dir)
        if steps != attempt.num_steps:
            attempt.num_steps, attempt.next_step_by = steps, now + HANG_SECONDS
        if now > min(attempt.deadline, attempt.next_step_by):
            limit = f"ended in {ATTEMPT_SECONDS:g} s" if now > attempt.deadline else f"trained a step in {HANG_SECONDS:g} s"
            done.violations.append(f"an attempt has not {limit}: step {steps}")
            attempt.end(hangs=True)
            return
        if now < next_fault or steps <= awaited:
            time.sleep(0.05)
            continue
        next_fault = strike(attempt, companions, run_dir, done, rng, has_own_disk) + rng.uniform(0.2, 3.0)
        awaited = num_steps(run_dir) if rng.random() < 0.5 else -1


def strike(attempt: Attempt, companions: Companions, run_dir: Path, done: Round, rng: random.Random, has_own_disk: bool) -> float:
    """One fault. Returns when it was over."""
    kind, roles = rng.choice(KIND), attempt.roles() | companions.roles()
    role = rng.choice(sorted(roles))
    name = "fill disk" if kind == "fill" else f"{kind} {role}"
    if role == "driver" and kind in ("handles", "memory"):
        role = next((other for other in sorted(roles) if other != "driver"), "driver")
        name = f"{kind} {role}"
    steps, at = num_steps(run_dir), time.monotonic()
    try:
        if kind == "fill":
            if not has_own_disk:
                raise Impossible("there is no file system of its own")
            lasted = fill(run_dir.parent, rng)
        else:
            lasted = FAULTS[kind](rng.choice(roles[role]), rng)
    except (Impossible, psutil.Error, OSError, ValueError) as error:
        why = f"{name}: {type(error).__name__}"
        done.impossible[why] = done.impossible.get(why, 0) + 1
        return time.monotonic()
    attempt.faults.append((name, lasted))
    done.faults[name] = done.faults.get(name, 0) + 1
    attempt.deadline += lasted
    attempt.next_step_by += lasted
    watch = threading.Thread(target=recovery, args=(run_dir, steps, at + lasted, name, done, done.checking), daemon=True)
    watch.start()
    return time.monotonic()


def recovery(run_dir: Path, steps: int, over: float, name: str, done: Round, checking: float) -> None:
    """Note how long after the fault was over the next step was committed, less what a step takes, and what the laws took meanwhile:
    `checking` is how much they had taken at the fault."""
    while time.monotonic() - over < ATTEMPT_SECONDS:
        with contextlib.suppress(OSError, ValueError):
            if num_steps(run_dir) > steps:
                took = [json.loads(line)["perf/step_seconds"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
                lost = time.monotonic() - over - (done.checking - checking) - statistics.median(took)
                done.recoveries.append((name, round(max(0.0, lost), 3)))
                return
        if not run_dir.parent.exists():
            return
        time.sleep(0.02)


def undisturbed(mode: str) -> str:
    """Hash of the final weights of a run that nothing disturbs."""
    with tempfile.TemporaryDirectory(prefix="asyncflow-soak-") as scratch:
        config = Path(scratch) / "config.yaml"
        config.write_text(yaml.safe_dump(plain(mode, Path(scratch))))
        attempt = Attempt(config, Path(scratch) / "said.log")
        try:
            while attempt.is_running():
                time.sleep(0.1)
        finally:
            attempt.end()
        if attempt.status:
            raise SystemExit(f"an undisturbed run has failed: {(Path(scratch) / 'said.log').read_text()[-800:]}")
        return weights_hash(Path(scratch) / "run")


# -- sittings ---------------------------------------------------------------------------------------------------------------


def told(done: Round) -> str:
    """A round, in words."""
    faults = ", ".join(f"{name}: {count}" for name, count in sorted(done.faults.items()))
    first = f"seed {done.seed} ({done.mode}): {done.attempts} attempts, {sum(done.faults.values())} faults in {done.seconds:.0f} s"
    return "\n".join([f"{first}, {len(done.violations)} violations: {faults}", f"  seconds: {done.recoveries}", *done.violations])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="no round is begun after so many")
    parser.add_argument("--only", type=int, metavar="SEED", help="this round alone; nothing is recorded")
    options = parser.parse_args()
    expected: dict[str, str] = {}
    if options.only is not None:
        done = soak(options.only, expected)
        print(told(done))
        return int(bool(done.violations))
    before, rounds = read(RECORD), list[Round]()
    sitting = Sitting(datetime.now(UTC).date().isoformat(), commit(), round(os.getloadavg()[0], 1))
    end, seed = time.monotonic() + 60 * options.minutes, 1 + max((each.seeds[1] for each in before), default=-1)
    while time.monotonic() < end:
        name = list(MODES)[seed % len(MODES)]
        if MODES[name].is_missing:
            print(f"NOTE: seed {seed} ({name}) is left out: there is no {MODES[name].needs} here", flush=True)
        else:
            rounds.append(soak(seed, expected))
            print(told(rounds[-1]), flush=True)
            sitting.count(rounds)
            write(RECORD, [*before, sitting])  # after each: the next one may be cut short
        seed += 1
    return int(bool(sitting.violations))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main())
