"""Resuming a run: which keys may change, and the run's files, cut back to the steps of its checkpoint.

In a mode and with engines that are deterministic no row is kept: leases and rows are made again, to the bit. Elsewhere completed
rows that were not trained are kept with the versions that made them, and the others are generated again. What a checkpoint has of
the driver is in driver_state.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import msgspec

from asyncflow.config import Config, load, parse_dumped
from asyncflow.run.state.driver_state import DriverState, Resumed
from asyncflow.run_dir import (
    CONFIG_FILE,
    EVAL_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    TOKENS_FILE,
    UNSCORED_FILE,
    RunDir,
    control_socket,
    replace,
)
from asyncflow.telemetry.certificate import CERTIFICATE_FILE
from asyncflow.telemetry.fingerprints import FINGERPRINTS_FILE
from asyncflow.telemetry.report import REPORT_FILE
from asyncflow.telemetry.tensorboard import cut_events
from asyncflow.telemetry.trace import SPANS_FILE, TRACE_FILE, spans_in
from asyncflow.telemetry.trackers import TENSORBOARD_FOLDER
from asyncflow.transfer_queue.schema import Schema
from asyncflow.types import Batch, UserError

CRITIC_FINGERPRINTS: Final = FINGERPRINTS_FILE.replace(".", ".critic.")

MAY_CHANGE: Final = (
    "run.name", "run.dir", "run.steps", "run.overwrite", "run.stall_timeout_seconds", "run.stop_grace_seconds",
    "reward.num_workers", "reward.deadline_seconds", "reward.memory_bytes", "reward.output_bytes", "reward.max_failed_fraction",
    "rollout.num_workers", "rollout.num_slots", "rollout.num_threads", "rollout.max_restarts",
    "train.num_threads", "train.pipeline_micro_batches", "train.pipeline_fill", "train.activation_checkpointing", "train.offload",
    "train.offload_optimizer", "train.max_restarts", "train.max_skipped_updates", "train.check_shared_prompt",
    "train.skip_zero_advantages",
    "train.reference", "train.tokens_per_micro_batch", "train.helpers",
    "train.oversampling", "train.max_candidates",
    "weight_sync.name", "weight_sync.options", "weight_sync.deadline_seconds", "weight_sync.min_healthy_workers",
    "weight_sync.listen",
    "episodes.num_workers", "episodes.at_once", "episodes.num_parked",
    "queue", "cluster", "telemetry", "checkpoint", "plan", "eval.every_steps", "eval.num_workers",
    "eval.device",
)  # fmt: skip
"""Keys that may differ when a run is resumed; a section's name allows all of its keys. A new one belongs here if no bit
depends on it."""


def usable(rows: Batch | None, schema: Schema) -> Batch | None:
    """Rows of a checkpoint, where of each task's outputs all are there, or none: what is written is not written again, so a row
    that has some of them could not be completed. None, too, where they are not: the run makes such rows again."""
    if rows is None or all(len(rows.columns.keys() & task.outputs) in (0, len(task.outputs)) for task in schema.tasks):
        return rows
    return None


def check_fits(config: Config, state: DriverState, data: str) -> None:
    """Check that a run may be resumed with this configuration and this data. Raises `UserError`."""
    if changed := _changed(parse_dumped(state.config), config):
        raise UserError(
            f"{changed}: a run is resumed as it began; set it back, or begin another run with what this one has learnt, by "
            f"--fork-from {config.run_dir} and another run.name"
        )
    if state.data and data != state.data:
        raise UserError(
            f"{config.data.path} holds other prompts than when this run began: a run is resumed with the data that it had"
        )
    if config.run.steps < state.version:
        raise UserError(f"run.steps is {config.run.steps}, and {state.version} steps are done: set it to {state.version} or more")


def _changed(began: Config, config: Config) -> str:
    """Difference from the run's beginning that is not allowed, as half a sentence; "" if there is none."""
    for key, (before, now) in differences(began, config).items():
        if not any(key == free or key.startswith(f"{free}.") for free in MAY_CHANGE):
            return f"{key} was {before!r} when this run began and is {now!r} now"
    return ""


def differences(began: Config, config: Config) -> dict[str, tuple[Any, Any]]:
    """Keys in which two configurations differ, with both values; None where one has no such key."""
    before, now = _flat(began.model_dump(mode="json")), _flat(config.model_dump(mode="json"))
    return {key: (before.get(key), now.get(key)) for key in sorted(before.keys() | now.keys()) if before.get(key) != now.get(key)}


def _flat(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) and value else {f"{prefix}{key}": value}
    return flat


# -- the run's files --------------------------------------------------------------------------------------------------------


