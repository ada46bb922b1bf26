"""The journal of what outsiders were told is safe."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from asyncflow.run.state.journal import Journal, PutPrompt
from asyncflow.types import Batch, Ragged
from tests.full_disk import files_of_at_most

OUTPUTS = ("response_ids", "reward")

A, B = PutPrompt(0, 0, 0, {"question": "a"}), PutPrompt(1, 1, 1, {"question": "b"})


def rows(*indices: int, token: int = 7, **extra: np.ndarray) -> Batch:
    ids = Ragged.from_arrays([np.array([token + index]) for index in indices], "int64")
    columns = {"response_ids": ids, "reward": np.ones(len(indices), np.float32), **extra}
    return Batch(np.array(indices, np.int64), np.array([indices[0] >> 1], np.int64), columns)


def hashes(batch: Batch, value: int = 5) -> np.ndarray:
    return np.full(len(batch), value, np.int64)


def test_prompts_and_rows_come_back_but_for_those_that_a_checkpoint_has(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    for n in range(4):
        journal.add_prompts([PutPrompt(n, n, 2 * n, {"question": f"q{n}"})])
    for group in range(3):
        batch = rows(2 * group, 2 * group + 1)
        journal.add_rows(batch, hashes(batch, 10 + group))
    found = Journal(tmp_path, 1).read(3, 1, None, OUTPUTS)
    assert found.prompts == [PutPrompt(3, 3, 6, {"question": "q3"})]
    assert found.rows is not None and found.rows.indices.tolist() == [2, 3, 4, 5] and found.hashes == {1: 11, 2: 12}
    assert set(found.rows.columns) == set(OUTPUTS) and found.rows.ragged("response_ids")[2].tolist() == [11]
    empty = Journal(tmp_path / "other", 1).read(0, 0, None, OUTPUTS)
    assert (empty.prompts, empty.rows, empty.hashes) == ([], None, {})


def test_rows_of_a_checkpoint_are_joined_each_once_by_what_generation_gives(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    batch = rows(2, 3)
    journal.add_rows(batch, hashes(batch))
    completed = rows(3, 4, ref_logprobs=np.zeros(2, np.float32))
    found = journal.read(0, 0, completed, OUTPUTS)
    assert found.rows is not None and found.rows.indices.tolist() == [2, 3, 4] and set(found.rows.columns) == set(OUTPUTS)
    alone = Journal(tmp_path / "other", 1).read(0, 0, completed, OUTPUTS)
    assert alone.rows is completed


def test_of_a_group_that_got_another_prompt_the_rows_that_answer_it_are_kept_and_the_newest_of_each(tmp_path: Path) -> None:
    """An attempt that was lost had the data's prompt there; a client put one in its place before the next one came so far."""
    journal = Journal(tmp_path, 1)
    for batch, of_prompt in ((rows(0, 1, token=10), 5), (rows(0, token=20), 6), (rows(0, token=30), 6), (rows(2, 3), 5)):
        journal.add_rows(batch, hashes(batch, of_prompt))
    found = journal.read(0, 0, None, OUTPUTS)
    assert found.rows is not None and found.rows.indices.tolist() == [0, 2, 3] and found.hashes == {0: 6, 1: 5}
    assert found.rows.ragged("response_ids")[0].tolist() == [30]


def test_prompts_go_by_their_number_and_not_by_their_place_in_the_file(tmp_path: Path) -> None:
    """A run that began as a fork, say, has prompts that were put before there was a journal."""
    journal = Journal(tmp_path, 1)
    later = [PutPrompt(number, 4, 9, {"question": f"q{number}"}) for number in (4, 5, 6)]
    journal.add_prompts(later)
    assert journal.read(4, 0, None, OUTPUTS).prompts == later and journal.read(6, 0, None, OUTPUTS).prompts == later[2:]


def test_what_was_not_written_whole_is_cut_off_and_more_may_follow(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    journal.add_prompts([A])
    batch = rows(0, 1)
    journal.add_rows(batch, hashes(batch))
    journal.close()
    for name, torn in (("prompts.jsonl", b'[3,{"question": "ha'), ("rows.afp", (tmp_path / "rows.afp").read_bytes()[:-3])):
        with (tmp_path / name).open("ab") as file:
            file.write(torn)
    again = Journal(tmp_path, 1)
    assert again.read(0, 0, None, OUTPUTS).prompts == [A]
    again.add_prompts([B])
    again.add_rows(rows(2, 3), hashes(rows(2, 3)))
    found = Journal(tmp_path, 1).read(0, 0, None, OUTPUTS)
    assert found.prompts == [A, B]
    assert found.rows is not None and found.rows.indices.tolist() == [0, 1, 2, 3]


def test_on_a_full_disk_all_of_it_is_kept_or_none_and_more_may_follow(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    journal.add_prompts([A])
    journal.add_rows(rows(0, 1), hashes(rows(0, 1)))
    room = 5 + max((tmp_path / name).stat().st_size for name in ("prompts.jsonl", "rows.afp"))
    with files_of_at_most(room):  # a part of what follows can be written
        with pytest.raises(OSError):
            journal.add_prompts([B] * room)
        with pytest.raises(OSError):
            journal.add_rows(rows(2, 3), hashes(rows(2, 3)))
    journal.add_prompts([B])
    journal.add_rows(rows(4, 5), hashes(rows(4, 5)))
    found = Journal(tmp_path, 1).read(0, 0, None, OUTPUTS)
    assert found.prompts == [A, B]
    assert found.rows is not None and found.rows.indices.tolist() == [0, 1, 4, 5]


def test_committed_rows_are_taken_out_of_a_large_file_and_a_new_run_begins_without(tmp_path: Path) -> None:
    journal = Journal(tmp_path, 1)
    for group in range(8):
        batch = rows(2 * group, 2 * group + 1)
        journal.add_rows(batch, hashes(batch))
    size = (tmp_path / "rows.afp").stat().st_size
    journal.shorten(6)
    assert (tmp_path / "rows.afp").stat().st_size == size  # it is small
    journal._limit = 1
    journal.shorten(6)
    assert (tmp_path / "rows.afp").stat().st_size < size / 2
    journal.add_rows(rows(16, 17), hashes(rows(16, 17)))
    found = journal.read(0, 0, None, OUTPUTS)
    assert found.rows is not None and found.rows.indices.tolist() == [12, 13, 14, 15, 16, 17]
    journal.clear()
    assert journal.read(0, 0, None, OUTPUTS).rows is None
