"""A new run that begins with a checkpoint of another one: `asyncflow train CONFIG --fork-from RUN[@STEP]`.

    RUN/checkpoints/step-000012 --fork.json, then a copy, as the new run's own--> --resume goes on from it

Weights always come along. The optimiser's state (moments, count of updates) and the place in the data do, unless they are not
wanted; what differs in the configuration is free, and written into `fork.json`. `--resume` makes a fork that was killed to its end.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, Final, Literal

import msgspec

from asyncflow.checkpoint.folder import Checkpoints
from asyncflow.config import Config, dump, parse_dumped
from asyncflow.run.records.record import RecordState
from asyncflow.run.state.driver_state import TRAINER_DIR, DriverState, SavedPrompt, read_driver, write_added, write_driver
from asyncflow.run.state.resume import differences
from asyncflow.run.state.saving import checkpoints_of
from asyncflow.run_dir import CRITIC_DIR, FORK_FILE, JOB_FILE, RunDir, control_socket, replace
from asyncflow.transport.stream import is_served
from asyncflow.types import UserError

KeptState = Literal["optimizer", "data"]
KEPT: Final[tuple[KeptState, ...]] = ("optimizer", "data")
"""Parts of a run that a fork of it may keep, beside the weights."""


class ForkRecord(msgspec.Struct, frozen=True):
    """`fork.json`. `differences`: by key, the value of the run that the fork comes from, and its own."""

    origin: str
    step: int
    kept: list[str]
    differences: dict[str, tuple[Any, Any]]

    @property
    def parts(self) -> str:
        """Parts of its origin that it has, in words."""
        return " and ".join(["weights", *self.kept])


def fork_record(config: Config, source: str, keep: Collection[str], log: Callable[[str], None]) -> ForkRecord:
    """Record of the fork that `config` would be of the checkpoint `RUN` or `RUN@STEP`. Nothing is made.

    Raises `UserError` where there is no such checkpoint, or the run's folder holds a run that may not be overwritten.
    """
    if strangers := set(keep) - set(KEPT):
        raise UserError(f"a fork can keep {' and '.join(KEPT)}, not {min(strangers)!r}")
    place, _, step = source.partition("@")
    origin, own = RunDir(Path(place)), RunDir(config.run_dir)
    if origin.path.resolve() == own.path.resolve():
        raise UserError(f"a fork of {place} needs a folder of its own: give it another run.name")
    checkpoints = Checkpoints(origin.checkpoints, keep=1)
    version = _version(checkpoints, place, step, log)
    resumed = read_driver(checkpoints.path(version), checkpoints.added(version))
    began = parse_dumped(resumed.state.config)
    if config.run.steps <= version:
        raise UserError(f"run.steps is {config.run.steps}, and the fork begins after {version} steps: set it to more")
    if began.model.path != config.model.path and not Path(config.model.path).is_dir():
        raise UserError(f"model.path is {config.model.path!r}: a fork has that of {place}, {began.model.path!r}, or a folder")
    own.check(may_overwrite=config.run.overwrite)
    if is_served(control_socket(own.path)):
        raise UserError(f"a run is live in {own.path}: wait for its end, interrupt it, or give this one another run.name")
    return ForkRecord(str(origin.path.resolve()), version, sorted(keep), differences(began, config))


def fork(config: Config, source: str, keep: Collection[str], log: Callable[[str], None]) -> ForkRecord:
    """Make the run's folder with the checkpoint `RUN` or `RUN@STEP` in it, from which `--resume` goes on.

    Raises `UserError` as `fork_record` does.
    """
    record = fork_record(config, source, keep, log)
    RunDir(config.run_dir).claim(dump(config), fork=msgspec.json.format(msgspec.json.encode(record), indent=1) + b"\n")
    copy_origin(config, record, log)
    return record


def is_begun(config: Config, source: str, keep: Collection[str] | None) -> bool:
    """Whether the run's folder is already this fork of the checkpoint `RUN` or `RUN@STEP`, whole or not. `keep`: None where it
    is not said what a fork is to keep.

    Raises `UserError` where it is another run, or another fork: none is gone on with, or overwritten, by mistake.
    """
    if (record := _record_of(config)) is None:
        own = RunDir(config.run_dir)
        if own.is_run() and own.has_results():
            raise UserError(
                f"{config.run_dir} holds a run that is no fork: give the fork another run.name, or --resume that one alone"
            )
        return False
    place, _, step = source.partition("@")
    is_of_step = not step or (step.isdecimal() and int(step) == record.step)
    if str(Path(place).resolve()) == record.origin and is_of_step and (keep is None or sorted(keep) == record.kept):
        return True
    raise UserError(
        f"{config.run_dir} is a fork of {record.origin}@{record.step} with its {record.parts}, which is not what --fork-from and "
        f"--fork-keep say: --resume alone goes on with it, and another fork needs another run.name"
    )


def unfinished_fork(config: Config) -> ForkRecord | None:
    """Record of the fork that the run's folder was to be when its process was killed; None: it is no fork, or a whole one."""
    return None if checkpoints_of(config).versions() else _record_of(config)


