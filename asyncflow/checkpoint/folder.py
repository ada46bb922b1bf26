"""Checkpoints of a run: folders of files, each with a manifest of their hashes, which is written last.

    checkpoints/step-000012.partial/    files come, from several processes
                     | every file and folder is flushed to the disk, hashed; manifest.json; rename
    checkpoints/step-000012/            a checkpoint: `keep` of them stay
                     | damaged, or without a manifest: not one
                 newest()

A crash at any moment leaves every earlier checkpoint as it was: names change last, and what is removed is renamed first.
"""

from __future__ import annotations

import hashlib
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec

from asyncflow.run_dir import folders_of, replace, sync_file, sync_folder
from asyncflow.types import RunError

MANIFEST_FILE: Final = "manifest.json"
FORMAT: Final = 1
_NAME: Final = re.compile(r"step-(\d{6,})")
_PARTIAL: Final = ".partial"
_OVER: Final = ".over"
_ADDED: Final = ".added"


class HashedFile(msgspec.Struct, frozen=True):
    """A file of a checkpoint: its SHA-256 in hexadecimal."""

    bytes: int
    sha256: str


class CheckpointManifest(msgspec.Struct, frozen=True):
    """`version`: steps that were committed. `files`: by path below the checkpoint's folder, all that are there."""

    format: int
    version: int
    files: dict[str, HashedFile]


class Checkpoints:
    """Checkpoints of one run, in one folder. `keep`: how many stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        self._folder, self._keep = folder, keep

    def path(self, version: int) -> Path:
        """Path of the checkpoint of so many committed steps."""
        return self._folder / f"step-{version:06d}"

    def partial(self, version: int) -> Path:
        """Path at which it is written, by every process that has a part of it: the first one makes the folder."""
        return self.path(version).with_name(self.path(version).name + _PARTIAL)

    def added(self, version: int) -> Path:
        """A file beside the checkpoint, of what has come after it was written and belongs to it; it goes with it."""
        return self.path(version).with_name(self.path(version).name + _ADDED)

    def versions(self) -> list[int]:
        """Versions of the checkpoints there are, oldest first, damaged ones among them."""
        found = (_NAME.fullmatch(entry.name) for entry in self._folder.iterdir()) if self._folder.is_dir() else ()
        return sorted(int(match[1]) for match in found if match is not None)

    def commit(self, version: int) -> list[str]:
        """Make what was written this version's checkpoint; then remove those that are too many.

        Raises `OSError` where the disk is full or fails, with the earlier ones untouched. From the moment on at which it has its
        name, it is one: returns sentences about what could not be done after that.
        """
        partial, path = self.partial(version), self.path(version)
        files = {str(file.relative_to(partial)): _hashed_and_synced(file) for file in _files(partial)}
        manifest = CheckpointManifest(FORMAT, version, files)
        replace(partial / MANIFEST_FILE, msgspec.json.format(msgspec.json.encode(manifest), indent=1) + b"\n")
        for folder in folders_of(partial):
            sync_folder(folder)
        if path.exists():  # a damaged one, or one of an attempt before this
            self._remove(version)
        self._forget_added(version)
        partial.rename(path)
        try:
            sync_folder(self._folder)
            sync_folder(self._folder.parent)  # which may have had no checkpoints before
        except OSError as error:
            # Those before it, which would be left if its name were lost, stay until the next one is committed.
            return [f"the checkpoint {path} is written, but its name could not be flushed to the disk: {error.strerror or error}"]
        troubles = []
        for old in self.versions()[: -self._keep]:
            try:
                self._remove(old)
            except OSError as error:
                troubles.append(f"the old checkpoint {self.path(old)} could not be removed: {error.strerror or error}")
        return troubles

    def discard(self, version: int) -> None:
        """Remove what was written: it will not be a checkpoint."""
        shutil.rmtree(self.partial(version), ignore_errors=True)

    def sweep(self) -> None:
        """Remove what never became a checkpoint, or was about to be removed."""
        for entry in self._folder.iterdir() if self._folder.is_dir() else ():
            if entry.name.endswith((_PARTIAL, _OVER)):
                shutil.rmtree(entry, ignore_errors=True)

    def newest(self, log: Callable[[str], None], *, after: int = -1) -> int | None:
        """The newest version, of those after `after`, whose checkpoint is whole; `log` why newer ones are passed over. None: there
        is none."""
        for version in reversed([version for version in self.versions() if version > after]):
            try:
                self.check(version)
            except RunError as error:
                log(f"{error}: it is passed over")
            else:
                return version
        return None

    def forget_after(self, version: int) -> None:
        """Remove the checkpoints of later versions: what they hold belongs to a lineage that has ended, or is damaged."""
        for later in self.versions():
            if later > version:
                self._remove(later)

    def check(self, version: int) -> None:
        """Check that a checkpoint is whole: every file, no other, each with its hash. Raises `RunError` saying what is not."""
        path = self.path(version)
        try:
            manifest = msgspec.json.decode((path / MANIFEST_FILE).read_bytes(), type=CheckpointManifest)
        except (OSError, msgspec.DecodeError) as error:
            raise RunError(f"the checkpoint {path} has no manifest that could be read ({error})") from error
        if (manifest.format, manifest.version) != (FORMAT, version):
            raise RunError(f"the checkpoint {path} is of version {manifest.version} and format {manifest.format}, not {FORMAT}")
        there = {str(file.relative_to(path)): file for file in _files(path)}
        if there.keys() != manifest.files.keys():
            odd = min(there.keys() ^ manifest.files.keys())
            raise RunError(f"the checkpoint {path} is damaged: {odd} is {'too many' if odd in there else 'missing'}")
        for name, file in there.items():
            try:
                is_whole = file.stat().st_size == manifest.files[name].bytes and _hashed(file) == manifest.files[name]
            except OSError as error:
                raise RunError(f"the checkpoint {path} cannot be read: {name}: {error.strerror}") from error
            if not is_whole:
                raise RunError(f"the checkpoint {path} is damaged: {name} is not what was written")

    def _remove(self, version: int) -> None:
        """Remove a checkpoint; for readers it is gone in one step."""
        path = self.path(version)
        over = path.with_name(path.name + _OVER)
        shutil.rmtree(over, ignore_errors=True)
        path.rename(over)
        shutil.rmtree(over)
        self._forget_added(version)

    def _forget_added(self, version: int) -> None:
        if (added := self.added(version)).exists():
            added.unlink()


def _files(folder: Path) -> Iterator[Path]:
    """Files of a checkpoint, but for its manifest."""
    return (file for file in sorted(folder.rglob("*")) if file.is_file() and file != folder / MANIFEST_FILE)


def _hashed_and_synced(file: Path) -> HashedFile:
    found = _hashed(file)
    sync_file(file)
    return found


def _hashed(file: Path) -> HashedFile:
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256")
        return HashedFile(opened.tell(), digest.hexdigest())
