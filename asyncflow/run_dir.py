"""Folder of a run: its files, their names, and which process may write them.

    runs/<name>/   config.yaml job.json control.sock key.pem logs/ initial-model/    what the run is, and how it is reached
                   metrics.jsonl eval.jsonl samples.jsonl tokens.jsonl unscored.jsonl spans.jsonl    what it has told
                   now.json                                             what waits for what (`asyncflow why`)
                   fingerprints.jsonl certificate.json                                  what it proves
                   checkpoints/step-000012/                                          what it can be resumed from
                   model/ critic/ report.html trace.json                             what is left of it

`model/` has a file `.asyncflow-version` beside those of Hugging Face: how many steps it has been trained. It stays until another
one takes its place. So it is with `critic/`, where the algorithm has one.

Whatever must be whole or not there at all is written beside its name, flushed to the disk, and renamed.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Final

from asyncflow.types import UserError

CONFIG_FILE: Final = "config.yaml"
JOB_FILE: Final = "job.json"
KEY_FILE: Final = "key.pem"
FORK_FILE: Final = "fork.json"
"""The origin of a run that is a fork."""
METRICS_FILE: Final = "metrics.jsonl"
EVAL_FILE: Final = "eval.jsonl"
SAMPLES_FILE: Final = "samples.jsonl"
TOKENS_FILE: Final = "tokens.jsonl"
"""Responses of `samples.jsonl` as they were trained, token by token."""
UNSCORED_FILE: Final = "unscored.jsonl"
"""Responses that a scorer could not score: the first ones of a run."""
SNAPSHOTS_DIR: Final = "snapshots"
MODEL_DIR: Final = "model"
CRITIC_DIR: Final = "critic"
"""Folder of the critic, in the run's folder and in a checkpoint."""

_MARKER_FILE: Final = ".asyncflow-run"
_ASIDE: Final = "set-aside-"
_VERSION_FILE: Final = ".asyncflow-version"  # in a final model: how many steps it has been trained
_SOCKET_FILE: Final = "control.sock"
_SHARED_MEMORY: Final = Path("/dev/shm")
_WEIGHTS_PREFIX: Final = "asyncflow-"
_HELD: Final[dict[Path, int]] = {}
"""Descriptors of this process's folders in shared memory, by which it holds them."""


def control_socket(run_dir: Path) -> Path:
    """Socket at which a run's driver listens."""
    return run_dir / _SOCKET_FILE


