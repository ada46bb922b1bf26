"""Checkpoints of trained models on disk, by the paths that clients know them by: `tinker://MODEL/weights/NAME`.

    checkpoints/MODEL/weights/NAME/           checkpoint.json, model-TIME/ (Hugging Face format, or an adapter in PEFT's), state/
    checkpoints/MODEL/sampler_weights/NAME/   checkpoint.json, model-TIME/; external_weights/ likewise
    downloads/                                archives of checkpoints that a client has asked for, as long as their links are good
    snapshots/MODEL/NUMBER/                   weights that a sampler was made from without a name: the newest ones stay

A checkpoint is written to a folder beside it, and renamed when it is whole. One that it replaces is removed after that. Checkpoints
outlive the server, nothing else does.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tarfile
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, Literal, cast

import msgspec

from asyncflow.types import UserError

CheckpointKind = Literal["weights", "sampler_weights", "external_weights"]
KINDS: Final[dict[CheckpointKind, str]] = {"weights": "training", "sampler_weights": "sampler", "external_weights": "external"}
"""Segments of paths, with the SDK's names for the kinds of checkpoints."""
SCHEME: Final = "tinker://"
RECORD_FILE: Final = "checkpoint.json"
MODEL_DIR, STATE_DIR = "model", "state"
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,127}")
_PARTIAL, _OVER = ".partial", ".over"
"""Ends of the names of folders that are no checkpoints: not whole yet, or no longer; and being replaced by another one."""


