"""A train engine's state in a checkpoint: named tensors, written by every rank, read under any layout.

    tensors --stage--> copies in host memory --thread--> <folder>/shard-00001-....safetensors    (one or more for every rank)
    <folder>/*.safetensors --torch.distributed.checkpoint--> tensors, in place, whatever layout they were saved under

Everything is a tensor, the counts too, under names that no layout changes (`weights/<Hugging Face name>`,
`optimizer/<name>/exp_avg`), so that files are safetensors and nothing else: torch.distributed.checkpoint's own storage writes its
metadata, and what is no tensor, by pickle. Its planner says which part of a sharded tensor (DTensor) lies where, and puts parts
together again when another layout loads them; since every rank plans for itself (`no_dist`), ranks exchange nothing.

A part that several ranks hold is written by the first of them.
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
from typing import Any, Final, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.tensor import DTensor

from asyncflow.engines.train.optimizer import UpdateState
from asyncflow.types import RunError

FILE_BYTES: Final = 1 << 30
"""Tensors of about so many bytes share a file: so much again is held in memory while they are written."""
WRITE_SECONDS: Final = 600.0
"""How long the other ranks may take longer than the first one."""
_LOOK_SECONDS: Final = 0.05


class EngineState:
    """One rank's part of an engine that updates `parameters` by `optimizer`, with an old policy perhaps."""

    def __init__(
        self,
        parameters: Mapping[str, Tensor],
        optimizer: UpdateState,
        old: Mapping[str, Tensor] | None = None,
        *,
        rank: int = 0,
        num_ranks: int = 1,
        is_first: bool = True,
    ) -> None:
        """`parameters` and `old`: of this rank, by Hugging Face names, tied ones once; DTensors where they are cut over ranks.
        `is_first`: see `StateWriter.begin`."""
        self._parameters, self._optimizer, self._old = parameters, optimizer, old or {}
        self._rank, self._is_first = rank, is_first
        self._writer = StateWriter(rank, num_ranks)
        self._random = _random_states()

    def begin_step(self) -> None:
        """Remember the random numbers as they are: a state that is saved in the middle of a step is that of its start."""
        self._random = _random_states()

    def save(self, folder: Path) -> Future[None]:
        """See `StateWriter.begin`. Between updates, whatever has been accumulated since."""
        tensors = self._tensors() | {"updates": torch.tensor([self._optimizer.num_updates])}
        own = {f"random/{self._rank}/{kind}": state for kind, state in self._random.items()}
        return self._writer.begin(tensors, folder, own=own, is_first=self._is_first)

    def load(self, folder: Path) -> None:
        """Be as the engine that was saved there. Raises `RunError` where that had another model."""
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
        tensors = {f"weights/{name}": parameter.detach() for name, parameter in self._parameters.items()}
        tensors |= {f"old/{name}": parameter.detach() for name, parameter in self._old.items()}
        kinds = self._optimizer.states()
        return tensors | {f"optimizer/{name}/{kind}": state for name, kind, state in kinds if kind != "step"}


class StateWriter:
    """Writes one rank's tensors in the background, one state at a time."""

    def __init__(self, rank: int = 0, num_ranks: int = 1) -> None:
        self._rank, self._num_ranks = rank, num_ranks

    def begin(
        self, tensors: Mapping[str, Tensor], folder: Path, *, own: Mapping[str, Tensor] | None = None, is_first: bool = True
    ) -> Future[None]:
        """Copy the tensors, then write the copies to `folder` while the caller goes on. `own`: those that no other rank has.

        `is_first`: of the ranks that hold the same plain tensors, this one writes them; a DTensor knows by itself. Returns when the
        tensors may change. The future is done when the files of this rank are on the disk, on the first rank (0) when those of all
        ranks are; it raises `OSError` where they could not be written, `RunError` naming a rank that has not in time.
        """
        staged = {name: _copy(tensor) for name, tensor in tensors.items() if _writes(tensor, is_first)}
        staged |= {name: _copy(tensor) for name, tensor in (own or {}).items()}
        written: Future[None] = Future()
        arguments = (staged, folder, written)
        threading.Thread(target=self._write, args=arguments, name="checkpoint writer", daemon=True).start()
        return written

    def _write(self, staged: dict[str, Tensor], folder: Path, written: Future[None]) -> None:
        try:
            try:
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
        except BaseException as error:  # handed to who waits for it
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
    """Fill the tensors with what `folder` holds under their names, under whatever layout it was saved.

    Raises `RunError` naming what is missing, or has another shape.
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
    """SHA-256 of each tensor's bytes, in hexadecimal; they may come one at a time."""
    return {name: hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest() for name, tensor in tensors}


def _expect_no_group() -> None:
    """Have torch not warn at each call that a rank is on its own: it is meant to be. Said at the call, since whoever imports this
    within `warnings.catch_warnings`, in any thread, loses what was said at the import."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized", category=UserWarning)


def _sizes(folder: Path) -> dict[str, torch.Size]:
    """Of all tensors that are there, put together."""
    found = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    return {name: tensor.size for name, tensor in found.items() if isinstance(tensor, TensorStorageMetadata)}


class _RankWriter(HuggingFaceStorageWriter):
    """torch's writer of safetensors, whose file names say by which rank: planning alone, every rank thinks it is the first."""

    def __init__(self, path: str, rank: int, file_numbers: dict[str, int]) -> None:
        super().__init__(path, fqn_to_index_mapping=file_numbers, save_distributed=True)
        self._rank = rank

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        storage = {"fqn_to_index_mapping": self.fqn_to_index_mapping, "shard_index": self._rank + 1}
        return [dataclasses.replace(plan, storage_data=storage) for plan in plans]


def _file_numbers(tensors: Mapping[str, Tensor]) -> dict[str, int]:
    """The file that each tensor belongs to, from 1 on."""
    numbers, number, size = {}, 1, 0
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if size and size + local.nbytes > FILE_BYTES:
            number, size = number + 1, 0
        numbers[name], size = number, size + local.nbytes
    return numbers


def _writes(tensor: Tensor, is_first: bool) -> bool:
    """Whether this rank is the first of those that hold the same part, and it is not empty."""
    if not isinstance(tensor, DTensor):
        return is_first
    place = tensor.device_mesh.get_coordinate()
    is_copy = place is None or any(p.is_replicate() and at for p, at in zip(tensor.placements, place, strict=True))
    return not is_copy and tensor.to_local().numel() > 0


def _copy(tensor: Tensor) -> Tensor:
    """In host memory, contiguous; a part stays a part of the whole."""
    tensor = tensor.detach()
    if not isinstance(tensor, DTensor):
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    local = tensor.to_local().to("cpu", copy=True, memory_format=torch.contiguous_format)
    whole: Any = DTensor  # its `from_local` would bring the part back to the mesh's device
    return cast(Tensor, whole(local, tensor._spec, requires_grad=False))


def _cause(error: BaseException) -> BaseException:
    """What torch.distributed.checkpoint has wrapped: the first failure of a rank."""
    failures = getattr(error, "failures", None)
    return next((cause for cause, *_ in failures.values()), error) if failures else error


def _random_states() -> dict[str, Tensor]:
    """Of the generators that a loss may draw from: the CPU's, and the present accelerator's."""
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
