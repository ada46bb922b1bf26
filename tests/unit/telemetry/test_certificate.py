"""A run's certificate says what its ledger saw, and is void for every reason that there is, and for no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from asyncflow.telemetry.certificate import Certificate, Observed, read_certificate
from asyncflow.types import UserError


def observed(*, staleness: int = 0, num_spans: int = 1, rows_dead: int = 0, episode_timeouts: int = 0) -> Observed:
    seen = Observed(rows_dead=rows_dead, episode_timeouts=episode_timeouts)
    seen.group(3, staleness=np.array([0, staleness]), num_spans=np.array([1, num_spans]), is_overlapped=True)
    seen.group(3, staleness=np.array([0]), num_spans=np.array([1]), is_overlapped=True)
    seen.group(4, staleness=np.array([0]), num_spans=np.array([1]), is_overlapped=False)
    return seen


def certificate(seen: Observed, **changes: Any) -> Certificate:
    facts = {
        "schedule": "periodic", "promised_staleness": 0, "steps": 5, "planned_steps": 9, "rows_redelivered": 0,
        "reward_failures": {}, "why_not_deterministic": "",
    }  # fmt: skip
    return seen.certificate(**(facts | changes))


def test_what_was_seen_is_what_is_certified() -> None:
    given = certificate(observed(rows_dead=2), rows_redelivered=6, reward_failures={"raised": 4})
    assert (given.max_staleness, given.max_spans, given.overlapped_steps) == (0, 1, 1)
    assert (given.rows_dead, given.rows_redelivered, given.reward_timeouts, given.reward_failures) == (2, 6, 0, {"raised": 4})
    assert given.voided == [] and "certificate holds (periodic, 5 of 9 steps;" in given.line


def test_episodes_that_a_deadline_ended_are_counted_and_told() -> None:
    given = certificate(observed(episode_timeouts=3))
    assert given.episode_timeouts == 3 and "reward timeouts 0, episode timeouts 3, updates skipped 0" in given.line
    assert "episode timeouts" not in certificate(observed()).line


def test_a_run_that_trained_nothing_has_one_too() -> None:
    given = certificate(Observed(), steps=0)
    assert (given.max_staleness, given.max_spans, given.overlapped_steps, given.voided) == (0, 0, 0, [])


@pytest.mark.parametrize(
    ("seen", "changes", "words"),
    [
        (observed(staleness=1), {}, "a row was 1 versions old, and periodic promises 0"),
        (observed(num_spans=2), {}, "a response was made by 2 versions, and periodic promises 1"),
        (observed(), {"rows_redelivered": 3, "why_not_deterministic": "2 threads"}, "3 rows were delivered again"),
        (
            observed(),
            {"made_again_at": [2, 4], "why_not_deterministic": "2 threads"},
            "at step 2, 4, where the run was resumed",
        ),
        (observed(rows_dead=2), {"reward_failures": {"timeout": 4}}, "2 rows failed with 4 reward timeouts"),
    ],
)
def test_what_voids_it_is_named(seen: Observed, changes: dict[str, Any], words: str) -> None:
    given = certificate(seen, **changes)
    assert len(given.voided) == 1 and words in given.voided[0] and f"VOID: {words}" in given.line


@pytest.mark.parametrize(
    ("seen", "changes"),
    [
        (observed(staleness=2, num_spans=3), {"promised_staleness": 2}),
        (observed(), {"rows_redelivered": 3}),
        (observed(), {"made_again_at": [2]}),
        (observed(), {"resumed_at": [2], "why_not_deterministic": "2 threads"}),
        (observed(), {"why_not_deterministic": "2 threads"}),
        (observed(), {"reward_failures": {"timeout": 1}, "rows_redelivered": 1}),
        (observed(rows_dead=2), {"reward_failures": {"raised": 4}}),
        (observed(episode_timeouts=2), {}),
    ],
)
def test_what_a_schedule_allows_voids_nothing(seen: Observed, changes: dict[str, Any]) -> None:
    assert certificate(seen, **changes).voided == []


def test_it_is_read_as_it_was_written(tmp_path: Path) -> None:
    assert read_certificate(tmp_path) is None
    given = certificate(observed(), reward_failures={"timeout": 1})
    given.write(tmp_path)
    assert read_certificate(tmp_path) == given
    (tmp_path / "certificate.json").write_text('{"schedule": ')
    with pytest.raises(UserError, match="is no certificate"):
        read_certificate(tmp_path)


def test_one_that_cannot_be_written_whole_leaves_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a full disk: a part of it would be refused as no certificate by whoever reads it."""
    first = certificate(observed())
    first.write(tmp_path)

    def fsync(_: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("os.fsync", fsync)
        with pytest.raises(OSError, match="No space left"):
            certificate(observed(staleness=1)).write(tmp_path)
    assert read_certificate(tmp_path) == first
