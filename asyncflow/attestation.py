"""Attested weights: does an engine generate with the version that it was given?

    sender: sums of each tensor's bits, in the dtype that engines generate in --> manifest
    engine: sums of the bits that its kernels read, after an install         --> compared with the manifest's, by `PolicyVersions`

A tensor's sum is that of its elements' bits as integers, modulo 2^64. It does not know their order, so an engine takes it from its
own buffers, wherever its kernels want an element to lie, and unpacks nothing. What is stale, was not written, was written in part,
or was rounded otherwise has another sum. Elements that have changed places within one tensor have the same: only log-probs tell
(`mismatch/kl`). This file imports no torch: manifests pass through the driver.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import msgspec

MODULUS: Final = 1 << 64


class Attestation(msgspec.Struct, frozen=True):
    """Weights that an engine generates with: for tensors that lie in one buffer their names, and the sum of their bits.

    `base`: sum over the model's own weights, where a version is an adapter over them; else None.
    """

    parts: list[tuple[list[str], int]]
    base: int | None = None


def sum_of_all(sums: Iterable[int]) -> int:
    """Sum over several tensors, from theirs."""
    return sum(sums) % MODULUS


def fault_of(attested: Attestation, version: int, sums: Mapping[str, int], base: int | None = None) -> str:
    """Description of what an engine generates with, if that is not the version whose sums these are; "" if it is."""
    names = {name for part, _ in attested.parts for name in part}
    if lacking := sorted(sums.keys() - names):
        return (
            f"the engine generates without {len(lacking)} of the {len(sums)} tensors of version {version}, {lacking[0]} the first"
        )
    if unknown := sorted(names - sums.keys()):
        return f"the engine generates with {len(unknown)} tensors that version {version} does not have, {unknown[0]} the first"
    if others := [part for part, found in attested.parts if sum(sums[name] for name in part) % MODULUS != found]:
        where = f"in {len(others)} of {len(attested.parts)} parts, {others[0][0]} the first"
        return f"the engine generates with other weights than those of version {version} {where}"
    if base is not None and attested.base != base:
        return f"version {version} is an adapter for another base than the engine's: give every machine the same model"
    return ""