def forked_at(config: Config) -> int:
    """Step that the run began with, in its first attempt: that of its origin's checkpoint where it is a fork, else 0."""
    record = _record_of(config)
    return 0 if record is None else record.step


def _record_of(config: Config) -> ForkRecord | None:
    file = config.run_dir / FORK_FILE
    return msgspec.json.decode(file.read_bytes(), type=ForkRecord) if file.exists() else None


def copy_origin(config: Config, record: ForkRecord, log: Callable[[str], None]) -> None:
    """Copy into the run's folder what it has of its origin. May be repeated. Raises `RunError` where the origin is gone."""
    origin, own, version, keep = RunDir(Path(record.origin)), RunDir(config.run_dir), record.step, record.kept
    checkpoints = Checkpoints(origin.checkpoints, keep=1)
    resumed = read_driver(checkpoints.path(version), checkpoints.added(version))
    began = parse_dumped(resumed.state.config)
    if origin.initial_model.exists():
        shutil.copytree(origin.initial_model, own.initial_model, dirs_exist_ok=True)
    if began.model.path == config.model.path:  # which says where the run found it
        replace(own.path / JOB_FILE, (origin.path / JOB_FILE).read_bytes())  # ranks of torchrun may be reading it
    before, position, data = resumed.state, 0, ""
    pushed: list[SavedPrompt] = []
    if "data" in keep:  # what was admitted and not trained comes first
        admitted = [prompt for _, groups in sorted(before.steps.items()) for _, prompt in sorted(groups.items())]
        pushed = [*admitted, *(msgspec.structs.replace(prompt, after=0) for prompt in before.pushed)]  # it counts anew
        position, data = before.position, before.data
    state = DriverState(
        version=version,
        config=dump(config),
        data=data,
        position=position,
        pushed=pushed,
        steps={},
        record=RecordState(),
        num_pushed=len(pushed),
    )
    made = checkpoints_of(config)
    made.sweep()
    partial = made.partial(version)
    for name in (TRAINER_DIR, CRITIC_DIR):
        if (folder := checkpoints.path(version) / name).is_dir():
            shutil.copytree(folder, partial / name)
    if "optimizer" not in keep:
        for file in partial.rglob("shard-*.safetensors"):
            _forget_optimizer(file)
    write_driver(partial, state, [])
    for trouble in made.commit(version):
        log(trouble)
    write_added(made.added(version), state, is_whole=True)


def _version(checkpoints: Checkpoints, place: str, step: str, log: Callable[[str], None]) -> int:
    """Version of the checkpoint that is meant: of this step, or the newest whole one. Raises `UserError`."""
    if not step:
        if (newest := checkpoints.newest(log)) is None:
            raise UserError(
                f"{place} has no whole checkpoint to fork from: set checkpoint.every_steps there, or let it end in order"
            )
        return newest
    there = checkpoints.versions()
    if not step.isdecimal() or int(step) not in there:
        raise UserError(f"{place} has no checkpoint of step {step}: there is {', '.join(map(str, there)) or 'none'}")
    checkpoints.check(int(step))
    return int(step)


def _forget_optimizer(file: Path) -> None:
    """Set what a shard (safetensors) holds of the optimiser to zero, in place: moments, and the count of updates."""
    with file.open("r+b") as content:
        (length,) = struct.unpack("<Q", content.read(8))
        header = json.loads(content.read(length))
        for name, tensor in header.items():
            if name == "updates" or name.startswith("optimizer/"):
                start, end = tensor["data_offsets"]
                content.seek(8 + length + start)
                content.write(bytes(end - start))
        content.flush()
        os.fsync(content.fileno())
