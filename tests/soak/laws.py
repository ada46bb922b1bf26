"""Laws of a run, checked on what is on the disk: every prompt trained once, in order, by versions within their intervals."""

from __future__ import annotations

import hashlib
import json
import signal
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import psutil
from safetensors.numpy import load_file

from asyncflow.checkpoint.folder import Checkpoints
from asyncflow.config import parse
from asyncflow.run.factories import make_schedule
from asyncflow.telemetry.certificate import read_certificate
from asyncflow.types import RunError, UserError
from tests.processes import alive
from tests.soak.modes import MODES, PROMPTS, STEPS, configuration

ENDED_SECONDS: Final = 30.0
"""So long a run's processes may be there after its driver."""
PRINTS: Final = ("fingerprints.jsonl", "fingerprints-*.jsonl")
"""Files of the policy's trainers; the critic's are beside them."""
STOPPED_SECONDS: Final = 30.0
"""Processes that have been stopped for so long together may make a run stand still longer than it takes for a fault of its own."""
UNIT_RESTARTS: Final = 3
"""So often a storage unit is started again."""
CRITICS_PRINTS: Final = "fingerprints.critic.jsonl"


@dataclass
class Round:
    """Result of a round. `faults`: how many, by kind and role. `recoveries`: (kind and role, seconds). `checking`: seconds that
    looking at the disk has taken between attempts."""

    seed: int
    mode: str
    seconds: float = 0.0
    attempts: int = 0
    faults: dict[str, int] = field(default_factory=dict)
    impossible: dict[str, int] = field(default_factory=dict)
    recoveries: list[tuple[str, float]] = field(default_factory=list)
    violations: list[str] = field(default_factory=list)
    checking: float = 0.0


def lines(path: Path) -> list[Any]:
    """Whole lines of a file; a half-written last one is no line."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_bytes().splitlines(keepends=True) if line.endswith(b"\n")]


def prints(run_dir: Path) -> list[list[dict[str, Any]]]:
    """What each trainer's file says of its steps."""
    return [lines(path) for pattern in PRINTS for path in sorted(run_dir.glob(pattern))]


def check_gone(run_dir: Path, seen: set[psutil.Process], done: Round) -> None:
    """No process of the run is left. `seen`: those that it is known to have had."""
    deadline = time.monotonic() + ENDED_SECONDS
    while left := alive(seen) + [p for p in psutil.process_iter(["cmdline"]) if str(run_dir) in (p.info["cmdline"] or [])]:
        if time.monotonic() > deadline:
            done.violations.append(f"processes are left: {left}")
            return
        time.sleep(0.05)


def is_explained(mode: str, faults: Sequence[tuple[str, float]]) -> bool:
    """Whether an attempt may fail by these faults (kind and role, seconds), where `--resume` goes on:

    * a full disk, a shortage of memory or of handles, whoever has it;
    * a connection that is cut: a worker that fails by it before anything was trained would fail again, as far as the run knows;
    * whatever happens to the run's Redis server;
    * processes that were stopped for `STOPPED_SECONDS` together;
    * the death of a storage unit, also by that of the fork server, whose rows go with it, or that dies more often than it is
      started again.
    """
    names = [name for name, _ in faults]
    if any(name.startswith(("fill", "handles", "memory", "cut")) or name.endswith(" redis") for name in names):
        return True
    if sum(seconds for name, seconds in faults if name.startswith(("stop", "slow"))) >= STOPPED_SECONDS:
        return True
    queue = MODES[mode].tree.get("queue", {})
    of_units = sum(name in ("kill storage", "kill fork server") for name in names) if queue.get("place") == "workers" else 0
    return of_units > (UNIT_RESTARTS if "storage" in queue else 0)


def check_status(status: int | None, faults: Sequence[tuple[str, float]], said: str, done: Round) -> None:
    """An attempt has ended in order, was killed, or has failed by one of its faults. `said`: what it has printed."""
    is_killed = status == -signal.SIGKILL and any(name == "kill driver" for name, _ in faults)
    if status and not is_killed and not is_explained(done.mode, faults):
        names, words = ", ".join(name for name, _ in faults) or "there was none", said.rstrip().rpartition("\n")[2]
        done.violations.append(f"an attempt ended with exit {status}, which none of its faults explains ({names}): {words}")


