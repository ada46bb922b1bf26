"""Checks of a sampler: a trial before a queue depends on it, and what it gives each time. Pure.

`check_sampler` tries it on a few groups, as a controller would use it.
"""

from __future__ import annotations

import itertools

import numpy as np

from asyncflow.registry import build
from asyncflow.transfer_queue.leases import Lease, Want
from asyncflow.transfer_queue.sampler import SAMPLERS
from asyncflow.transfer_queue.sampler.base import Sampler
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.transfer_queue.table import Table
from asyncflow.types import GroupMeta, Interval, UserError

NUM_STEPS = NUM_VERSIONS = NUM_ALIKE = 3


def make_sampler(spec: TaskSpec) -> Sampler:
    """The sampler that a task names. Raises `UserError` when there is none, or one that lacks a part of the contract."""
    name = spec.sampler
    try:
        sampler: Sampler = build("sampler", name, spec.sampler_options, SAMPLERS)
    except ValueError as error:
        raise UserError(f"sampler {name!r}: {error}") from error
    for part in ("check", "assign"):
        if not callable(getattr(sampler, part, None)):
            raise UserError(f"sampler {name!r} has no {part!r}: asyncflow/transfer_queue/sampler/base.py says what is needed")
    return sampler


def check_sampler(spec: TaskSpec, schema: Schema) -> None:
    """Trial of a task's sampler: it has to serve each request for a group of one partition and version, as long as there is one.

    In a run a partition (a step) ends when its last group is done: a sampler that waits for more would wait for ever. Raises
    `UserError` saying what it does instead.
    """
    sampler = make_sampler(spec)
    try:
        _try(sampler, spec, schema, Want(groups=1, partition=1, installed=1))
    except UserError:
        raise
    except Exception as error:
        what = f"{type(error).__name__}: {error}"
        raise UserError(f"sampler {spec.sampler!r} failed when it was tried on groups of task {spec.name!r}: {what}") from error


def _try(sampler: Sampler, spec: TaskSpec, schema: Schema, want: Want) -> None:
    """Serve workers that ask, one and two at a time, until all groups that they may have are gone."""
    try:
        sampler.check(spec, want)
    except ValueError as error:
        raise UserError(f"sampler {spec.sampler!r}: {error}") from error
    for workers in (["one"], ["one", "another"]):
        table = _table_of(spec, schema)
        while table.ready.available(want, 1):
            served = 0
            for position, pick in sampler.assign(table, [(worker, want) for worker in workers]):
                lease = table.hand_out(workers[position], 0.0, pick)
                check_lease(spec, lease, want)
                served += len(lease.indices)
            if not served:
                raise UserError(
                    f"sampler {spec.sampler!r} gives nothing to {len(workers)} worker(s), each of which asks for a group of task "
                    f"{spec.name!r}, though a group is ready: a run would stand still"
                )


def check_lease(spec: TaskSpec, lease: Lease, want: Want) -> None:
    """Raises `UserError` when the sampler has chosen rows that the request may not have."""
    if want.groups and len(lease.groups) > want.groups:
        raise UserError(
            f"sampler {spec.sampler!r} gave {len(lease.groups)} groups to a request for {want.groups} of task {spec.name!r}"
        )
    for meta in lease.groups:
        if not want.allows(meta):
            raise UserError(
                f"sampler {spec.sampler!r} gave group {meta.group} of partition {meta.partition}, which versions "
                f"{meta.interval.low} to {meta.interval.high} may generate, to a request for partition {want.partition} and "
                f"version {want.installed} of task {spec.name!r}"
            )


def _table_of(spec: TaskSpec, schema: Schema) -> Table:
    """Ready groups of several partitions, several versions and several lengths."""
    table, size = Table(spec, schema, "tried"), 1 << schema.group_bits
    kinds = itertools.product(range(NUM_ALIKE), range(NUM_STEPS), range(NUM_VERSIONS))
    metas = [
        GroupMeta(i, size, partition, Interval(version, version), spec.topic or "train")
        for i, (_, partition, version) in enumerate(kinds)
    ]
    rows = schema.rows_of(metas)
    table.admit(metas, 0)
    table.notify(rows, schema.mask(spec.reads), 1 + np.arange(len(rows)) * 7 % 11, 0.0)
    return table
