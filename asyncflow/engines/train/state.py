"""State of a train engine in a checkpoint: named tensors, written by every rank, read under any layout.

    tensors --stage--> copies in host memory --thread--> <folder>/shard-00001-....safetensors    (one or more for every rank)
    <folder>/*.safetensors --torch.distributed.checkpoint--> tensors, in place, whatever layout they were saved under

Everything is a tensor, the counts too, under names that do not depend on the layout (`weights/<Hugging Face name>`,
`optimizer/<name>/exp_avg`). So all files are safetensors: torch.distributed.checkpoint's own storage would write its metadata, and
values that are not tensors, by pickle. Its planner finds out where each part of a sharded tensor (DTensor) lies, and puts the parts
together again when another layout loads them. Every rank plans for itself (`no_dist`), so ranks exchange nothing.

If several ranks hold the same part, the first of them writes it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import threading
import time
import warnings
from collections.abc import Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from asyncflow.engines.cuts import cut_by_size
from asyncflow.engines.train.optimizer import Optimizer
from asyncflow.threads import CHECKPOINT_FILES, at_files
from asyncflow.types import RunError

FILE_BYTES: Final = 1 << 30
"""Size of a file in bytes, about. While a file is written, its size is needed in memory a second time."""
WRITE_SECONDS: Final = 600.0
"""Seconds that the first rank waits for the files of the others after it has written its own."""
_LOOK_SECONDS: Final = 0.05


class EngineState:
    """State of an engine on this rank: its parameters, optimiser, random generators and, if there is one, old policy."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: Optimizer,
        old: Mapping[str, Tensor] | None = None,
        *,
        names: Mapping[str, str] | None = None,
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        """Take references to the tensors that are saved and restored.

        `parameters` and `old`: this rank's, by Hugging Face names, tied ones once; DTensors if they are sharded over ranks. `old`:
        weights of the old policy, if it is a separate model. `names`: the parameters that are saved, with their names in the
        state; None: all, by their own.
        """
        self._parameters, self._optimizer, self._old = parameters, optimizer, old or {}
        self._names = {name: name for name in parameters} if names is None else names
        self._rank = rank
        self._writer = StateWriter(rank, num_ranks)
        self._random = _random_states()

    def begin_step(self) -> None:
        """Remember the random generators' states. A state that is saved within a step holds those at the step's start."""
        self._random = _random_states()

    def save(self, folder: Path) -> Future[None]:
        """Write this rank's part of the state to `folder`, see `StateWriter.begin`. Accumulated gradients are not saved."""
        tensors = self._tensors() | {"updates": torch.tensor([self._optimizer.num_updates])}
        own = {f"random/{self._rank}/{kind}": state for kind, state in self._random.items()}
        return self._writer.begin(tensors, folder, own=own)

    def load(self, folder: Path) -> None:
        """Restore the state that was saved in `folder`. Raises `RunError` if it belongs to another model."""
        updates = torch.zeros(1, dtype=torch.int64)
        load_tensors_into({"updates": updates}, folder)
        self._optimizer.make_states(int(updates))
        with torch.no_grad():
            load_tensors_into(self._tensors(), folder)
        known = _sizes(folder)
        for kind, state in _random_states().items():
            names = [f"random/{rank}/{kind}" for rank in (self._rank, 0)]  # under another layout there may be no such rank
            if name := next((name for name in names if known.get(name) == state.size()), None):
                load_tensors_into({name: state}, folder)
                _set_random_state(kind, state)
        self.begin_step()

    def _tensors(self) -> dict[str, Tensor]:
        tensors = {f"weights/{known}": self._parameters[name].detach() for name, known in self._names.items()}
        tensors |= {f"old/{known}": self._old[name].detach() for name, known in self._names.items() if self._old}
        for name, kind, state in self._optimizer.states():
            if name in self._names and kind != "step":
                tensors[f"optimizer/{self._names[name]}/{kind}"] = placed_like(state, self._parameters[name])
        return tensors


