"""The state of an engine whose tensors a library keeps in its own form: gathered by name, one at a time, written by one process.

    tensors, whole, by Hugging Face name --copies in host memory of the one that writes--> the files of state.py, and back

So a state of one engine can be loaded by another, under any layout. What that costs: the process that writes holds the weights and
the optimiser's state, 12 bytes a parameter, in its host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from asyncflow.engines.train.state import StateWriter, load_tensors_into


class GatheredState:
    """One process's end of saving and loading."""

    def __init__(self, *, is_writer: bool) -> None:
        self._writer = StateWriter() if is_writer else None
        self.begin_step()

    def begin_step(self) -> None:
        """Remember the random numbers as they are: a state that is saved in the middle of a step is that of its start."""
        self._random = torch.get_rng_state()

    def save(self, tensors: Iterable[tuple[str, Tensor]], num_updates: int, folder: Path) -> Future[None]:
        """Iterate over all (name, tensor) wherever they are gathered; write them, if this process does, as `StateWriter.begin`."""
        if self._writer is None:
            for _ in tensors:
                pass  # taking part
            done: Future[None] = Future()
            done.set_result(None)
            return done
        held = {name: tensor.detach().cpu() for name, tensor in tensors}
        own = {"updates": torch.tensor([num_updates]), "random/0/cpu": self._random}
        return self._writer.begin(held, folder, own=own)

    def load(self, folder: Path) -> int:
        """The number of updates; the random numbers go on where they were. Raises `RunError`."""
        updates, self._random = torch.zeros(1, dtype=torch.int64), torch.get_rng_state()
        load_tensors_into({"updates": updates, "random/0/cpu": self._random}, folder)
        torch.set_rng_state(self._random)
        return int(updates)


def loaded(name: str, shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """One tensor of a state, whole, on the CPU. Raises `RunError` where there is none of that shape."""
    tensor = torch.empty(shape, dtype=dtype)
    load_tensors_into({name: tensor}, folder)
    return tensor
