"""Attested weights: does an engine generate with the version that it was given?

    sender: sums of each tensor's bits, in the dtype that engines generate in --> manifest
    engine: sums of the bits that its kernels read, after an install         --> compared with the manifest's, by `PolicyVersions`
    worker of a critic's values: the same of the critic's                    --> compared by itself

A tensor's sum is that of its elements' bits as integers, modulo 2^32, and of an adapter's modulo 2^64. It does not know their
order, so an engine takes it from its own buffers, wherever its kernels want an element to lie, and unpacks nothing. What is stale,
was not written, was written in part, or was rounded otherwise has another sum, but for small tensors now and then. Elements that
have changed places within one buffer have the same. So has, modulo 2^32, a float32 tensor of which an even number of elements are
negated, or a multiple of 512 doubled or halved. Log-probs tell of what moves them by more than they may differ: those of one short
sequence, the probe.

    trainer: the probe's log-probs under a version   --> manifest, of the versions that `PolicyVersions` asks it for
    engine:  its own, after an install of one        --> compared with the manifest's

This file imports no torch: manifests pass through the driver.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, NamedTuple

import msgspec

MODULUS: Final = 1 << 32
"""Integers of 32 bits are added up, and wrap around, as fast as memory is read; wider sums take twice as long."""
ADAPTER_MODULUS: Final = 1 << 64
"""An adapter is small, and its scaling, by a power of two as a rule, is a fault to be found where kernels have it in a matrix."""
CRITIC_DTYPE: Final = "float32"
"""Dtype (torch's name) in which a critic's weights are summed up at both ends of their way."""
ADAPTER_ENDS: Final = (".lora_A.weight", ".lora_B.weight")
"""Ends of the names of an adapter's tensors."""
PROBE_TOKENS: Final = 16
FIRST_PROBES: Final = 2
"""Installs of an engine, from its first one on, that are probed: an adapter's first version may change next to nothing."""
PROBE_EVERY: Final = 16
"""Every so many versions all engines are probed."""
TOLERANCES: Final = {"float32": 1e-3, "bfloat16": 0.2}
"""Nats a token by which log-probs of the same weights may differ on average, where an end computes in this dtype."""
UNSUMMED_TOLERANCE: Final = 1.0
"""The same of an engine whose weights are quantised, or may be, since it cannot sum them up."""


class Probe(msgspec.Struct, frozen=True):
    """Short sequence, and the trainer's log-probs of its tokens after the first under a version, at temperature 1: vLLM's servers
    do not divide the logits of prompts by another."""

    token_ids: list[int]
    log_probs: list[float]


class Probing(NamedTuple):
    """Probe of a run: its tokens (none: nothing is probed), and the nats a token by which right log-probs may differ on average."""

    token_ids: list[int]
    tolerance: float


NO_PROBING: Final = Probing([], 0.0)


class Attestation(msgspec.Struct, frozen=True):
    """Weights that an engine generates with: for tensors that lie in one buffer their names, and the sum of their bits.

    `parts` None: the engine cannot tell. `base`: sum over the model's own weights, where a version is an adapter over them, and all
    of them are seen; else None. `log_probs`: of a probe's tokens after the first, if the engine was asked for them and can tell;
    those of several servers stand one after another. `is_quantised`: the sums are those of weights that may be quantised, whose
    log-probs differ by more. `unseen`: names of tensors that may lack in `parts`, or of which these have what was given to a layer
    and nobody sees what its kernel reads.
    """

    parts: list[tuple[list[str], int]] | None
    base: int | None = None
    log_probs: list[float] | None = None
    is_quantised: bool = False
    unseen: list[str] = []

    @property
    def is_whole(self) -> bool:
        """Whether sums tell of all that the engine generates with: else log-probs have to, at every install."""
        return self.parts is not None and not self.unseen

    @property
    def tells_nothing(self) -> bool:
        """Whether the engine cannot tell anything of what it generates with."""
        return self.parts is None and self.log_probs is None

    def share_seen(self, names: Collection[str]) -> float:
        """Share of these tensors, a version's, that the sums tell of."""
        return 0.0 if self.parts is None or not names else 1 - len({*self.unseen} & {*names}) / len(names)


def new_probing(vocabulary: int, max_context: int, dtypes: Sequence[str]) -> Probing:
    """Probe of a run whose trainer and engines compute in these dtypes. Its tokens are spread over the first half of the
    vocabulary: behind it are tokens that some servers refuse."""
    count = min(PROBE_TOKENS, max_context)
    token_ids = [number * vocabulary // (2 * PROBE_TOKENS) % vocabulary for number in range(1, count + 1)]
    return Probing(token_ids if count > 1 else [], max(TOLERANCES[dtype] for dtype in dtypes))


def modulus_of(name: str) -> int:
    """Modulus of the sum over the tensor of this name."""
    return ADAPTER_MODULUS if name.endswith(ADAPTER_ENDS) else MODULUS


def sum_of_all(sums: Iterable[int]) -> int:
    """Sum over several tensors, from theirs."""
    return sum(sums) % MODULUS


def fault_of(attested: Attestation, version: int, sums: Mapping[str, int], base: int | None = None) -> str:
    """Description of what an engine generates with, if that is not the version whose sums these are; "" if it is, or if the engine
    cannot tell."""
    if attested.parts is None:
        return ""
    names = {name for part, _ in attested.parts for name in part}
    if lacking := sorted(sums.keys() - names - {*attested.unseen}):
        return (
            f"the engine generates without {len(lacking)} of the {len(sums)} tensors of version {version}, {lacking[0]} the first"
        )
    if unknown := sorted(names - sums.keys()):
        return f"the engine generates with {len(unknown)} tensors that version {version} does not have, {unknown[0]} the first"
    if others := [part for part, found in attested.parts if (sum(sums[name] for name in part) - found) % modulus_of(part[0])]:
        where = f"in {len(others)} of {len(attested.parts)} parts, {others[0][0]} the first"
        return f"the engine generates with other weights than those of version {version} {where}"
    is_unseen = attested.base is None and bool(attested.unseen)
    if base is not None and not is_unseen and (attested.base is None or (attested.base - base) % MODULUS):
        return f"version {version} is an adapter for another base than the engine's: give every machine the same model"
    return ""


def fault_of_probe(attested: Attestation, version: int, probe: Probe, tolerance: float) -> str:
    """The same by the engine's log-probs of a probe; "" also if the engine has not told any. `tolerance`: see `Probing`."""
    if attested.log_probs is None:
        return ""
    given, trainers, count = attested.log_probs, probe.log_probs, len(probe.log_probs)
    if not given or len(given) % count:
        return f"the engine gives {len(given)} log-probs of the probe sequence's {count}"
    is_exact = attested.is_whole and not attested.is_quantised
    allowed = tolerance if is_exact else max(tolerance, UNSUMMED_TOLERANCE)
    for begin in range(0, len(given), count):
        found = given[begin : begin + count]
        differences = [abs(own - right) for own, right in zip(found, trainers, strict=True)]
        mean = sum(differences) / count
        if not mean <= allowed:  # or it is no number
            at = max(range(count), key=lambda i: math.inf if math.isnan(differences[i]) else differences[i])
            return (
                f"the engine gives token {at + 2} of the probe sequence the log-prob {found[at]:.4f}, and the trainer "
                f"{trainers[at]:.4f} under version {version}: all of its tokens' differ by {mean:.2g} nats on average, and may by "
                f"{allowed:g}"
            )
    return ""