class StateWriter:
    """Writer of one rank's tensors, which works in the background, one state at a time."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self._rank, self._num_ranks = rank, num_ranks

    def begin(self, tensors: Mapping[str, Tensor], folder: Path, *, own: Mapping[str, Tensor] | None = None) -> Future[None]:
        """Copy the tensors, and write the copies to `folder` in a thread. Returns when the tensors may change.

        `own`: tensors that no other rank has. Of the others, the first rank (0) writes plain ones; which rank writes a part of a
        DTensor follows from its placements.

        The future is done when the files of this rank are on the disk; on the first rank, when those of all ranks are. It
        raises `OSError` if they could not be written, and `RunError` that names a rank which failed or was not done in time.
        """
        staged = {name: _copy(tensor) for name, tensor in tensors.items() if _writes(tensor, not self._rank)}
        staged |= {name: _copy(tensor) for name, tensor in (own or {}).items()}
        written: Future[None] = Future()
        arguments = (staged, folder, written)
        threading.Thread(target=self._write, args=arguments, name="checkpoint writer", daemon=True).start()
        return written

    def _write(self, staged: dict[str, Tensor], folder: Path, written: Future[None]) -> None:
        try:
            try:
                with at_files(CHECKPOINT_FILES):
                    folder.mkdir(parents=True, exist_ok=True)
                    if staged:
                        storage = _RankWriter(str(folder), self._rank, _file_numbers(staged))
                        _expect_no_group()
                        save(staged, storage_writer=storage, no_dist=True)
            except BaseException as error:
                if self._rank:
                    with contextlib.suppress(OSError):  # a full disk may have room for the marker's name, and none for the reason
                        self._marker(folder, self._rank, "failed").write_text(str(_cause(error)))
                raise
            if self._rank:
                self._marker(folder, self._rank, "done").touch()
            else:
                self._wait_for_others(folder)
            written.set_result(None)
        except BaseException as error:  # raised where the future is awaited
            written.set_exception(_cause(error))

    def _wait_for_others(self, folder: Path) -> None:
        deadline = time.monotonic() + WRITE_SECONDS
        for rank in range(1, self._num_ranks):
            done, failed = (self._marker(folder, rank, how) for how in ("done", "failed"))
            while not done.exists():
                if failed.exists():
                    why = failed.read_text() or "the disk has not even had room for the reason, so it may be full"
                    raise RunError(f"rank {rank} could not write its part of the checkpoint: {why}")
                if time.monotonic() > deadline:
                    raise RunError(f"rank {rank} has not written its part of the checkpoint within {WRITE_SECONDS:g} s")
                time.sleep(_LOOK_SECONDS)
        for rank in range(1, self._num_ranks):
            self._marker(folder, rank, "done").unlink()

    def _marker(self, folder: Path, rank: int, how: str) -> Path:
        return folder / f"rank-{rank:05d}.{how}"


def load_tensors_into(tensors: Mapping[str, Tensor], folder: Path) -> None:
    """Fill the tensors, in place, from the state in `folder`, by name. The state may have been saved under any layout.

    Raises `RunError`, which names a tensor that is missing or has another shape, or if the files cannot be read.
    """
    try:
        known = _sizes(folder)
        for name, tensor in tensors.items():
            if name not in known:
                raise RunError(f"the checkpoint {folder} has no {name}: it was written by a run with another model or old policy")
            if known[name] != tensor.shape:
                raise RunError(f"the checkpoint {folder} has {name} of shape {tuple(known[name])}, not {tuple(tensor.shape)}")
        _expect_no_group()
        load(dict(tensors), storage_reader=HuggingFaceStorageReader(str(folder)), no_dist=True)
    except OSError as error:
        raise RunError(f"the checkpoint {folder} cannot be read: {error}") from error


def fingerprint_of(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """SHA-256 of each tensor's bytes, in hexadecimal, by name. Takes one tensor at a time, so they may be gathered lazily."""
    return {name: hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors}


def _expect_no_group() -> None:
    """Silence torch's warning that there is no process group: each rank saves and loads alone, on purpose.

    The filter is set at each call, because an import within `warnings.catch_warnings`, in any thread, would lose it again.
    """
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized", category=UserWarning)


def _sizes(folder: Path) -> dict[str, torch.Size]:
    """Sizes of all whole tensors in the folder, by name."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in found.items() if isinstance(tensor, TensorStorageMetadata)}


class _RankWriter(HuggingFaceStorageWriter):
    """Writer of safetensors (torch's) that puts the rank into the file names.

    Every rank plans alone and would take itself for the first, so without it all ranks would use the same names.
    """

    def __init__(self, path: str, rank: int, file_numbers: dict[str, int]) -> None:
        super().__init__(path, fqn_to_index_mapping=file_numbers, save_distributed=True)
        self._rank = rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Put the file numbers and this rank's shard number into the plans. Overrides torch's method of this name."""
        storage = {"fqn_to_index_mapping": self.fqn_to_index_mapping, "shard_index": self._rank + 1}
        return [dataclasses.replace(plan, storage_data=storage) for plan in plans]


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """Number of the file, from 1, that each tensor goes to, by the tensor's name."""

    def size(name: str) -> int:
        tensor = tensors[name]
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes

    files = enumerate(cut_by_size(tensors, size, FILE_BYTES), 1)
    return {name: number for number, names in files for name in names}


def _writes(tensor: Tensor, is_first: bool) -> bool:
    """Whether this rank writes its part of the tensor: the part is not empty, and no rank before this one holds it, too."""
    if not isinstance(tensor, DTensor):
        return is_first
    place = tensor.device_mesh.get_coordinate()
    is_copy = place is None or any(p.is_replicate() and at for p, at in zip(tensor.placements, place, strict=True))
    return not is_copy and tensor.to_local().numel() > 0


def _copy(tensor: Tensor) -> Tensor:
    """Copy in host memory, contiguous. The copy of a DTensor is a DTensor with the same place in the whole."""
    tensor = tensor.detach()
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return placed_like(local.to("cpu", copy=True, memory_format=torch.contiguous_format), tensor)


def placed_like(part: Tensor, whole: Tensor) -> Tensor:
    """Part of a whole in the place that this rank's part of the DTensor `whole` has; `part` itself if `whole` is a plain tensor."""
    if not isinstance(whole, DTensor):
        return part
    kind: Any = DTensor  # its `from_local` would bring the part back to the mesh's device
    placed: Tensor = kind(part, whole._spec, requires_grad=False)
    return placed


def _cause(error: BaseException) -> BaseException:
    """First error that torch.distributed.checkpoint has wrapped in `error`, or `error` itself if it has wrapped none."""
    failures = getattr(error, "failures", None)
    return next((cause for cause, *_ in failures.values()), error) if failures else error


def _random_states() -> dict[str, Tensor]:
    """States of the random generators that a loss may use: the CPU's, and that of the accelerator if there is one."""
    states = {"cpu": torch.get_rng_state()}
    if torch.accelerator.is_available():
        kind = torch.accelerator.current_accelerator()
        states["accelerator"] = torch.get_device_module(kind).get_rng_state()
    return states


def _set_random_state(kind: str, state: Tensor) -> None:
    if kind == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(torch.accelerator.current_accelerator()).set_rng_state(state)
