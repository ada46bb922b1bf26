"""Attested weights of vLLM's servers: what their workers sum up (in_vllm/asyncflow_sums.py), by the names that versions have.

    a buffer, in parts over the workers    the sum of its parts' sums
    one that several workers have whole    each of them
    the experts of a layer                 the sum over all of them, whatever workers have which, under their names together
    columns that a kernel has given        the sum over the file that the server was to load, with these in the place of its own
    what a layer has made of its weights   the sum over what was loaded, if what was made of that lies there
    B of an adapter, with its scaling      the sum over its file, with the difference of what lies there from what should

So what lies in a server as it should has the sum that its tensor has, and anything else another one. Of columns that no kernel was
asked for this time nothing is known; there are others each time. Tensors that workers cannot tell of are unseen, each with the
reason.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence, Set
from typing import NamedTuple
from weakref import WeakKeyDictionary

from msgspec.structs import replace

from asyncflow.attestation import MODULUS, Attestation, fault_of, sum_of_all
from asyncflow.engines.rollout.vllm.client import FoundSum, ServerLost, VllmClient, WorkerSums
from asyncflow.engines.rollout.vllm.lora_versions import LoraVersion, LoraVersions
from asyncflow.engines.rollout.vllm.promised import NotAttested, PromisedTensors, TensorSums
from asyncflow.engines.rollout.vllm.servers import ServerHandle, ServerPool
from asyncflow.engines.rollout.vllm.weights import ServerWeights

log = logging.getLogger(__name__)

Part = tuple[list[str], int]


class Told(NamedTuple):
    """Weights that a server's workers tell of. `unseen`: by the names of tensors, or paths of layers, why they tell nothing of it,
    or what was given to a layer alone."""

    parts: list[Part]
    unseen: dict[str, str]


class ServerAttestations:
    """Attestations of the servers of one engine. `are_whole`: sums told of all that they generate with the last time."""

    def __init__(self, weights: ServerWeights, lora: LoraVersions | None) -> None:
        """`weights` are what the servers have, or the base of what they have: `lora`."""
        self._weights, self._lora = weights, lora
        self._bases: WeakKeyDictionary[VllmClient, tuple[int | None, dict[str, str]]] = WeakKeyDictionary()
        """Of each server, which has a new client when it starts again, the sum over its base, or what is unseen of that."""
        self._known_names = dict[str, str]()
        self._has_logged_why = self._is_quantised = False
        self.are_whole = True

    def whole(self) -> PromisedTensors:
        """The weights that the servers should have; valid until they are to have others."""
        weights = self._weights
        return PromisedTensors(
            weights.version, weights.tensors(), weights.dtype, differences=weights.differences, known_names=self._known_names
        )

    def adapter(self, lora: LoraVersions, version: LoraVersion) -> PromisedTensors:
        """The adapter that is this version. Blocks."""
        tensors = lora.tensors(version)
        return PromisedTensors(version.version, tensors, self._weights.dtype, adapter=version.name, scaling=lora.spec.scaling)

    async def of_all(self, servers: ServerPool) -> Attestation | None:
        """Attestation of all servers that are up; None where one can tell nothing, and a line in the log where one cannot tell all.

        Of one that is lost meanwhile nothing is said: it is checked when it comes back. Raises `RunError` where all are lost.
        """
        lora = self._lora
        promised = await (asyncio.to_thread(self.whole) if lora is None else asyncio.to_thread(self.adapter, lora, lora.current))
        sums: dict[VllmClient, list[WorkerSums]] = {}

        async def ask(_: ServerHandle, client: VllmClient) -> None:
            sums[client] = await self._ask(client, promised)

        while not sums:
            await servers.least_loaded()  # one is up
            await servers.everywhere(ask)
        found = [await self._attested(client, workers, promised) for client, workers in sums.items()]
        attested = [each for each in found if each is not None]
        self.are_whole = len(attested) == len(found) and all(each.is_whole for each in attested)
        return await asyncio.to_thread(self._merged, attested) if len(attested) == len(found) else None

    async def check(self, client: VllmClient, promised: PromisedTensors) -> None:
        """Check that a server which has come back has what it was given. Raises `ServerLost` if it has anything else."""
        attested = await self._attested(client, await self._ask(client, promised), promised)
        if attested is None:
            return
        if fault := fault_of(attested, promised.version, await asyncio.to_thread(promised.sums)):
            raise ServerLost(f"{client.address} has not what it was given: {fault}")

    def _merged(self, attested: Sequence[Attestation]) -> Attestation:
        """Servers that have one base have the one that each should have, or are all wrong."""
        bases = {each.base for each in attested if each.base is not None}
        base = self.whole().base() if len(bases) > 1 else next(iter(bases), None)
        return replace(merged(attested, base), is_quantised=self._is_quantised)

    def _base(self, workers: Sequence[WorkerSums]) -> tuple[int | None, dict[str, str]]:
        """Sum over the base that a server has, from the sums of its workers; or None, and what is unseen: one that was quantised
        has other norms, too. Raises `NotAttested`."""
        base = self.whole()
        told = told_of(workers, base)
        if told.unseen and self._weights.find_differences():  # it was files that have more than servers, perhaps
            base = self.whole()
            told = told_of(workers, base)
        return None if told.unseen else base_of(told.parts, base), told.unseen

    async def _ask(self, client: VllmClient, promised: PromisedTensors) -> list[WorkerSums]:
        """Sums that a server's workers answer."""
        has_weights = self._lora is None or client not in self._bases
        return await client.sums(promised.version, lora=promised.adapter, has_weights=has_weights)

    async def _attested(self, client: VllmClient, workers: Sequence[WorkerSums], promised: PromisedTensors) -> Attestation | None:
        """Attestation of a server, from the sums of its workers."""
        try:
            if why := [worker.why for worker in workers if worker.why]:
                raise NotAttested(why[0])
            self._is_quantised |= any(each.is_quantised for worker in workers for each in worker.weights)
            if self._lora is None:
                (parts, unseen), base = await asyncio.to_thread(told_of_version, workers, promised), None
            else:
                if client not in self._bases:
                    self._bases[client] = await asyncio.to_thread(self._base, workers)
                base, unseen_of_base = self._bases[client]
                parts, unseen = await asyncio.to_thread(told_of_lora, workers, promised)
                unseen |= unseen_of_base
        except NotAttested as why_not:
            self._log_why(client, str(why_not))
            return None
        if unseen:
            self._log_why(client, f"a part is not seen: {next(iter(unseen.values()))}")
        return Attestation(parts, base, unseen=sorted(unseen))

    def _log_why(self, client: VllmClient, why: str) -> None:
        if not self._has_logged_why:
            log.warning("what %s generates with is not attested: %s", client.address, why)
        self._has_logged_why = True