class RunDir:
    """Folder of one run, as the run's driver uses it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def model(self) -> Path:
        """Folder of the final model."""
        return self.path / MODEL_DIR

    @property
    def critic(self) -> Path:
        """Folder of the final critic, where the algorithm has one."""
        return self.path / CRITIC_DIR

    @property
    def initial_model(self) -> Path:
        """Folder of the model that the run started from, if it was made for the run."""
        return self.path / "initial-model"

    @property
    def checkpoints(self) -> Path:
        """Folder of the checkpoints."""
        return self.path / "checkpoints"

    def is_run(self) -> bool:
        """Whether a run has written into this folder."""
        return (self.path / _MARKER_FILE).is_file()

    def has_results(self) -> bool:
        """Whether a run has made a step here, or left a checkpoint or a model. One that failed before has nothing to be missed."""
        metrics = self.path / METRICS_FILE
        left = ("step-*", self.checkpoints), (f"{_ASIDE}*", self.path)
        has_files = self.model.exists() or self.critic.exists() or (metrics.is_file() and metrics.stat().st_size > 0)
        return has_files or any(next(folder.glob(pattern), None) for pattern, folder in left)

    @property
    def model_version(self) -> int | None:
        """Number of steps that the final model has been trained; None without a model, or if a run ended before it was noted."""
        return _version_in(self.model)

    @property
    def critic_version(self) -> int | None:
        """Number of steps that the final critic has been trained; None as for `model_version`."""
        return _version_in(self.critic)

    def note_model(self, version: int) -> None:
        """Note how many steps the final model has been trained."""
        replace(self.model / _VERSION_FILE, f"{version}\n".encode())

    def forget_note_above(self, version: int) -> None:
        """Forget how many steps the final model and critic have been trained, if more than these."""
        for model in (self.model, self.critic):
            if (noted := _version_in(model)) is not None and noted > version:
                (model / _VERSION_FILE).unlink()
                sync_folder(model)

    def model_id(self) -> int | None:
        """Identity of the final model: another one has another identity."""
        return self.model.stat().st_ino if self.model.exists() else None

    def restore_models(self) -> None:
        """Give final model and critic their names back, if a process was killed between the two renames that replace one."""
        for model in (self.model, self.critic):
            _restore(model)

    def forget_partial_models(self) -> None:
        """Remove models that were being written when the run was killed."""
        for model in (self.model, self.critic):
            shutil.rmtree(_partial(model), ignore_errors=True)

    def check_place(self) -> None:
        """Check that the folder is there or can be made. Raises `UserError`."""
        there = next(each for each in (self.path, *self.path.parents) if each.exists())
        if not there.is_dir() or not os.access(there, os.W_OK | os.X_OK):
            why = "may not be written into by you" if there.is_dir() else "is a file"
            raise UserError(f"the run's folder {self.path} cannot be made, since {there} {why}: give another run.dir")

    def check(self, *, may_overwrite: bool) -> None:
        """Check that a new run may begin in this folder. Raises `UserError`."""
        self.check_place()
        if not self.path.exists() or not any(self.path.iterdir()):
            return
        if self.is_run() and not (self.path / CONFIG_FILE).exists():  # a process was killed while it claimed the empty folder
            return
        if not self.is_run():
            raise UserError(f"{self.path} is not empty, and no run wrote it, so it is not overwritten: give another run.name")
        if not may_overwrite and self.has_results():
            raise UserError(
                f"{self.path} holds an earlier run: resume it by --resume, give this one another run.name, remove that one by "
                f"run.overwrite=true, or move it away"
            )

    def set_aside(self) -> Path | None:
        """Move the models that there are to a folder of their own, `set-aside-1` or the next. Returns it; None: there are none."""
        models = [model for model in (self.model, self.critic) if model.exists()]
        if not models:
            return None
        names = [entry.name.removeprefix(_ASIDE) for entry in self.path.iterdir() if entry.name.startswith(_ASIDE)]
        number = 1 + max([int(name) for name in names if name.isdecimal()], default=0)
        aside = self.path / f"{_ASIDE}{number}"
        aside.mkdir()
        for model in models:
            model.rename(aside / model.name)
        sync_folder(self.path)
        return aside

    def claim(self, config: str, *, keeps_aside: bool = False, fork: bytes | None = None) -> None:
        """Make the folder for a run of this configuration (YAML), empty, but with `keeps_aside` for what was set aside in it.
        `fork`: content of `FORK_FILE`, which is there before the configuration is."""
        if self.path.exists():
            # What says whose the rest is goes last: killed in between, the folder is still known for this run's.
            for entry in self.path.iterdir():
                if entry.name not in (_MARKER_FILE, CONFIG_FILE) and (not keeps_aside or not entry.name.startswith(_ASIDE)):
                    _remove(entry)
            (self.path / CONFIG_FILE).unlink(missing_ok=True)
            self.path.chmod(0o700)
        else:
            try:
                self.path.mkdir(parents=True, mode=0o700)
            except OSError as error:
                message = f"the run's folder {self.path} cannot be made ({error.strerror}): give another run.dir"
                raise UserError(message) from error
        (self.path / _MARKER_FILE).touch()
        if fork is not None:
            replace(self.path / FORK_FILE, fork)
        replace(self.path / CONFIG_FILE, config.encode())

    @contextmanager
    def saving_model(self, name: str = MODEL_DIR, *, version: int | None = None, is_first: bool = True) -> Iterator[Path]:
        """Context in which the final model, or critic, is written: the folder to write to. It gets its name when the block ends
        without an error, so a model is whole or not there.

        Of several processes that write it, the first one renames it. An earlier one stays until then. `version`: how many steps it
        has been trained, where that is said at once.
        """
        model = self.path / name
        partial, over = _partial(model), _over(model)
        yield partial
        if is_first:
            if version is not None:
                (partial / _VERSION_FILE).write_text(f"{version}\n")
            for file in partial.rglob("*"):
                if file.is_file():
                    sync_file(file)
            for folder in folders_of(partial):
                sync_folder(folder)
            _restore(model)
            if model.exists():  # of a resumed run
                model.rename(over)
            partial.rename(model)
            sync_folder(self.path)
            shutil.rmtree(over, ignore_errors=True)

    def make_weights_dir(self) -> Path:
        """Make the folder of the weights that travel: in shared memory where there is any, and named after this process, so that a
        later run can remove what a killed one left."""
        if (shared := make_shared_dir()) is not None:
            return shared
        folder = self.path / "weights"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        return folder


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _partial(model: Path) -> Path:
    """Name of a model while it is written."""
    return model.with_name(f"{model.name}.partial")


def _over(model: Path) -> Path:
    """Name of the former model while another one takes its place."""
    return model.with_name(f"{model.name}.over")


def _restore(model: Path) -> None:
    if _over(model).exists():
        if model.exists():
            shutil.rmtree(_over(model))
        else:
            _over(model).rename(model)


def _version_in(model: Path) -> int | None:
    try:
        return int((model / _VERSION_FILE).read_text())
    except (OSError, ValueError):
        return None


def make_shared_dir() -> Path | None:
    """Make a folder in shared memory, named after this process, which holds it until `remove_shared_dir`; None where there is no
    shared memory."""
    if not (_SHARED_MEMORY.is_dir() and os.access(_SHARED_MEMORY, os.W_OK)):
        return None
    folder = _SHARED_MEMORY / f"{_WEIGHTS_PREFIX}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    folder.mkdir(mode=0o700)
    _HELD[folder] = os.open(folder, os.O_RDONLY)
    fcntl.flock(_HELD[folder], fcntl.LOCK_SH | fcntl.LOCK_NB)  # a container with the same shared memory may not see this process
    return folder


def remove_shared_dir(folder: Path) -> None:
    """Remove what `make_shared_dir` has made, or another folder of weights."""
    shutil.rmtree(folder, ignore_errors=True)
    if (held := _HELD.pop(folder, None)) is not None:
        os.close(held)


def sweep_shared_memory() -> None:
    """Remove files in shared memory of runs whose processes are gone. What somebody holds stays."""
    for folder in _SHARED_MEMORY.glob(f"{_WEIGHTS_PREFIX}*-*"):
        pid = folder.name.removeprefix(_WEIGHTS_PREFIX).split("-")[0]
        with contextlib.suppress(FileNotFoundError):  # another process sweeps at the same time
            if pid.isdigit() and not Path(f"/proc/{pid}").exists() and folder.stat().st_uid == os.getuid():
                _remove_unless_held(folder)


def _remove_unless_held(folder: Path) -> None:
    held = os.open(folder, os.O_RDONLY)
    try:
        with contextlib.suppress(BlockingIOError):
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(folder, ignore_errors=True)
    finally:
        os.close(held)


def append_whole(file: FileIO, content: bytes) -> None:
    """Append all of it to a file or, where that raises (a full disk), nothing: behind a part of it nothing could be read."""
    end, left = os.fstat(file.fileno()).st_size, memoryview(content)
    try:
        while left:
            left = left[file.write(left) :]  # perhaps a part, and no error before the next try
    except OSError:
        os.ftruncate(file.fileno(), end)
        raise


def replace(path: Path, content: bytes | Iterable[bytes]) -> None:
    """Replace the content of a file. Whatever happens, the file then holds the old content or the new one, whole. Pieces of it may
    be made of the old one, which is there until all have been written."""
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.writelines([content] if isinstance(content, bytes) else content)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)
    sync_folder(path.parent)


def folders_of(path: Path) -> list[Path]:
    """A folder and all folders below it, the deepest first."""
    return [*sorted((below for below in path.rglob("*") if below.is_dir()), reverse=True), path]


def sync_file(path: Path) -> None:
    """Flush a file's content to the disk."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Flush the names in a folder to the disk."""
    folder = os.open(path, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
