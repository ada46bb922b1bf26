"""One suite over every storage: what is read is what was written first, or an error that names the place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from asyncflow.registry import load
from asyncflow.transfer_queue import STORAGES
from asyncflow.transfer_queue.storage.base import Storage
from asyncflow.types import Batch, Column, Ragged

BITS = 2
COLUMNS = (
    Column("prompt", "int64", ragged=True, per="group"),
    Column("temperature", "float32", per="group"),
    Column("ids", "int64", ragged=True),
    Column("reward", "float32"),
    Column("flag", "uint8"),
)


@pytest.fixture(params=sorted(STORAGES))
def storage(request: pytest.FixtureRequest) -> Storage:
    made: Storage = load("queue storage", STORAGES[request.param])(group_bits=BITS)
    made.declare(COLUMNS)
    return made


def array(*numbers: Any, dtype: str = "int64") -> np.ndarray:
    return np.array(numbers, dtype)


def ragged(*arrays: list[float], dtype: str = "int64") -> Ragged:
    return Ragged.from_arrays([np.array(a, dtype) for a in arrays], dtype)


def batch(rows: list[int], **columns: np.ndarray | Ragged) -> Batch:
    indices = array(*rows)
    return Batch(indices, array(*dict.fromkeys((indices >> BITS).tolist())), columns)


def admit(storage: Storage, *groups: int, size: int = 2) -> None:
    """As a put does: all rows of the groups, with group columns alone."""
    rows = [(group << BITS) + sample for group in groups for sample in range(size)]
    prompts = ragged(*([group] * (group + 1) for group in groups))
    storage.write(batch(rows, prompt=prompts, temperature=array(*groups, dtype="float32")))


def lists(found: Batch) -> Mapping[str, list[Any]]:
    return {
        name: [entry.tolist() for entry in values] if isinstance(values, Ragged) else values.tolist()
        for name, values in found.columns.items()
    }


def test_dense_and_ragged_columns_come_back_as_they_were_written(storage: Storage) -> None:
    admit(storage, 0, 1)
    rewards, ids = array(0.5, float("nan"), -0.0, dtype="float32"), ragged([1, 2], [], [-(2**60)])
    assert storage.write(batch([4, 0, 5], ids=ids, reward=rewards)).tolist() == [True] * 3
    found = storage.read(array(5, 0, 4), ["reward", "ids"])
    assert list(found.columns) == ["reward", "ids"]
    assert found.indices.tolist() == [5, 0, 4] and found.groups.tolist() == [1, 0]
    assert found.dense("reward").tobytes() == rewards[[2, 1, 0]].tobytes() and found.dense("reward").dtype == np.float32
    assert lists(found)["ids"] == [[-(2**60)], [], [1, 2]]
    assert found.ragged("ids").values.dtype == np.int64 and found.ragged("ids").offsets.tolist() == [0, 1, 1, 3]


def test_nothing_read_or_written_is_shared_with_the_caller(storage: Storage) -> None:
    admit(storage, 0)
    ids, reward = ragged([1, 2]), array(1, dtype="float32")
    storage.write(batch([0], ids=ids, reward=reward))
    ids.values[:] = 9
    reward[:] = 9
    assert lists(storage.read(array(0), ["ids", "reward"])) == {"ids": [[1, 2]], "reward": [1.0]}


def test_a_group_column_is_stored_once_and_read_once_for_each_group(storage: Storage) -> None:
    admit(storage, 2, size=4)
    assert storage.nbytes == 3 * 8 + 4
    found = storage.read(array(11, 8, 9), ["prompt", "temperature"])
    assert found.groups.tolist() == [2]
    assert lists(found) == {"prompt": [[2, 2, 2]], "temperature": [2.0]}
    storage.write(Batch(array(8), array(2), {"prompt": ragged([7])}))
    assert lists(storage.read(array(8), ["prompt"])) == {"prompt": [[2, 2, 2]]} and storage.nbytes == 28


def test_the_first_writer_wins_and_the_loser_is_told(storage: Storage) -> None:
    admit(storage, 0)
    assert storage.write(batch([0], reward=array(1, dtype="float32"))).tolist() == [True]
    second = batch([0, 1], reward=array(5, 6, dtype="float32"))
    assert storage.write(second).tolist() == [False, True]
    assert lists(storage.read(array(0, 1), ["reward"])) == {"reward": [1.0, 6.0]}


def test_a_row_gets_all_columns_of_a_write_or_none(storage: Storage) -> None:
    admit(storage, 0)
    storage.write(batch([0], reward=array(1, dtype="float32")))
    lost = batch([0], reward=array(2, dtype="float32"), flag=array(1, dtype="uint8"), ids=ragged([1]))
    before = storage.nbytes
    assert storage.write(lost).tolist() == [False]
    for name in ("flag", "ids"):
        with pytest.raises(LookupError, match=f"row 0 has no column '{name}'"):
            storage.read(array(0), [name])
    assert storage.nbytes == before
    assert storage.write(batch([0], flag=array(3, dtype="uint8"))).tolist() == [True]


GOOD = {"reward": np.zeros(2, np.float32)}
MISFITS: dict[str, tuple[dict[str, Any], str]] = {
    "undeclared": ({"rewards": np.zeros(2, np.float32)}, "column 'rewards' is not declared; declared are .*reward"),
    "dtype": ({"flag": np.zeros(2, np.int64)}, "row 4, column 'flag': declared uint8.*written int64"),
    "ragged dtype": ({"ids": ragged([1], [2], dtype="int32")}, "row 4, column 'ids': declared int64.*written int32"),
    "rank 2": ({"flag": np.zeros((2, 3), np.uint8)}, "row 4, column 'flag'.* 2 dimensions"),
    "rank 0": ({"flag": np.zeros((), np.uint8)}, "row 4, column 'flag'.* 0 dimensions"),
    "dense for ragged": ({"ids": np.zeros(2, np.int64)}, "row 4, column 'ids': declared ragged"),
    "ragged for dense": ({"flag": ragged([1], [1], dtype="uint8")}, "row 4, column 'flag': declared dense"),
    "too few": ({"flag": np.zeros(1, np.uint8)}, "row 4, column 'flag': 1 entries for 2 rows"),
    "too many": ({"ids": ragged([1], [2], [3])}, "row 4, column 'ids': 3 entries for 2 rows"),
    "too few groups": ({"temperature": np.zeros(2, np.float32)}, "group 1, column 'temperature': 2 entries for 1 groups"),
    "offsets begin": ({"ids": Ragged(np.arange(3), array(1, 2, 3))}, "row 4, column 'ids': offsets"),
    "offsets end": ({"ids": Ragged(np.arange(3), array(0, 2, 4))}, "row 4, column 'ids': offsets"),
    "offsets fall": ({"ids": Ragged(np.arange(3), array(0, 5, 3))}, "row 4, column 'ids': offsets"),
    "no offsets": ({"ids": Ragged(np.arange(3), array())}, "row 4, column 'ids': offsets"),
    "offsets of floats": ({"ids": Ragged(np.arange(3), np.array([0.0, 1.0, 3.0]))}, "row 4, column 'ids': offsets"),
}


@pytest.mark.parametrize("kind", MISFITS)
def test_a_write_that_does_not_fit_is_refused_naming_row_and_column_and_leaves_nothing(storage: Storage, kind: str) -> None:
    columns, message = MISFITS[kind]
    admit(storage, 1)
    before = storage.nbytes
    with pytest.raises(ValueError, match=message):
        storage.write(batch([4, 5], **GOOD, **columns))
    assert storage.nbytes == before
    with pytest.raises(LookupError):
        storage.read(array(4), ["reward"])


def test_a_read_of_what_is_not_there_names_row_and_column(storage: Storage) -> None:
    admit(storage, 0)
    storage.write(batch([0], reward=array(1, dtype="float32")))
    with pytest.raises(LookupError, match="row 1 has no column 'reward'"):
        storage.read(array(0, 1), ["reward"])
    with pytest.raises(LookupError, match="group 5 has no column 'prompt'"):
        storage.read(array(20), ["prompt"])
    with pytest.raises(ValueError, match="'price' is not declared"):
        storage.read(array(0), ["price"])


def test_dropping_frees_bytes_and_a_group_goes_with_its_last_row(storage: Storage) -> None:
    admit(storage, 0, 1)
    groups = storage.nbytes
    storage.write(batch([0, 1, 4], ids=ragged([1, 2], [3], [4, 5, 6]), reward=array(1, 2, 3, dtype="float32")))
    assert storage.nbytes == groups + 6 * 8 + 3 * 4
    storage.drop(array(0))
    assert storage.nbytes == groups + 4 * 8 + 2 * 4
    assert lists(storage.read(array(1), ["prompt"])) == {"prompt": [[0]]}  # for the group's other row
    storage.drop(array(1, 1, 0, 99))
    with pytest.raises(LookupError, match="group 0"):
        storage.read(array(1), ["prompt"])
    storage.drop(array(4))
    assert lists(storage.read(array(5), ["prompt"])) == {"prompt": [[1, 1]]}
    storage.drop(array(5))  # admitted, and given up before anything was written for it
    assert storage.nbytes == 0
