"""Tensors that vLLM's servers were to load, by the names that versions have, and sums over them (attesting.py)."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence, Set
from functools import cached_property

import torch
from torch import Tensor

from asyncflow.attestation import MODULUS, modulus_of, sum_of_all
from asyncflow.bit_sums import sum_of, sum_over
from asyncflow.engines.lora_files import A, B
from asyncflow.engines.rollout.vllm.client import FoundSum
from asyncflow.engines.rollout.vllm.weights import NO_DIFFERENCES, Differences

TensorSums = Sequence[FoundSum]
"""Sums of all workers over a tensor."""


class NotAttested(Exception):
    """Error for a server of which one cannot tell what it generates with, or has in a tensor's place. The text says why."""


class PromisedTensors:
    """Tensors that a server was to load, as engines of this dtype have them, and sums over them."""

    def __init__(
        self,
        version: int,
        tensors: Mapping[str, Tensor],
        dtype: str,
        *,
        differences: Differences = NO_DIFFERENCES,
        known_names: dict[str, str] | None = None,
        adapter: str | None = None,
        scaling: float = 1.0,
    ) -> None:
        """`tensors` may be read from files, one at a time. `differences`: between them and a version. `known_names`: in files, by
        those that only the code of a server's model has; others are added once they are known. `adapter`: name of one, if they
        are its. `scaling`: of its product; vLLM multiplies B with it."""
        self.version, self.adapter = version, adapter
        self.tied, self.wholes, constants, self._unused = differences
        self.constants = constants & tensors.keys()
        self._known_names = {} if known_names is None else known_names
        self._tensors, self._dtype, self._scaling = tensors, getattr(torch, dtype), scaling
        self._sums: dict[str, int] = {}
        self._are_finite: dict[str, bool] = {}

    @property
    def names(self) -> Set[str]:
        """Names of the tensors."""
        return self._tensors.keys()

    def whole_of(self, name: str) -> str:
        """Name of the version's tensor that this one is, or is a piece of."""
        return self.wholes.get(name, name)

    def names_of(self, found: FoundSum) -> list[str]:
        """Names that the tensors have here which a server's model calls so."""
        if (name := self._known_names.get(found.names[0])) is not None:
            return [name]
        own = (name if name in self._tensors else self.tied.get(name, self.wholes.get(name, name)) for name in found.names)
        return [*dict.fromkeys(own)]

    def recognise(self, workers: TensorSums, lacking: Set[str]) -> None:
        """Know what a server has under a name of its own by the tensor that was copied there, if it is one of these, of the same
        layer, and the only one with its sum.

        A model's code may make something else of what it copies: of a tensor that is one number all over that may have the same
        sum, so such a one is not known by it.
        """
        own_name, source = workers[0].names[0], next((each.source for each in workers if each.source), "")
        if source not in lacking or _layer(source) != _layer(own_name):
            return
        with contextlib.suppress(NotAttested):
            if {*self.found([source], workers)} != {self.sum_of(source)}:
                return
            alike = [name for name in lacking if _layer(name) == _layer(source) and self.sum_of(name) == self.sum_of(source)]
            tensor = self._tensor(source)
            if alike == [source] and bool((tensor != tensor.flatten()[0]).any()):
                self._known_names[own_name] = source

    def sums(self) -> dict[str, int]:
        """Sums of the version's tensors, by the names that it has for them."""
        found: dict[str, int] = {}
        for name in self._tensors.keys() - self.constants:
            whole = self.whole_of(name)
            found[whole] = (found.get(whole, 0) + self.sum_of(name)) % modulus_of(name)
        return found

    @cached_property
    def sum_of_others(self) -> int:
        """Sum over what the model's files have besides, and no server."""
        return sum_over(self._unused.values(), self._dtype)

    def all_sums(self) -> dict[str, int]:
        """Sums of the version's tensors and of those that no version has."""
        return self.sums() | {name: self.sum_of(name) for name in self.constants}

    def base(self) -> int:
        """Sum over the model's files, if this is what they have."""
        return (sum_of_all(self.all_sums().values()) + self.sum_of_others) % MODULUS

    def sum_of(self, name: str) -> int:
        """Sum over a tensor's bits."""
        if name not in self._sums:
            self._sums[name] = sum_of(name, self._tensor(name))
        return self._sums[name]

    def found(self, names: Sequence[str], workers: Sequence[FoundSum], filled: int = 0) -> list[int]:
        """Sums over the copies of a tensor that a server has, or over several tensors together, from those of its workers, in the
        order of their ranks.

        `filled`: rank up to which an adapter's matrices are filled with zeros. Raises `NotAttested` where they make up no copies.
        """
        if unknown := {*names} - self.names:
            raise NotAttested(f"{min(unknown)} is in its model, and in no file of the model's")
        if not any(worker.numel for worker in workers):  # of experts
            return [sum(worker.found for worker in workers) % MODULUS]
        name = names[0]
        tensor = self._tensors[name]
        numel = tensor.numel()
        if name.endswith((A, B)):
            rank = tensor.shape[0 if name.endswith(A) else 1]
            numel = numel // rank * filled
        if not numel or len({each.kept for each in workers}) > 1:
            raise NotAttested(f"{name} is empty, or kept in several dtypes")
        num_copies, rest = divmod(sum(each.numel for each in workers), numel)
        if rest or not num_copies or len(workers) % num_copies:
            raise NotAttested(f"{name} is cut into parts over its workers that do not make up a whole")
        # vLLM gives a part to neighbours, where it is to several.
        copies = (workers[copy::num_copies] for copy in range(num_copies))
        return [self._found_in(name, parts) for parts in copies]

    def _found_in(self, name: str, parts: Sequence[FoundSum]) -> int:
        found = sum(each.found for each in parts) % modulus_of(name)
        columns = sorted({column for each in parts for column in each.columns})
        if columns:
            matrix = self._tensor(name)
            count = sum(each.numel // each.inputs * len(each.columns) for each in parts)
            owns = [  # GPT-2's matrices are loaded the other way
                sum_of(name, _normal(way[:, columns]))
                for way in ((matrix, matrix.t()) if matrix.ndim == 2 else ())
                if len(way) * len(columns) == count and columns[-1] < way.shape[1]
            ]
            if not owns:
                raise NotAttested(f"{name} is cut into parts over its workers that do not make up a whole")
            own = found if found in owns else owns[0]
            if found != own and not self._is_finite(name):
                raise NotAttested(f"{name} is not finite, and what is not takes the rest of a product with it")
            found += self.sum_of(name) - own
        elif kept := parts[0].kept:
            if name not in self.constants:
                raise NotAttested(f"{name} is kept in {kept}")
            found += self.sum_of(name) - sum_of(name, self._tensors[name].to(getattr(torch, kept)))
        elif name.endswith(B) and self._scaling != 1:
            found += self.sum_of(name) - sum_of(name, self._tensor(name) * self._scaling)
        return found % modulus_of(name)

    def _is_finite(self, name: str) -> bool:
        if name not in self._are_finite:
            self._are_finite[name] = bool(self._tensor(name).isfinite().all())
        return self._are_finite[name]

    def _tensor(self, name: str) -> Tensor:
        return self._tensors[name].to(self._dtype)


def _layer(name: str) -> str:
    """The first number in a name."""
    found = re.search(r"\d+", name)
    return found[0] if found else ""


def _normal(tensor: Tensor) -> Tensor:
    """See `normal` in in_vllm/asyncflow_bits.py."""
    return torch.where(tensor.abs() < torch.finfo(tensor.dtype).tiny, torch.zeros_like(tensor), tensor)
