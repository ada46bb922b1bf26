"""State of an engine whose tensors a library keeps in its own form: gathered by name, one at a time, written by one process.

    tensors, whole, by Hugging Face name --copies in the writer's host memory--> the files of state.py, and back

So another engine can load the state, under any layout. The price: the process that writes holds the weights and the optimiser's
state, 12 bytes a parameter, in its host memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import Future
from pathlib import Path

import torch
from torch import Tensor

from asyncflow.engines.train.state import StateWriter, load_tensors_into


class GatheredState:
    """Saving and loading of a state, in each process that takes part."""

    def __init__(self, *, is_writer: bool) -> None:
        """`is_writer`: this process writes the files; exactly one process does."""
        self._writer = StateWriter() if is_writer else None
        self.begin_step()

    def begin_step(self) -> None:
        """Remember the random generator's state. A state that is saved within a step holds the one at the step's start."""
        self._random = torch.get_rng_state()

    def save(self, tensors: Iterable[tuple[str, Tensor]], num_updates: int, folder: Path) -> Future[None]:
        """Iterate over all (name, whole tensor), so that they are gathered; the writer writes them to `folder`.

        The future is as in `StateWriter.begin`; in a process that does not write, it is done at once.
        """
        if self._writer is None:
            for _ in tensors:
                pass  # takes part in gathering
            done: Future[None] = Future()
            done.set_result(None)
            return done
        held = {name: tensor.detach().cpu() for name, tensor in tensors}
        own = {"updates": torch.tensor([num_updates]), "random/0/cpu": self._random}
        return self._writer.begin(held, folder, own=own)

    def load(self, folder: Path) -> int:
        """Restore the random generator's state from `folder`, and return the number of updates.

        Raises `RunError` if the files cannot be read or lack these.
        """
        updates, self._random = torch.zeros(1, dtype=torch.int64), torch.get_rng_state()
        load_tensors_into({"updates": updates, "random/0/cpu": self._random}, folder)
        torch.set_rng_state(self._random)
        return int(updates)


def loaded(name: str, shape: tuple[int, ...], dtype: torch.dtype, folder: Path) -> Tensor:
    """Whole tensor `name` of the state in `folder`, on the CPU. Raises `RunError` if there is none of that shape."""
    tensor = torch.empty(shape, dtype=dtype)
    load_tensors_into({name: tensor}, folder)
    return tensor