def told_of_version(workers: Sequence[WorkerSums], promised: PromisedTensors) -> Told:
    """Version that a server generates with, from the sums of its workers over the model's own weights, and tensors that no version
    has where they are others than the model's files have. Raises `NotAttested` where they make up none at all."""
    parts, unseen = told_of(workers, promised)
    others = [
        (names, found)
        for names, found in parts
        if not promised.constants.issuperset(names) or (found - sum(map(promised.sum_of, names))) % MODULUS
    ]
    return Told(others, unseen)


def told_of(workers: Sequence[WorkerSums], promised: PromisedTensors) -> Told:
    """All that a server generates with, likewise."""
    parts, unseen = list[Part](), {path: why for worker in workers for path, why in worker.unseen.items()}
    own_buffers = [[each for each in worker.buffers if each.names[0] in promised.constants] for worker in workers]
    by_tensor = [*_by_tensor([worker.weights for worker in workers]), *_by_tensor(own_buffers)]
    strangers = list[TensorSums]()
    for each in by_tensor:
        if {*promised.names_of(each[0])} <= promised.names:
            _tell(each, promised, parts, unseen)
        else:
            strangers.append(each)
    lacking = promised.names - {name for names, _ in parts for name in names}
    for stranger in strangers:
        promised.recognise(stranger, lacking)
        _tell(stranger, promised, parts, unseen)
    lacking = promised.names - {name for names, _ in parts for name in names}
    for name in sorted(lacking):
        unseen.setdefault(promised.whole_of(name), f"its model has no {name}, which is in a file of the model's")
    if not promised.wholes:
        return Told(parts, unseen)
    parts = _of_wholes(parts, promised.wholes, {*map(promised.whole_of, lacking)})
    why = next(iter(unseen.values()), "")
    for name in {*map(promised.whole_of, promised.names)} - {name for names, _ in parts for name in names}:
        unseen.setdefault(name, why)  # of tensors that are told together with those of which pieces are lacking
    return Told(parts, unseen)


