"""`asyncflow verify`: the proof that timing changes nothing, by running a configuration twice and killing a worker on the way."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from asyncflow.cli.display import Display, sentence
from asyncflow.config import Config, dump, load, parse
from asyncflow.loops.samples import EVALUATE_TASK
from asyncflow.run.factories import make_algorithm, make_schedule, why_never_deterministic
from asyncflow.run.job import Job, run_with_signals
from asyncflow.run.state.resume import CRITIC_FINGERPRINTS
from asyncflow.settings import refuse_overrides
from asyncflow.telemetry.certificate import CERTIFICATE_FILE, Certificate
from asyncflow.telemetry.equivalence import Kill, compare
from asyncflow.telemetry.fingerprints import FINGERPRINTS_FILE, StepPrint, read_fingerprints
from asyncflow.telemetry.trace import SPANS_FILE, read_spans
from asyncflow.threads import run_ready
from asyncflow.types import RunError, UserError

DELAY_SECONDS = 0.05
SETTINGS: dict[str, Any] = {
    "run": {"overwrite": True},
    "rollout": {"num_workers": 2, "num_threads": 1, "max_restarts": 3},
    "weight_sync": {"min_healthy_workers": 1},
    "train": {"num_threads": 1},
    "telemetry": {"fingerprints": True, "trackers": []},
    "eval": {"path": None, "num_workers": 0},
    "cluster": "local",
}
"""Settings of both runs, whatever the configuration says."""
GIVEN = ["reward.delays", "cluster"] + [
    f"{section}.{key}" for section, keys in SETTINGS.items() if isinstance(keys, dict) for key in keys
]


def verify(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each of the two runs.")] = 20,
) -> None:
    """Run twice from one seed, with different delays, and a worker killed in the second run; compare the two bit by bit.

    Synchronous with periodic; with schedule=delayed, that with itself.
    Exit code 0: equal, 1: different, 2: could not run, or the runs are no proof.
    """
    refuse_overrides(overrides or [], ["run.steps"], "verify sets {key} itself, by --steps")
    refuse_overrides(overrides or [], GIVEN, "verify sets {key} itself")
    given = load(config, overrides or [])
    check_engine(given)
    undisturbed, disturbed = variants(given, steps)
    try:
        certificate, _ = run_ready(_run(undisturbed, None))
        other, kill = run_ready(_run(disturbed, max(1, steps // 2)))
        result = compare(
            (undisturbed.run.name, disturbed.run.name),
            hashlib.sha256(dump(given).encode()).hexdigest(),
            _fingerprints(undisturbed, disturbed, FINGERPRINTS_FILE),
            (certificate, other),
            read_spans(disturbed.run_dir / SPANS_FILE),
            kill,
            _fingerprints(undisturbed, disturbed, CRITIC_FINGERPRINTS) if make_algorithm(given).critic is not None else None,
        )
    except* (RunError, OSError) as group:
        raise UserError(f"could not verify: {sentence(group)}") from group
    path = disturbed.run.dir / CERTIFICATE_FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    print("\n".join([*result.lines, f"{'written to':<16} {path}"]))
    raise typer.Exit({"equal": 0, "differs": 1, "void": 2}[result.verdict])


def _fingerprints(undisturbed: Config, disturbed: Config, file: str) -> tuple[list[StepPrint], list[StepPrint]]:
    """Fingerprints of one model in both runs. Raises `RunError` if there are none."""
    return read_fingerprints(undisturbed.run_dir / file), read_fingerprints(disturbed.run_dir / file)


def check_engine(given: Config) -> None:
    """Check that the two runs could be equal to the bit. Raises `UserError` if the rollout engine is known to promise none."""
    if why := why_never_deterministic(given):
        raise UserError(
            f"with rollout.engine={given.rollout.engine.name} no two runs have the same bits to compare ({why}): verify the "
            f"configuration with rollout.engine=slots"
        )


def variants(given: Config, steps: int) -> tuple[Config, Config]:
    """Configurations of the two runs. Raises `UserError` if in this schedule timing decides which version makes a sample."""
    name, schedule = given.schedule.name, make_schedule(given)
    if any(interval.low != interval.high for interval in map(schedule.interval, range(steps + 1))):
        raise UserError(
            f"with schedule={name} timing may decide which of several versions makes a sample, so that two runs need not be equal: "
            f"verify schedule=periodic or schedule=delayed"
        )
    if not schedule.max_staleness:
        return _variant(given, "synchronous", steps, 1, "synchronous"), _variant(given, "periodic", steps, 2, "periodic")
    own, short = {"name": name, "options": given.schedule.options}, name.rpartition(":")[2]
    return _variant(given, f"{short}-1", steps, 1, own), _variant(given, f"{short}-2", steps, 2, own)


def _variant(given: Config, name: str, steps: int, salt: int, schedule: str | dict[str, Any]) -> Config:
    """Configuration of one of the runs, in a folder beside the original run's. Raises `UserError`."""
    tree = given.model_dump(mode="json")
    for section, settings in SETTINGS.items():
        tree[section] = {**tree[section], **settings} if isinstance(settings, dict) else settings
    tree["queue"]["samplers"].pop(EVALUATE_TASK, None)  # nothing is evaluated
    tree["run"] |= {"dir": str(given.run.dir / f"{given.run.name}-verify"), "name": name, "steps": steps}
    tree["reward"]["delays"] = {"mean_seconds": DELAY_SECONDS, "salt": salt}
    return parse({**tree, "schedule": schedule})


async def _run(config: Config, kill_in_step: int | None) -> tuple[Certificate, Kill | None]:
    """Run one of the two to its end."""
    with _Run(config, kill_in_step) as run:
        run.log(f"{config.run.name}, in {config.run_dir}")
        if not await run_with_signals(run.job, run.job.run()):
            raise RunError(f"the {config.run.name} run was interrupted")
    assert run.job.certificate is not None
    return run.job.certificate, run.kill


class _Run(Display):
    """Observer that displays its run. As soon as a group of `kill_in_step` is trained while rows are generated, it kills the worker
    that holds most rows."""

    def __init__(self, config: Config, kill_in_step: int | None) -> None:
        super().__init__(config.run.name, config.run.steps)
        self.job = Job(config, self)
        self.kill: Kill | None = None
        self._kill_in_step = kill_in_step

    def group(self, step: int) -> None:
        if self._kill_in_step is None or self.kill is not None or step < self._kill_in_step:
            return
        if held := self.job.held():
            worker = max(held, key=lambda name: held[name])
            self.kill = Kill(worker, step, held[worker], asyncio.get_running_loop().time())
            self.job.kill(worker)
