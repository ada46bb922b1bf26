"""Whole real runs under faults, `python -m tests.soak.run --minutes 60 --results soak.jsonl`; a round again: `--only SEED`.

    round: a mode, a seed --> asyncflow train --resume, again and again until it is finished
             ^ at random times: a fault of a role (driver, trainer, rollout, evaluator, reference, reward, storage), or a full disk
             after each attempt: the laws, on what is on the disk
             at the end: the bits of an undisturbed run, where the mode is deterministic

Each round leaves a line in the results file: its seed, faults by kind and role, attempts, violations, and the seconds from each
fault to the next committed step, less a step. A session goes on with the seeds where the last one ended. The exit code is 1 if any
round in the file has violated a law.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
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
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
import yaml
from safetensors.numpy import load_file

from asyncflow.checkpoint.folder import Checkpoints
from asyncflow.config import parse
from asyncflow.run.factories import make_schedule
from asyncflow.telemetry.certificate import read_certificate
from asyncflow.types import RunError
from tests.soak.faults import FAULTS, Impossible, fill

ROOT: Final = Path(__file__).parents[2]
STEPS, PROMPTS, GROUP = 48, 4, 4
DISK_BYTES: Final = 256 << 20
ATTEMPT_SECONDS: Final = 240.0
"""An attempt that has not ended by then hangs."""
ENDED_SECONDS: Final = 30.0
"""So long a run's processes may be there after its driver."""
MOST_ATTEMPTS: Final = 60
KIND: Final = ("kill", "kill", "kill", "stop", "stop", "slow", "handles", "memory", "cut", "fill")
"""Kinds of faults, as often as they are drawn."""

MODES: Final[dict[str, dict[str, Any]]] = {
    "synchronous": {"schedule": "synchronous"},
    "periodic": {"schedule": "periodic", "eval": {"num_workers": 1}},
    "delayed": {"schedule": "delayed", "train": {"old": "previous"}},
    "sub_step": {"schedule": "sub_step"},
    "bounded": {"schedule": {"name": "bounded", "max_staleness": 2}},
    "periodic, two ranks": {"schedule": "periodic", "plan": {"train": {"dp": 2}}},
    "delayed, tasks": {
        "schedule": "delayed",
        "train": {"reference": "task"},
        "algorithm": {"name": "grpo", "kl_coefficient": 0.1},
        "reward": {"place": "task"},
    },
}
DETERMINISTIC: Final = {mode for mode in MODES if mode.startswith(("synchronous", "periodic", "delayed"))}


@dataclass
class Round:
    """Result of a round. `faults`: how many, by kind and role. `recoveries`: (kind and role, seconds)."""

    seed: int
    mode: str
    seconds: float = 0.0
    attempts: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    impossible: dict[str, int] = field(default_factory=dict)
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)


def configuration(mode: str, folder: Path) -> dict[str, Any]:
    """A run of the tiny model whose steps take some tenths of a second."""
    tree: dict[str, Any] = {
        "run": {"name": "run", "dir": str(folder), "steps": STEPS, "stall_timeout_seconds": 60},
        "model": {"path": str(ROOT / "recipes" / "models" / "tiny-arithmetic")},
        "data": {"path": "generated:arithmetic", "limit": 256},
        "rollout": {"num_workers": 2, "num_slots": 16, "group_size": GROUP, "max_new_tokens": 32, "max_restarts": 1000},
        "train": {"prompts_per_step": PROMPTS, "learning_rate": 1e-4, "accumulate": "exact", "max_restarts": 1000},
        "queue": {"lease_seconds": 20},
        "eval": {"path": "generated:arithmetic", "num_prompts": 4, "every_steps": 4},
        "telemetry": {"trackers": [], "fingerprints": True},
        "checkpoint": {"every_steps": 2},
    }
    for section, keys in MODES[mode].items():
        tree[section] = {**tree[section], **keys} if isinstance(keys, dict) and section in tree else keys
    return tree


