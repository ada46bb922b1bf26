"""State of the driver in a checkpoint: its fields, and the files that hold it.

checkpoints/step-000012/    trainer/     the train engine's state (engines/train/state.py)
                            critic/      the critic's, where there is one
                            versions/    published weights of older versions, where prompts are left that only these may answer
                            driver.msgpack, rows.afp     this file's: `DriverState`, completed rows
                            manifest.json                (checkpoint/folder.py)
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np

from asyncflow.config import parse_dumped
from asyncflow.loops.samples import Prompt
from asyncflow.run.records.record import RecordState
from asyncflow.run_dir import replace as replace_file
from asyncflow.telemetry.batches import joined
from asyncflow.transfer_queue.storage.packed import read_frames, write_frame
from asyncflow.types import Batch, RunError

DRIVER_FILE: Final = "driver.msgpack"
ROWS_FILE: Final = "rows.afp"
TRAINER_DIR: Final = "trainer"
VERSIONS_DIR: Final = "versions"


class SavedPrompt(msgspec.Struct, frozen=True, array_like=True):
    """Prompt in a checkpoint: see `Prompt`; and of one that was pushed, see `Pushed`."""

    ids: list[int]
    example: dict[str, Any]
    after: int = 0


class DriverState(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """`driver.msgpack`.

    `data`: a hash of the data set's prompts; "": they may be any. `position`: of the data's order, after all that is in `steps`;
    `pushed`: prompts to come before it, the last ones of `num_pushed`. `steps`: those that were admitted and not committed, each
    with the prompts of its groups.
    """

    version: int
    config: str
    data: str
    position: int
    pushed: list[SavedPrompt]
    steps: dict[int, dict[int, SavedPrompt]]
    record: RecordState
    num_pushed: int = 0


@dataclass(frozen=True, slots=True)
class Resumed:
    """Checkpoint that a run resumes. `rows`: completed rows that were not trained. `is_whole`: no other rows had been begun."""

    folder: Path
    state: DriverState
    rows: Batch | None
    is_whole: bool = False

    @property
    def steps(self) -> dict[int, dict[int, Prompt]]:
        """See `DriverState`."""
        return {step: {group: as_prompt(p) for group, p in groups.items()} for step, groups in self.state.steps.items()}

    @property
    def record(self) -> RecordState:
        """Record of the attempts before, to which that of this attempt is added."""
        before, version = self.state.record, self.state.version
        made_again_at = before.made_again_at if self.is_whole else [*before.made_again_at, version]
        return msgspec.structs.replace(before, resumed_at=[*before.resumed_at, version], made_again_at=made_again_at)

    @property
    def versions(self) -> list[int]:
        """Older ones whose weights are here."""
        return sorted(version_of(path) for path in (self.folder / VERSIONS_DIR).glob("*"))


def version_file(version: int) -> str:
    """The name of a version's weights, in a folder of their own."""
    return f"{VERSIONS_DIR}/{version:06d}/model.safetensors"


def version_of(path: Path) -> int:
    """Version of a checkpoint's folder."""
    return int(path.name)


def as_prompt(saved: SavedPrompt) -> Prompt:
    """Prompt as the loops have it, from a checkpoint."""
    return Prompt(np.array(saved.ids, np.int64), saved.example)


def as_saved(prompt: Prompt, after: int = 0) -> SavedPrompt:
    """Prompt as a checkpoint has it."""
    return SavedPrompt(prompt.ids.tolist(), dict(prompt.example), after)


def data_hash(prompts: Sequence[Prompt]) -> str:
    """Hash of a data set as it is tokenized."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(prompt.ids.tobytes() + msgspec.json.encode(prompt.example))
    return digest.hexdigest()


def write_driver(folder: Path, state: DriverState, rows: Sequence[Batch]) -> None:
    """The driver's part of a checkpoint."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / DRIVER_FILE).write_bytes(msgspec.msgpack.encode(state))
    if rows:
        with (folder / ROWS_FILE).open("wb") as file:
            for batch in rows:
                write_frame(file, [], batch)


class LaterDriverState(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Driver's state that replaces a checkpoint's own: prompts may have been pushed after it was begun. See `DriverState`,
    `Resumed`."""

    position: int
    pushed: list[SavedPrompt]
    steps: dict[int, dict[int, SavedPrompt]]
    is_whole: bool = False
    num_pushed: int = 0
    resumed_at: list[int] | None = None  # also by attempts that have left no checkpoint; None: as in the checkpoint


def write_added(path: Path, state: DriverState, *, is_whole: bool = False) -> None:
    """Write the state that is newer than the checkpoint beside which `path` lies. `is_whole`: the run has ended, and lost no
    row."""
    resumed_at = state.record.resumed_at
    later = LaterDriverState(state.position, state.pushed, state.steps, is_whole, state.num_pushed, resumed_at)
    replace_file(path, msgspec.msgpack.encode(later))


def read_driver(folder: Path, added: Path | None = None) -> Resumed:
    """The driver's part of a whole checkpoint, and what was `added` to it. Raises `RunError` for one of another format."""
    try:
        state = msgspec.msgpack.decode((folder / DRIVER_FILE).read_bytes(), type=DriverState)
        is_whole = state.version >= parse_dumped(state.config).run.steps  # after its last step a run has begun nothing more
        if added is not None and added.exists():
            more = msgspec.msgpack.decode(added.read_bytes(), type=LaterDriverState)
            later = {"position": more.position, "pushed": more.pushed, "steps": more.steps, "num_pushed": more.num_pushed}
            resumed_at = state.record.resumed_at if more.resumed_at is None else more.resumed_at
            record = msgspec.structs.replace(state.record, resumed_at=resumed_at)
            state = msgspec.structs.replace(state, **later, record=record)
            is_whole = more.is_whole
        rows = None
        if (folder / ROWS_FILE).exists():
            with (folder / ROWS_FILE).open("rb") as file:
                batches = [batch for _, batch in read_frames(file)]
            rows = replace(joined(batches), groups=np.empty(0, np.int64))
    except (OSError, msgspec.DecodeError, ValueError) as error:
        raise RunError(f"the checkpoint {folder} cannot be read: {error}") from error
    return Resumed(folder, state, rows, is_whole)