def _tell(each: TensorSums, promised: PromisedTensors, parts: list[Part], unseen: dict[str, str]) -> None:
    """Add what a server has there to the parts, or to what is unseen."""
    names = promised.names_of(each[0])
    try:
        parts += [(names, found) for found in promised.found(names, each)]
    except NotAttested as why_not:
        unseen[min({*names} - promised.names, default=names[0])] = str(why_not)
        return
    if why := next((worker.unseen for worker in each if worker.unseen), ""):
        unseen.update(dict.fromkeys(map(promised.whole_of, names), why))


def _of_wholes(parts: Sequence[Part], wholes: Mapping[str, str], lacking: Set[str]) -> list[Part]:
    """The parts by the names of a version's tensors: those with pieces of the same tensors are one. Those with `lacking` tensors
    are left out."""
    made, joined = list[Part](), dict[frozenset[str], tuple[list[str], int]]()
    for names, found in parts:
        if not wholes.keys() & set(names):
            made.append((names, found))
            continue
        of = frozenset(wholes.get(name, name) for name in names)
        before, so_far = joined.get(of, ([], 0))
        joined[of] = before + names, (so_far + found) % MODULUS
    pieces, tensors = [name for names, _ in joined.values() for name in names], [name for of in joined for name in of]
    if len({*pieces}) < len(pieces) or len({*tensors}) < len(tensors):
        raise NotAttested(f"several of its layers have pieces of {min(tensors)}")
    return [*made, *((sorted(of), found) for of, (_, found) in joined.items() if not of & lacking)]


def told_of_lora(workers: Sequence[WorkerSums], promised: PromisedTensors) -> Told:
    """Adapter that a server generates with, likewise. A layer that has none has zeros, and is left out."""
    parts, unseen = list[Part](), {path: why for worker in workers for path, why in worker.unseen_lora.items()}
    for each in _by_tensor([worker.lora for worker in workers]):
        name = next((name for name in each[0].names if name in promised.names), each[0].names[0])
        if name in promised.names:
            try:
                parts += [([name], found) for found in promised.found([name], each, workers[0].lora_rank)]
            except NotAttested as why_not:
                unseen[name] = str(why_not)
        elif found := [worker.found for worker in each if worker.found]:
            parts.append(([name], found[0]))
    for name in promised.names - {name for names, _ in parts for name in names}:
        if layer := next((path for path in unseen if name.startswith(f"{path}.")), ""):
            unseen[name] = unseen[layer]
    return Told(parts, unseen)


def base_of(parts: Sequence[Part], promised: PromisedTensors) -> int:
    """Sum over a model's own weights, from its parts. Of a tensor with several copies, one that is another counts."""
    found: dict[tuple[str, ...], int] = {}
    for names, each in parts:
        key = (*names,)
        is_other = key in found and each != found[key]  # else nothing is read from files
        if key not in found or (is_other and each != sum_of_all(promised.all_sums()[name] for name in names)):
            found[key] = each
    return (sum_of_all(found.values()) + promised.sum_of_others) % MODULUS


def merged(attestations: Sequence[Attestation], base: int | None) -> Attestation:
    """Attestation of several servers. `base`: what that of each should be; the first that is another counts. What one server has
    none of, and others have, is zeros there."""
    others = [each.base for each in attestations if each.base not in (base, None)]
    parts = [part for each in attestations for part in each.parts or []]
    every = {name for names, _ in parts for name in names}
    for each in attestations:
        own = {name for names, _ in each.parts or [] for name in names}
        parts += [([name], 0) for name in sorted(every - own - {*each.unseen})]
    unseen = sorted({name for each in attestations for name in each.unseen})
    return Attestation(parts, others[0] if others else base, unseen=unseen)


def _by_tensor(workers: Sequence[Sequence[FoundSum]]) -> list[tuple[FoundSum, ...]]:
    if len({len(found) for found in workers}) != 1:
        raise NotAttested("its workers have not the same tensors")
    by_tensor = list(zip(*workers, strict=True))
    if any(len({(*worker.names,) for worker in each}) != 1 for each in by_tensor):
        raise NotAttested("its workers have not the same tensors")
    return by_tensor
