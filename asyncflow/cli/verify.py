"""`asyncflow verify`: the proof that periodic asynchrony changes nothing, by running it."""

from __future__ import annotations

import asyncio
import hashlib
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import typer

from asyncflow.cli.display import Display
from asyncflow.cli.errors import sentence
from asyncflow.config import Config, dump, load, parse
from asyncflow.types import RunError, UserError

if TYPE_CHECKING:
    from asyncflow.telemetry.certificate import Certificate

DELAY_SECONDS = 0.05
SALTS = {"synchronous": 1, "periodic": 2}
SETTINGS: dict[str, Any] = {
    "run": {"overwrite": True},
    "rollout": {"num_workers": 2, "num_threads": 1},
    "train": {"num_threads": 1},
    "telemetry": {"fingerprints": True, "trackers": []},
    "eval": {"path": None},
    "cluster": "local",
}
"""What both runs have, whatever the configuration says."""
GIVEN = ["run.steps", "schedule", "reward.delays", "cluster"] + [
    f"{section}.{key}" for section, keys in SETTINGS.items() if isinstance(keys, dict) for key in keys
]


def verify(
    config: Annotated[Path, typer.Argument(help="A run's YAML file.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value, as many as you like.")] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimiser steps of each of the two runs.")] = 20,
) -> None:
    """Run synchronous and periodic from one seed, with different delays, and compare them bit by bit.

    Exit code 0: equal, 1: different, 2: could not run, or the runs are no proof.
    """
    from asyncflow.telemetry.certificate import CERTIFICATE_FILE
    from asyncflow.telemetry.equivalence import compare
    from asyncflow.telemetry.fingerprints import FINGERPRINTS_FILE, read_fingerprints
    from asyncflow.telemetry.trace import SPANS_FILE, read_spans

    for override in overrides or []:
        for key in GIVEN:
            if f"{override.split('=')[0]}.".startswith(f"{key}."):
                raise UserError(f"{override!r}: verify sets {key} itself{', by --steps' if key == 'run.steps' else ''}")
    given = load(config, overrides or [])
    synchronous, periodic = (variant(given, mode, steps) for mode in SALTS)
    try:
        certificates = asyncio.run(_run(synchronous)), asyncio.run(_run(periodic))
        result = compare(
            hashlib.sha256(dump(given).encode()).hexdigest(),
            (read_fingerprints(synchronous.run_dir / FINGERPRINTS_FILE), read_fingerprints(periodic.run_dir / FINGERPRINTS_FILE)),
            certificates,
            read_spans(periodic.run_dir / SPANS_FILE),
        )
    except* (RunError, OSError) as group:
        raise UserError(f"could not verify: {sentence(group)}") from group
    path = periodic.run.dir / CERTIFICATE_FILE
    path.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=2) + b"\n")
    print("\n".join([*result.lines, f"{'written to':<16} {path}"]))
    raise typer.Exit({"equal": 0, "differs": 1, "void": 2}[result.verdict])


def variant(given: Config, mode: str, steps: int) -> Config:
    """One of the two runs, in a folder of its own beside the run that the configuration is of. Raises `UserError`."""
    tree = given.model_dump(mode="json")
    for section, settings in SETTINGS.items():
        tree[section] = {**tree[section], **settings} if isinstance(settings, dict) else settings
    tree["run"] |= {"dir": str(given.run.dir / f"{given.run.name}-verify"), "name": mode, "steps": steps}
    tree["reward"]["delays"] = {"mean_seconds": DELAY_SECONDS, "salt": SALTS[mode]}
    return parse({**tree, "schedule": mode})


async def _run(config: Config) -> Certificate:
    from asyncflow.job import Job, run_with_signals

    with Display(config.run.name, config.run.steps) as display:
        display.says(f"{config.run.name}, in {config.run_dir}")
        job = Job(config, display)
        if not await run_with_signals(job, job.run()):
            raise RunError(f"the {config.run.name} run was interrupted")
    assert job.certificate is not None
    return job.certificate