# -- the run ----------------------------------------------------------------------------------------------------------------


class Attempt:
    """One `asyncflow train --resume`, until it ends."""

    def __init__(self, config: Path, said: Path) -> None:
        command = [sys.executable, "-c", "from asyncflow.cli import main; main()", "train", str(config), "--resume"]
        with said.open("ab") as output:
            self._process = subprocess.Popen(command, stdout=output, stderr=output, cwd=ROOT, start_new_session=True)
        self.driver = psutil.Process(self._process.pid)
        self.began = time.monotonic()
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
                    words = process.cmdline()
                    name = next((word for word in words if "/" in word and word.partition("/")[0] in ROLES), "")
                    if "asyncflow.cluster.child" in words and name:
                        found.setdefault(name.partition("/")[0], []).append(process)
                    elif any("asyncflow.rewards" in word for word in words):
                        found.setdefault("scorer", []).append(process)
        return found

    def end(self) -> None:
        """Kill the driver; its workers end with it."""
        with contextlib.suppress(psutil.NoSuchProcess):
            self.driver.resume()
        self._process.kill()
        self.status = self._process.wait()


ROLES: Final = {"trainer", "rollout", "evaluator", "reference", "reward", "storage"}


def num_steps(run_dir: Path) -> int:
    """Number of steps whose metrics are written."""
    path = run_dir / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@contextlib.contextmanager