def check_disk(mode: str, run_dir: Path, done: Round) -> None:
    """What an attempt that has ended in any way leaves: whole checkpoints, steps in order, versions within their intervals."""
    steps = [row["step"] for row in lines(run_dir / "metrics.jsonl")]
    if steps != list(range(len(steps))):
        done.violations.append(f"metrics are of steps {steps}")
    for printed in (*prints(run_dir), lines(run_dir / CRITICS_PRINTS)):
        numbers = [row["step"] for row in printed]
        if numbers != sorted(set(numbers)):
            done.violations.append(f"fingerprints are of steps {numbers}")
    schedule = make_schedule(parse(configuration(mode, run_dir.parent)))
    trained: Counter[int] = Counter()
    for step in (step for printed in prints(run_dir) for step in printed):
        interval, number = schedule.interval(step["step"]), step["step"]
        if odd := [each["group"] for each in step["groups"] if each["group"] // PROMPTS != number]:
            done.violations.append(f"groups {odd} were trained in step {number}")
        for row in (row for group in step["groups"] for row in group["rows"]):
            trained[row["row"]] += 1
            if not all(interval.low <= version <= interval.high for version in row["spans"][1::2]):
                done.violations.append(f"row {row['row']} of step {number} was made by {row['spans']}, not {interval}")
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
    of_critic = lines(run_dir / CRITICS_PRINTS)
    for trainers in (prints(run_dir), [of_critic] if of_critic else []):
        groups = Counter(group["group"] for printed in trainers for step in printed for group in step["groups"])
        if trainers and groups != Counter(dict.fromkeys(range(STEPS * PROMPTS), 1)):
            odd = sorted({*range(STEPS * PROMPTS)} ^ groups.keys())
            done.violations.append(f"groups were skipped or added: {odd[:8]}")
    certificate = None
    try:
        certificate = read_certificate(run_dir)
    except UserError as error:  # a part of one
        done.violations.append(str(error))
    if certificate is None or certificate.steps != STEPS:
        done.violations.append("there is no certificate of the whole run")
    elif MODES[mode].is_deterministic and not MODES[mode].is_served and certificate.voided:  # a run knows nothing of its clients
        done.violations.append(f"the certificate is void: {certificate.voided}")
    if MODES[mode].is_deterministic and (found := weights_hash(run_dir)) != expected[mode]:
        done.violations.append(f"the final weights are others than those of an undisturbed run: {found[:12]}")


def check_prompts(folder: Path, done: Round) -> None:
    """Prompts that a client has put were trained in its order; one that the service has acknowledged was not left out."""
    trained: dict[int, dict[str, int]] = dict(lines(folder / "trained.jsonl"))  # a step that was lost is trained again
    numbers = [number for step in sorted(trained) for _, number in sorted(trained[step].items(), key=lambda item: int(item[0]))]
    if sorted(trained) != list(range(STEPS)) or len(numbers) != STEPS * PROMPTS:
        done.violations.append(f"a client has trained {len(numbers)} prompts in the steps {sorted(trained)}")
    if numbers != sorted(set(numbers)):
        done.violations.append(f"prompts were trained in another order, or twice: {numbers}")
    acknowledged = {number for number, is_answered in lines(folder / "put.jsonl") if is_answered}
    if lost := sorted(number for number in acknowledged - set(numbers) if number < max(numbers, default=0)):
        done.violations.append(f"prompts that the service had acknowledged were lost: {lost[:8]}")


def weights_hash(run_dir: Path) -> str:
    """Hash of the final model's tensors, and of the critic's where there is one."""
    digest = hashlib.sha256()
    for folder in ("model", "critic"):
        for file in sorted((run_dir / folder).glob("*.safetensors")):
            for name, tensor in sorted(load_file(file).items()):
                digest.update(name.encode() + tensor.tobytes())
    return digest.hexdigest()