class Record(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of a checkpoint. Times are Unix seconds; `expires` None: never. `rank`: that a client has asked for, of an adapter;
    without `is_lora` all weights were trained instead."""

    base_model: str
    rank: int
    is_lora: bool = False
    created: float
    num_bytes: int = 0
    expires: float | None = None
    user_metadata: dict[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint that is there, and whole."""

    model_id: str
    kind: CheckpointKind
    name: str
    folder: Path
    record: Record

    @property
    def model(self) -> Path:
        """Folder of the model. Its name is not taken again, though the checkpoint's may be: samplers know weights by it."""
        return self.folder / f"{MODEL_DIR}-{int(self.record.created * 1e6)}"

    @property
    def path(self) -> str:
        """Path by which clients know it."""
        return f"{SCHEME}{self.model_id}/{self.kind}/{self.name}"

    def description(self) -> dict[str, Any]:
        """Description in the API's words."""
        expires = self.record.expires
        return {
            "checkpoint_id": f"{self.kind}/{self.name}",
            "checkpoint_type": KINDS[self.kind],
            "time": datetime.fromtimestamp(self.record.created, UTC).isoformat(),
            "tinker_path": self.path,
            "size_bytes": self.record.num_bytes,
            "public": False,
            "user_metadata": self.record.user_metadata,
            "expires_at": None if expires is None else datetime.fromtimestamp(expires, UTC).isoformat(),
        }


class CheckpointStore:
    """Checkpoints in one folder. Its calls read and write files: make them in a thread where they may take long."""

    def __init__(self, folder: Path, kept_snapshots: int) -> None:
        """`kept_snapshots`: of each model. Snapshots and unfinished checkpoints of an earlier server are removed. A checkpoint that
        it was about to replace, and has not, is there again."""
        self._folder, self._snapshots, self._kept = folder / "checkpoints", folder / "snapshots", kept_snapshots
        self._downloads = folder / "downloads"
        for temporary in (self._snapshots, self._downloads):
            shutil.rmtree(temporary, ignore_errors=True)
        for entry in list(self._folder.glob("*/*/*")):
            if entry.name.endswith(_PARTIAL):
                shutil.rmtree(entry, ignore_errors=True)
            elif entry.name.endswith(_OVER):
                self._end_of_replacement(entry)

    def begin(self, model_id: str, kind: CheckpointKind, name: str, *, overwrite: bool) -> Path:
        """Folder to write a checkpoint to. Raises `UserError` for a bad name, or one that is taken."""
        folder = self._place(model_id, kind, name)
        if folder.exists() and not overwrite and self._read(model_id, kind, name) is not None:
            raise UserError(f"{SCHEME}{model_id}/{kind}/{name} is there already: take another name, or overwrite it")
        partial = folder.with_name(name + _PARTIAL)
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        return partial

    def commit(self, model_id: str, kind: CheckpointKind, name: str, record: Record) -> Checkpoint:
        """Make what was written a checkpoint. Its size is counted here."""
        folder = self._place(model_id, kind, name)
        partial = folder.with_name(name + _PARTIAL)
        num_bytes = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
        record = msgspec.structs.replace(record, num_bytes=num_bytes)
        made = Checkpoint(model_id, kind, name, folder, record)
        (partial / MODEL_DIR).rename(partial / made.model.name)
        (partial / RECORD_FILE).write_bytes(msgspec.json.encode(record))
        over = folder.with_name(name + _OVER)
        if folder.exists():
            folder.rename(over)
        try:
            partial.rename(folder)
        finally:
            if over.exists():
                self._end_of_replacement(over)
        return made

    def find(self, path: str) -> Checkpoint:
        """Checkpoint at `tinker://MODEL/KIND/NAME`. Raises `UserError` if there is none."""
        parts = path.removeprefix(SCHEME).split("/")
        if path.startswith(SCHEME) and len(parts) == 3 and (found := self._read(*parts)) is not None:
            return found
        raise UserError(f"there is no checkpoint {path[:300]!r} here: it was never saved, has expired, or was deleted")

    def all(self, model_id: str | None = None) -> list[Checkpoint]:
        """Checkpoints of one model, or of all, oldest first."""
        places = [entry.parts[-3:] for entry in self._folder.glob("*/*/*")]
        found = [self._read(*place) for place in places if model_id in (None, place[0])]
        return sorted(filter(None, found), key=lambda checkpoint: checkpoint.record.created)

    def delete(self, checkpoint: Checkpoint) -> None:
        """Remove a checkpoint from the disk."""
        self._remove(checkpoint.folder)

    def archive(self, checkpoint: Checkpoint) -> Path:
        """Write a checkpoint's model into one file, `.tar.gz`, whose entries are the files of the model's folder.

        Each call has a file of its own, which the caller removes.
        """
        self._downloads.mkdir(parents=True, exist_ok=True)
        prefix = f"{checkpoint.model_id}.{checkpoint.kind}.{checkpoint.name}."
        handle, name = tempfile.mkstemp(".tar.gz", prefix, self._downloads)
        made = Path(name)
        with contextlib.ExitStack() as unless_whole:
            unless_whole.callback(made.unlink)
            with os.fdopen(handle, "wb") as whole, tarfile.open(fileobj=whole, mode="w:gz", compresslevel=1) as archive:
                for file in sorted(checkpoint.model.iterdir()):
                    archive.add(file, file.name)
            unless_whole.pop_all()
        return made

    def keep_for(self, checkpoint: Checkpoint, seconds: int | None) -> None:
        """Keep a checkpoint for so many seconds from now; None: until it is deleted."""
        expires = None if seconds is None else time.time() + seconds
        record = msgspec.structs.replace(checkpoint.record, expires=expires)
        changed = checkpoint.folder / f"{RECORD_FILE}{_PARTIAL}"
        changed.write_bytes(msgspec.json.encode(record))
        changed.replace(checkpoint.folder / RECORD_FILE)

    def begin_snapshot(self, model_id: str, number: int) -> Path:
        """Folder to write the weights of a sampler without a name to."""
        folder = self._snapshots / _checked(model_id) / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        return folder

    def trim_snapshots(self, model_id: str) -> None:
        """Remove all but the newest snapshots of a model."""
        folder = self._snapshots / model_id
        numbers = sorted(int(entry.name) for entry in folder.iterdir()) if folder.is_dir() else []
        for number in numbers[: -self._kept]:
            shutil.rmtree(folder / str(number), ignore_errors=True)

    def forget_snapshots(self, model_id: str) -> None:
        """Remove all snapshots of a model."""
        shutil.rmtree(self._snapshots / model_id, ignore_errors=True)

    def forget_unfinished(self, model_id: str) -> None:
        """Remove what was written of checkpoints of a model that are not whole, while none is being saved."""
        for partial in list((self._folder / model_id).glob(f"*/*{_PARTIAL}")):
            self._remove(partial)

    def _read(self, model_id: str, kind: str, name: str) -> Checkpoint | None:
        """Checkpoint if it is there and has not expired; one that has expired is removed."""
        is_path = _NAME.fullmatch(model_id) and kind in KINDS and _NAME.fullmatch(name)
        if not is_path or name.endswith((_PARTIAL, _OVER)):
            return None
        folder = self._folder / model_id / kind / name
        try:
            record = msgspec.json.decode((folder / RECORD_FILE).read_bytes(), type=Record)
        except (OSError, msgspec.DecodeError):
            return None
        if record.expires is not None and time.time() >= record.expires:
            self._remove(folder)
            return None
        return Checkpoint(model_id, cast(CheckpointKind, kind), name, folder, record)

    def _place(self, model_id: str, kind: CheckpointKind, name: str) -> Path:
        return self._folder / _checked(model_id) / kind / _checked(name)

    def _end_of_replacement(self, over: Path) -> None:
        """Remove a checkpoint that was replaced, or put it back where the other one did not come."""
        folder = over.with_name(over.name.removesuffix(_OVER))
        if folder.exists():
            self._remove(over)
        else:
            over.rename(folder)

    def _remove(self, folder: Path) -> None:
        gone = folder.with_name(folder.name + _OVER + _PARTIAL)  # no checkpoint's, and removed at the next start
        shutil.rmtree(gone, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):  # another thread has seen the same, and removes it
            folder.rename(gone)
        shutil.rmtree(gone, ignore_errors=True)


def _checked(name: str) -> str:
    if not _NAME.fullmatch(name) or name.endswith((_PARTIAL, _OVER)):
        raise UserError(f"{name[:200]!r} is no name: take 1 to 128 letters, digits, '.', '_', ':' and '-', a letter or digit first")
    return name
