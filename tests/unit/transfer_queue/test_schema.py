"""What a queue holds, and what does not fit into it."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from asyncflow.transfer_queue.schema import MAX_COLUMNS, Schema, TaskSpec
from asyncflow.types import Batch, Column, GroupMeta, Interval, Ragged, Values

COLUMNS = (
    Column("prompt", "int64", ragged=True, per="group"),
    Column("temperature", "float32", per="group"),
    Column("ids", "int64", ragged=True),
    Column("features", "float32", ragged=True, shape=(2,)),
    Column("image", "uint8", shape=(2, 3)),
    Column("reward", "float32"),
)
TASKS = (TaskSpec("rollout", ("prompt",), ("ids", "reward")), TaskSpec("train", ("ids", "reward")))
SCHEMA = Schema(COLUMNS, TASKS, 2)


def batch(rows: list[int] | np.ndarray = [4, 5], groups: list[int] | np.ndarray = [1], **columns: Any) -> Batch:  # noqa: B006
    return Batch(np.asarray(rows), np.asarray(groups), columns)


def ragged(lengths: list[int], shape: tuple[int, ...] = (), dtype: str = "int64") -> Ragged:
    return Ragged(np.zeros((sum(lengths), *shape), dtype), np.cumsum([0, *lengths]))


def meta(group: int, size: int) -> GroupMeta:
    return GroupMeta(group, size, 0, Interval(0, 0))


def test_every_column_and_every_mark_has_a_bit_of_its_own() -> None:
    names = [column.name for column in SCHEMA.columns]
    assert names == [column.name for column in COLUMNS] + ["done/rollout", "done/train", "dead", "filtered"]
    assert [SCHEMA.mask([name]) for name in names] == [1 << i for i in range(len(names))]
    assert SCHEMA.mask(names) == (1 << len(names)) - 1 and SCHEMA.mask([]) == 0
    assert SCHEMA.group_mask == SCHEMA.mask(["prompt", "temperature"])
    assert SCHEMA.column("dead") == Column("dead", "uint8", ragged=True)


def test_two_tasks_write_one_column_only_of_groups_of_different_topics() -> None:
    def tasks(*topics: str) -> tuple[TaskSpec, ...]:
        return tuple(TaskSpec(f"t{i}", (), ("ids",), topic=topic) for i, topic in enumerate(topics))

    assert len(Schema(COLUMNS, tasks("train", "eval"), 1).tasks) == 2
    for topics in (("", "eval"), ("train", ""), ("eval", "eval"), ("", "")):
        with pytest.raises(ValueError, match="column 'ids' is written by two tasks, 't0' and 't1'"):
            Schema(COLUMNS, tasks(*topics), 1)
    with pytest.raises(ValueError, match="'t1' and 't2'"):
        Schema(COLUMNS, tasks("train", "eval", "eval"), 1)


def test_a_task_without_outputs_writes_a_mark() -> None:
    assert SCHEMA.task("rollout").outputs == ("ids", "reward") and SCHEMA.task("train").outputs == ("done/train",)


@pytest.mark.parametrize(
    ("columns", "tasks", "message"),
    [
        ((*COLUMNS, Column("ids", "int8")), (), "columns declared twice: ids"),
        ((Column("dead", "int8"),), (), "columns declared twice: dead"),
        (COLUMNS, (TASKS[0], TASKS[0]), "columns declared twice: done/rollout"),
        (COLUMNS, (TaskSpec("t", ("idz",)),), "column 'idz' is not declared; declared are features, ids, image"),
        (COLUMNS, (TaskSpec("t", (), ("idz",)),), "column 'idz' is not declared"),
        (tuple(Column(f"c{i}", "int8") for i in range(MAX_COLUMNS - 1)), (), "64 columns, marks included, are more than 63"),
    ],
)
def test_what_cannot_be_declared_is_refused(columns: Any, tasks: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Schema(columns, tasks, 2)


def test_as_many_columns_as_there_are_bits_are_fine() -> None:
    schema = Schema(tuple(Column(f"c{i}", "int8") for i in range(MAX_COLUMNS - 2)), (), 2)
    assert schema.mask(["filtered"]) == 1 << 62


def test_what_is_not_there_is_refused_with_what_is() -> None:
    with pytest.raises(ValueError, match="there is no task 'trian'; there are rollout, train"):
        SCHEMA.task("trian")
    with pytest.raises(ValueError, match="column 'idz' is not declared; declared are features, ids"):
        SCHEMA.mask(["ids", "idz"])


def test_the_rows_of_groups_are_those_that_they_have() -> None:
    assert SCHEMA.rows_of([meta(5, 2), meta(0, 4), meta(1 << 40, 1)]).tolist() == [20, 21, 0, 1, 2, 3, 1 << 42]
    assert SCHEMA.rows_of([]).dtype == np.int64


@pytest.mark.parametrize(
    ("group", "size", "message"),
    [
        (3, 5, "group 3 has 5 rows: .*4 fit"),
        (3, 0, "group 3 has 0 rows"),
        (-1, 1, "group number -1 is out of range"),
        (1 << 60, 1, "out of range"),
    ],
)
def test_a_group_that_cannot_be_is_refused(group: int, size: int, message: str) -> None:
    SCHEMA.check_metas([meta(0, 1), meta((1 << 60) - 1, 4)])
    with pytest.raises(ValueError, match=message):
        SCHEMA.check_metas([meta(0, 1), meta(group, size)])


FITTING: dict[str, Values] = {
    "prompt": ragged([3]),
    "temperature": np.zeros(1, np.float32),
    "ids": ragged([0, 2]),
    "features": ragged([1, 0], (2,), "float32"),
    "image": np.zeros((2, 2, 3), np.uint8),
    "reward": np.zeros(2, np.float32),
    "dead": ragged([1, 2], dtype="uint8"),
}


@pytest.mark.parametrize("name", [None, *FITTING])
def test_what_fits_passes(name: str | None) -> None:
    SCHEMA.check(batch(**FITTING) if name is None else batch(**{name: FITTING[name]}))
    SCHEMA.check(batch(np.empty(0, np.int64), np.empty(0, np.int64)))


def offsets(*numbers: int, dtype: str = "int64") -> Ragged:
    return Ragged(np.zeros(3, np.int64), np.array(numbers, dtype))


MISFITS = {
    "dtype": (batch(reward=np.zeros(2)), r"row 4, column 'reward': declared float32, written float64"),
    "dtype of a group's": (batch(temperature=np.zeros(1)), r"group 1, column 'temperature': declared float32"),
    "byte order": (batch(reward=np.zeros(2, ">f4")), r"row 4, column 'reward': declared float32"),
    "rank": (batch(reward=np.zeros((2, 1), np.float32)), r"row 4, column 'reward': declared entries of shape \(\)"),
    "shape": (batch(image=np.zeros((2, 3, 2), np.uint8)), r"row 4, column 'image': declared entries of shape \(2, 3\)"),
    "no shape": (
        batch(features=ragged([1, 1], (), "float32")),
        r"row 4, column 'features': declared entries of length n x shape \(2,\)",
    ),
    "dense": (batch(ids=np.zeros(2, np.int64)), r"row 4, column 'ids': declared ragged, written dense"),
    "ragged": (batch(reward=ragged([1, 1], dtype="float32")), r"row 4, column 'reward': declared dense, written ragged"),
    "short": (batch(reward=np.zeros(1, np.float32)), r"row 5, column 'reward': 1 entries for 2 rows"),
    "long": (batch(reward=np.zeros(3, np.float32)), r"column 'reward': 3 entries for 2 rows"),
    "ragged and short": (batch(ids=ragged([3])), r"row 5, column 'ids': 1 entries for 2 rows"),
    "groups": (batch(prompt=ragged([1, 2])), r"column 'prompt': 2 entries for 1 groups"),
    "falling": (batch(ids=offsets(0, 5, 3)), r"row 5, column 'ids': its offsets fall from 5 to 3"),
    "start": (batch(ids=offsets(1, 2, 3)), r"its offsets run from 1 to 3, and there are 3 values"),
    "end": (batch(ids=offsets(0, 2, 4)), r"its offsets run from 0 to 4, and there are 3 values"),
    "kind of offsets": (batch(ids=offsets(0, 2, 3, dtype="int32")), r"offsets are to be int64"),
    "no offsets": (batch(ids=offsets()), r"offsets are to be int64"),
    "not a column": (batch(reward=[1.0, 2.0]), r"row 4, column 'reward': written something that is no column"),
    "unknown": (batch(idz=np.zeros(2)), r"column 'idz' is not declared"),
    "row twice": (batch([5, 4, 5]), r"row 5 is in the batch twice"),
    "group twice": (batch(groups=[1, 1]), r"group 1 is in the batch twice"),
    "kind of rows": (batch(np.array([4], np.int32)), r"indices and groups of a batch are to be int64"),
    "kind of groups": (batch(groups=np.ones((1, 1), np.int64)), r"indices and groups of a batch are to be int64"),
}


@pytest.mark.parametrize("what", MISFITS)
def test_what_does_not_fit_is_refused_naming_the_row_and_the_column(what: str) -> None:
    misfit, message = MISFITS[what]
    with pytest.raises(ValueError, match=message):
        SCHEMA.check(misfit)


def test_rows_may_come_in_any_order() -> None:
    SCHEMA.check(batch([9, 4, 5], [2, 1], reward=np.zeros(3, np.float32)))


def test_it_crosses_a_wire_as_it_is() -> None:
    again = msgspec.msgpack.decode(msgspec.msgpack.encode(SCHEMA), type=Schema)
    assert again == SCHEMA and again.columns == SCHEMA.columns and again.mask(["reward"]) == SCHEMA.mask(["reward"])


def test_it_can_be_given_as_plain_data() -> None:
    plain = {"group_size": 5, "columns": [{"name": "a", "dtype": "int8", "shape": [2]}], "tasks": [{"name": "t", "reads": ["a"]}]}
    assert Schema.of(plain) == Schema((Column("a", "int8", shape=(2,)),), (TaskSpec("t", ("a",)),), 3)
    for change in ({"columns": [{"name": "a"}]}, {"more": 1}, {"group_size": "five"}, {"tasks": [{"name": "t", "reads": ["b"]}]}):
        with pytest.raises(ValueError, match=r"dtype|more|int|'b' is not declared"):
            Schema.of({**plain, **change})