def cut_back(run_dir: Path, resumed: Resumed, now: float) -> None:
    """Let the run's files tell of the committed steps alone; what the end of a run leaves is removed, but for its model, which
    stays until there is another. A file is read line by line: a run may have any number of steps.

    That a model is of more steps than these is forgotten first: this attempt may be killed when it has the checkpoint of its last
    step, and no model yet, and would be taken for ended. Spans are moved so that the last one kept ends at `now`, by the clock of
    the resumed run. May be repeated.
    """
    version, rows = resumed.state.version, set() if resumed.rows is None else set(resumed.rows.indices.tolist())
    RunDir(run_dir).forget_note_above(version)
    _keep_lines(run_dir / METRICS_FILE, lambda row: row["step"] < version)
    cut_events(run_dir / TENSORBOARD_FOLDER, version)
    _keep_lines(run_dir / EVAL_FILE, lambda row: row["step"] <= version)
    evaluated = evaluated_versions(run_dir)

    def is_kept(sample: Mapping[str, Any]) -> bool:
        if sample["purpose"] == "eval":
            return sample["step"] in evaluated
        return sample["step"] < version or sample["row"] in rows

    _keep_lines(run_dir / SAMPLES_FILE, is_kept)
    _keep_lines(run_dir / TOKENS_FILE, lambda row: row["step"] < version)
    for path in run_dir.glob(FINGERPRINTS_FILE.replace(".", "*.")):
        _keep_lines(path, lambda line: line["step"] < version)
    _cut_half_line(run_dir / UNSCORED_FILE)  # its lines are of no step: all of them stay
    _cut_spans(run_dir / SPANS_FILE, version, now)
    RunDir(run_dir).forget_partial_models()
    for name in (CERTIFICATE_FILE, REPORT_FILE, TRACE_FILE):
        (run_dir / name).unlink(missing_ok=True)
    control_socket(run_dir).unlink(missing_ok=True)


def metrics_of(run_dir: Path) -> Iterator[dict[str, Any]]:
    """The rows of metrics that are written."""
    return _lines(run_dir / METRICS_FILE)


def to_be_kept(config: Config) -> str:
    """Description of what the run's folder holds of another run, without a checkpoint, that somebody may miss; "" if there is
    nothing.

    What an attempt of this very run has left that was killed before its first checkpoint is made again; its models are set aside.
    """
    folder = RunDir(config.run_dir)
    has_model = folder.model.exists() or folder.critic.exists()
    if not has_model and next(metrics_of(folder.path), None) is None:
        return ""
    what = "the model" if has_model else "the metrics"
    try:
        changed = _changed(load(folder.path / CONFIG_FILE), config)
    except UserError as error:
        return f"{what} of an earlier run, which cannot be told from another one ({error})"
    return f"{what} of an earlier run, and {changed}" if changed else ""


def evaluated_versions(run_dir: Path) -> set[int]:
    """Versions whose evaluations are written."""
    return {row["step"] for row in _lines(run_dir / EVAL_FILE)}


def evaluation_of(run_dir: Path, version: int) -> dict[str, Any] | None:
    """Figures of a version's evaluation, if they are written."""
    return next((row for row in _lines(run_dir / EVAL_FILE) if row["step"] == version), None)


def left_out_before(run_dir: Path) -> int:
    """Number of evaluations that were left out, as the written figures report it."""
    return sum(row.get("left_out", 0) for row in _lines(run_dir / EVAL_FILE))


def _lines(path: Path) -> Iterator[dict[str, Any]]:
    """Lines of a JSON Lines file, without a half-written last one."""
    if path.exists():
        with path.open("rb") as file:
            yield from (msgspec.json.decode(line) for line in file if line.endswith(b"\n"))


def _keep_lines(path: Path, is_kept: Callable[[dict[str, Any]], bool]) -> None:
    """Keep these lines of a file. One that is not whole is no loss that a run should not go on for: nothing depends on it."""

    def kept() -> Iterator[bytes]:
        with path.open("rb") as file:
            for line in file:
                with contextlib.suppress(msgspec.DecodeError):
                    if line.endswith(b"\n") and is_kept(msgspec.json.decode(line)):
                        yield line

    if path.exists():
        replace(path, kept())


def _cut_half_line(path: Path) -> None:
    """Cut off a half-written last line, which what is appended would go on."""
    if path.exists() and not (content := path.read_bytes()).endswith(b"\n"):
        replace(path, content[: content.rfind(b"\n") + 1])


def _cut_spans(path: Path, version: int, now: float) -> None:
    """Cut the spans back to the last commit that counts, and remove those of later steps."""
    ends = (span.end for span in spans_in(path) if span.task in ("optim_step", "publish") and 0 <= span.step < version)
    moment, encoder = max(ends, default=-1.0), msgspec.json.Encoder()

    def kept() -> Iterator[bytes]:
        for span in spans_in(path):
            if span.start < moment and span.step < version:
                start, end = span.start + now - moment, min(span.end, moment) + now - moment
                yield encoder.encode(msgspec.structs.replace(span, start=start, end=end)) + b"\n"

    if path.exists():
        replace(path, kept())
