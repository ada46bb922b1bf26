"""A sampler that would stand still, or give what was not asked for, is refused: before a run, and by the controller each time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncflow.transfer_queue.controller import Controller
from asyncflow.transfer_queue.leases import Want
from asyncflow.transfer_queue.notices import News, Notice
from asyncflow.transfer_queue.sampler.checks import check_sampler
from asyncflow.transfer_queue.schema import Schema, TaskSpec
from asyncflow.types import Column, GroupMeta, Interval, UserError
from tests.builders import loop_turns

COLUMNS = (Column("out", "int32", ragged=True, counts_tokens=True), Column("reward", "float32"))

OWN = """
from asyncflow.transfer_queue.leases import Want

class Base:
    def check(self, spec, want): ...
    def pick(self, table, want): return table.ready.take(want)
    def assign(self, table, wants):
        for position, (_, want) in enumerate(wants):
            if pick := self.pick(table, want): yield position, pick

class LastFirst(Base):
    def __init__(self, bounds=(0, 100)): self.most = bounds[1]
    def pick(self, table, want):
        return table.ready.take_exactly([group.group for group in table.ready.peek(want, self.most)[-want.groups:]])

class OfAnyPartition(Base):
    def pick(self, table, want): return table.ready.take(Want(groups=1, installed=want.installed))

class OfAnyVersion(Base):
    def pick(self, table, want): return table.ready.take(Want(groups=1, partition=want.partition))

class TooMany(Base):
    def pick(self, table, want):
        return table.ready.take(Want(groups=want.groups + 1, partition=want.partition, installed=want.installed))

class Nothing(Base):
    def pick(self, table, want): return None

class Pairs(Base):
    def pick(self, table, want): return table.ready.take(want) if len(table.ready.peek(want, 2)) == 2 else None

class TwoAsk(Base):
    def assign(self, table, wants): return super().assign(table, wants) if len(wants) > 1 else ()

class Half:
    def check(self, spec, want): ...

class Refuses(Base):
    def check(self, spec, want): raise ValueError("not such a request")

class Fails(Base):
    def pick(self, table, want): return [][1]
"""

STANDS_STILL = "gives nothing to {} worker.* of task 'train', though a group is ready: a run would stand still"


@pytest.fixture
def own(tmp_path: Path) -> str:
    (tmp_path / "own.py").write_text(OWN)
    return f"{tmp_path / 'own.py'}:"


def schema_of(sampler: str, options: dict[str, Any] | None = None, *, whole_groups: bool = True, topic: str = "") -> Schema:
    train = TaskSpec("train", ("out",), whole_groups=whole_groups, topic=topic, sampler=sampler, sampler_options=options or {})
    return Schema(COLUMNS, (train,), 2)


@pytest.mark.parametrize("whole_groups", [True, False])
@pytest.mark.parametrize("topic", ["", "train", "eval"])
@pytest.mark.parametrize("name", ["oldest", "shortest_queue", "token_balanced", "LastFirst", "Base"])
def test_samplers_that_serve_every_request_pass(own: str, name: str, topic: str, *, whole_groups: bool) -> None:
    sampler, options = (name, {"ranks": 1} if name == "token_balanced" else {}) if name[0].islower() else (own + name, {})
    schema = schema_of(sampler, options, whole_groups=whole_groups, topic=topic)
    check_sampler(schema.task("train"), schema)


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("OfAnyPartition", "gave group .* of partition 0, .* to a request for partition 1 and version 1 of task 'train'"),
        (
            "OfAnyVersion",
            "gave group .*, which versions 0 to 0 may generate, to a request for partition 1 and version 1 of task 'train'",
        ),
        ("TooMany", "gave 2 groups to a request for 1 of task 'train'"),
        ("Nothing", STANDS_STILL.format(1)),
        ("Pairs", STANDS_STILL.format(1)),
        ("TwoAsk", STANDS_STILL.format(1)),
        ("Half", "has no 'assign': asyncflow/transfer_queue/sampler/base.py says what is needed"),
        ("Refuses", "not such a request"),
        ("Fails", "failed when it was tried on groups of task 'train': IndexError: list index out of range"),
        ("None", "has no 'None'"),
    ],
)
def test_others_are_refused_saying_what_they_do(own: str, name: str, sentence: str) -> None:
    schema = schema_of(own + name)
    with pytest.raises(UserError, match=sentence) as caught:
        check_sampler(schema.task("train"), schema)
    assert "own.py" in str(caught.value) and "\n" not in str(caught.value)


def test_ranks_that_wait_for_each_other_are_refused() -> None:
    schema = schema_of("token_balanced", {"ranks": 2})
    with pytest.raises(UserError, match=STANDS_STILL.format(1)):
        check_sampler(schema.task("train"), schema)


def ready(controller: Controller, *metas: GroupMeta) -> None:
    """The controller hears that these groups are there, with all that its task reads."""
    schema = schema_of("oldest")
    notice = Notice(list(metas), schema.rows_of(metas).tobytes(), schema.mask(["out"]))
    controller.subscription.take(0, News("epoch", 1, False, [notice]), is_new_epoch=False)


@pytest.mark.parametrize(
    ("name", "want", "sentence"),
    [
        (
            "OfAnyPartition",
            Want(groups=1, partition=1),
            "gave group 0 of partition 0, which versions 0 to 2 may generate, to a request for partition 1",
        ),
        ("OfAnyVersion", Want(groups=1, installed=3), "gave group 0 .* to a request for partition None and version 3"),
        ("TooMany", Want(groups=1), "gave 2 groups to a request for 1"),
    ],
)
async def test_a_controller_hands_out_nothing_that_was_not_asked_for(own: str, name: str, want: Want, sentence: str) -> None:
    for is_parked in (False, True):  # until there are groups: then the sampler is asked when they come, by whoever tells of them
        controller = Controller("train", schema_of(own + name))
        asking = asyncio.ensure_future(controller.lease(want, [], 0)) if is_parked else None
        await loop_turns()
        ready(controller, *(GroupMeta(i, 2, i, Interval(i, i + 2), "train") for i in range(3)))
        with pytest.raises(UserError, match=sentence):
            await (asking or controller.lease(want, [], 0))
        controller.close()


async def test_a_controller_gives_what_an_own_sampler_chooses(own: str) -> None:
    controller = Controller("train", schema_of(own + "LastFirst", {"bounds": [0, 50]}))
    ready(controller, *(GroupMeta(i, 2, 0, Interval(0, 0), "train") for i in range(3)))
    handed = [await controller.lease(Want(groups=1, partition=0), [], 0) for _ in range(3)]
    assert [one.lease.groups[0].group for one in handed if one is not None] == [2, 1, 0]
    controller.close()


def test_options_of_any_shape_cross_a_wire() -> None:
    schema = schema_of("oldest", {"bounds": [1, 2.5], "by": {"name": "x", "is": True, "of": None}})
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(schema), type=Schema).tasks == schema.tasks