def own_disk() -> Iterator[tuple[Path, bool]]:
    """A folder for a run, on a small file system of its own where the system lets us mount one."""
    folder = Path(tempfile.mkdtemp(prefix="asyncflow-soak-"))
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(folder)]
    is_own = subprocess.run(mount, capture_output=True, check=False).returncode == 0
    try:
        yield folder, is_own
    finally:
        if is_own:
            subprocess.run(["umount", "-l", str(folder)], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def soak(seed: int, expected: dict[str, str]) -> Round:
    """One round. `expected`: by mode, hashes of the final weights of runs that nothing has disturbed, to which this may add one."""
    mode = list(MODES)[seed % len(MODES)]
    done, rng, began = Round(seed, mode), random.Random(seed), time.monotonic()
    if mode in DETERMINISTIC and mode not in expected:
        expected[mode] = undisturbed(mode)
    with own_disk() as (folder, has_own_disk):
        config, said = folder / "config.yaml", folder / "said.log"
        config.write_text(yaml.safe_dump(configuration(mode, folder)))
        run_dir, pids, without_progress, most = folder / "run", set[int](), 0, 0
        while done.attempts < MOST_ATTEMPTS and not done.violations:
            attempt = Attempt(config, said)
            done.attempts += 1
            pids.add(attempt.driver.pid)
            disturb(attempt, run_dir, done, rng, has_own_disk)
            check_gone(run_dir, done)
            check_disk(mode, run_dir, done)
            if attempt.status == 2:
                done.violations.append(f"an attempt was refused: {said.read_text()[-400:]}")
            if attempt.status == 0:
                break
            steps = num_steps(run_dir)
            without_progress, most = (0, steps) if steps > most else (without_progress + 1, most)
        else:
            if not done.violations:
                done.violations.append(f"the run has not come to its end in {done.attempts} attempts")
        if not done.violations:
            check_end(mode, run_dir, done, expected)
        left = [path.name for path in Path("/dev/shm").glob("asyncflow-*") if path.name.split("-")[1] in map(str, pids)]
        if left and not done.violations:
            done.violations.append(f"files are left in shared memory: {left}")
    done.seconds = time.monotonic() - began
    return done


def disturb(attempt: Attempt, run_dir: Path, done: Round, rng: random.Random, has_own_disk: bool) -> None:
    """Faults at random times until the attempt ends."""
    next_fault = time.monotonic() + rng.uniform(0.5, 8.0)
    while attempt.is_running():
        now = time.monotonic()
        if now - attempt.began > ATTEMPT_SECONDS:
            done.violations.append(f"an attempt has not ended in {ATTEMPT_SECONDS:g} s")
            attempt.end()
            return
        if now < next_fault:
            time.sleep(0.05)
            continue
        next_fault = strike(attempt, run_dir, done, rng, has_own_disk) + rng.uniform(0.2, 3.0)


def strike(attempt: Attempt, run_dir: Path, done: Round, rng: random.Random, has_own_disk: bool) -> float:
    """One fault. Returns when it was over."""
    kind, roles = rng.choice(KIND), attempt.roles()
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
    done.faults[name] = done.faults.get(name, 0) + 1
    watch = threading.Thread(target=recovery, args=(run_dir, steps, at + lasted, name, done), daemon=True)
    watch.start()
    return time.monotonic()


def recovery(run_dir: Path, steps: int, over: float, name: str, done: Round) -> None:
    """Note how long after the fault was over the next step was committed, less what a step takes."""
    while time.monotonic() - over < ATTEMPT_SECONDS:
        with contextlib.suppress(OSError, ValueError):
            if num_steps(run_dir) > steps:
                took = [json.loads(line)["perf/step_seconds"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
                done.recoveries.append((name, round(max(0.0, time.monotonic() - over - statistics.median(took)), 3)))
                return
        if not run_dir.parent.exists():
            return
        time.sleep(0.02)


# -- the laws ---------------------------------------------------------------------------------------------------------------


def lines(path: Path) -> list[dict[str, Any]]:
    """Whole lines of a file; a half-written last one is no line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def check_gone(run_dir: Path, done: Round) -> None:
    """No process of the run is left."""
    deadline = time.monotonic() + ENDED_SECONDS
    while left := [p.pid for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or [])]:
        if time.monotonic() > deadline:
            done.violations.append(f"processes are left: {left}")
            return
        time.sleep(0.05)


def check_disk(mode: str, run_dir: Path, done: Round) -> None:
    """What an attempt that has ended in any way leaves: whole checkpoints, steps in order, versions within their intervals."""
    steps = [row["step"] for row in lines(run_dir / "metrics.jsonl")]
    if steps != list(range(len(steps))):
        done.violations.append(f"metrics are of steps {steps}")
    for file in ("fingerprints.jsonl", "fingerprints.1.jsonl"):
        printed = lines(run_dir / file)
        numbers = [row["step"] for row in printed]
        if numbers != sorted(set(numbers)):
            done.violations.append(f"{file} has steps {numbers}")
    schedule = make_schedule(parse(configuration(mode, run_dir.parent)))
    trained: Counter[int] = Counter()
    for path in sorted(run_dir.glob("fingerprints*.jsonl")):
        for step in lines(path):
            interval = schedule.interval(step["step"])
            for row in (row for group in step["groups"] for row in group["rows"]):
                trained[row["row"]] += 1
                if not all(interval.low <= version <= interval.high for version in row["spans"][1::2]):
                    done.violations.append(f"row {row['row']} of step {step['step']} was made by {row['spans']}, not {interval}")
    if twice := [row for row, count in trained.items() if count > 1]:
        done.violations.append(f"rows are trained twice: {twice[:8]}")
    checkpoints = Checkpoints(run_dir / "checkpoints", 2)
    for version in checkpoints.versions():
        try:
            checkpoints.check(version)
        except RunError as error:
            done.violations.append(str(error))


def check_end(mode: str, run_dir: Path, done: Round, expected: dict[str, str]) -> None:
    """The run is finished: every prompt was trained once, and the bits are those of a run that nothing has disturbed."""
    steps = [row["step"] for row in lines(run_dir / "metrics.jsonl")]
    if len(steps) != STEPS:
        done.violations.append(f"metrics are of {len(steps)} steps")
    groups = Counter(
        group["group"] for path in run_dir.glob("fingerprints*.jsonl") for step in lines(path) for group in step["groups"]
    )
    if groups != Counter(dict.fromkeys(range(STEPS * PROMPTS), 1)):
        odd = sorted({*range(STEPS * PROMPTS)} ^ groups.keys())
        done.violations.append(f"groups were skipped or added: {odd[:8]}")
    certificate = read_certificate(run_dir)
    if certificate is None or certificate.steps != STEPS:
        done.violations.append("there is no certificate of the whole run")
    elif mode in DETERMINISTIC and certificate.voided:
        done.violations.append(f"the certificate is void: {certificate.voided}")
    if mode in DETERMINISTIC and (found := weights_hash(run_dir)) != expected[mode]:
        done.violations.append(f"the final weights are others than those of an undisturbed run: {found[:12]}")


def weights_hash(run_dir: Path) -> str:
    """Hash of the final model's tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(load_file(run_dir / "model" / "model.safetensors").items()):
        digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()


def undisturbed(mode: str) -> str:
    """Hash of the final weights of a run that nothing disturbs."""
    with tempfile.TemporaryDirectory(prefix="asyncflow-soak-") as scratch:
        config = Path(scratch) / "config.yaml"
        config.write_text(yaml.safe_dump(configuration(mode, Path(scratch))))
        attempt = Attempt(config, Path(scratch) / "said.log")
        while attempt.is_running():
            time.sleep(0.1)
        if attempt.status:
            raise SystemExit(f"an undisturbed run has failed: {(Path(scratch) / 'said.log').read_text()[-800:]}")
        return weights_hash(Path(scratch) / "run")


# -- sessions ---------------------------------------------------------------------------------------------------------------


def told(rounds: list[dict[str, Any]]) -> str:
    """Counts of all rounds in the file, in words."""
    faults, impossible, recoveries = Counter[str](), Counter[str](), list[float]()
    for each in rounds:
        faults.update(each["faults"])
        impossible.update(each["impossible"])
        recoveries += [seconds for _, seconds in each["recoveries"]]
    violations = [f"seed {each['seed']} ({each['mode']}): {why}" for each in rounds for why in each["violations"]]
    parts = [
        f"{len(rounds)} rounds, {sum(each['attempts'] for each in rounds)} attempts, {sum(faults.values())} faults in "
        f"{sum(each['seconds'] for each in rounds) / 3600:.2f} hours, {len(violations)} violations",
        ", ".join(f"{name}: {count}" for name, count in sorted(faults.items())),
    ]
    if impossible:
        parts.append("could not happen: " + ", ".join(f"{name}: {count}" for name, count in sorted(impossible.items())))
    if len(recoveries) > 1:
        deciles = statistics.quantiles(recoveries, n=10)
        parts.append(f"recovery, less a step: median {statistics.median(recoveries):.1f} s, nine of ten under {deciles[-1]:.1f} s")
    return "\n".join(parts + violations)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="no round is begun after so many")
    parser.add_argument("--results", type=Path, default=Path("runs/soak.jsonl"), metavar="FILE")
    parser.add_argument("--only", type=int, metavar="SEED", help="this round alone; nothing is written")
    options = parser.parse_args()
    rounds = [json.loads(line) for line in options.results.read_text().splitlines()] if options.results.exists() else []
    expected: dict[str, str] = {}
    if options.only is not None:
        done = soak(options.only, expected)
        print(told([asdict(done)]))
        return int(bool(done.violations))
    options.results.parent.mkdir(parents=True, exist_ok=True)
    end, seed = time.monotonic() + 60 * options.minutes, 1 + max((each["seed"] for each in rounds), default=-1)
    while time.monotonic() < end:
        done = soak(seed, expected)
        rounds.append(asdict(done))
        with options.results.open("a") as file:
            file.write(json.dumps(rounds[-1]) + "\n")
        print(f"seed {seed}: {told(rounds[-1:])}", flush=True)
        seed += 1
    print(f"\nin all: {told(rounds)}")
    return int(any(each["violations"] for each in rounds))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.exit(main())
