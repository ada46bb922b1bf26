"""Differences between versions: lossless whatever changed, small where little did, and refused where they are damaged."""

import numpy as np
import pytest

from asyncflow.weight_sync import differences
from asyncflow.weight_sync.differences import DamagedDifference, apply, difference
from tests.depth import few


def changed(old: np.ndarray, share: float, rng: np.random.Generator) -> np.ndarray:
    """Some 16-bit words of it, by one to eight units in the last place."""
    new = old.copy()
    words = new.view(np.uint16)
    words[rng.random(len(words)) < share] += rng.integers(1, 9, dtype=np.uint16)
    return new


def test_what_is_put_together_is_what_was_taken_apart() -> None:
    rng = np.random.default_rng(0)
    for number in range(few(60, 600)):
        old = rng.integers(0, 256, 2 * int(rng.integers(1, 40_000)), np.uint8)
        new = changed(old, float(rng.choice((0, 1e-4, 0.01, 0.1))), rng)
        made, target = difference(new, old), old.copy()
        if made is not None:
            apply(made, target)
            assert np.array_equal(target, new), number
            assert len(made) <= differences.WORTH * len(new)


def test_long_stretches_without_a_change() -> None:
    old = np.zeros(2 * 400_000, np.uint8)
    for places in ([], [0], [65_534], [65_535], [65_536], [131_070, 131_071], [399_999], [7, 65_543, 65_544, 262_151]):
        new, target = old.copy(), old.copy()
        new.view(np.uint16)[places] = 3
        made = difference(new, old)
        assert made is not None and len(made) < 200
        apply(made, target)
        assert np.array_equal(target, new), places


def test_bytes_that_are_all_new_have_none_and_few_changes_are_small() -> None:
    rng = np.random.default_rng(1)
    old, other = (rng.integers(0, 256, 1 << 20, np.uint8) for _ in range(2))
    assert difference(other, old) is None and difference(other[:-1], old[:-1]) is None
    made = difference(changed(old, 0.02, rng), old)
    assert made is not None and len(made) < 0.02 * len(old)


def test_damaged_differences_are_refused_or_make_other_bytes() -> None:
    rng = np.random.default_rng(2)
    old = rng.integers(0, 256, 20_000, np.uint8)
    new = changed(old, 0.05, rng)
    made = difference(new, old)
    assert made is not None
    refused = 0
    for at in range(0, len(made), max(1, len(made) // few(60, 400))):
        spoilt, target = made.copy(), old.copy()
        spoilt[at] ^= rng.integers(1, 256, dtype=np.uint8)
        try:
            apply(spoilt, target)
        except DamagedDifference:
            refused += 1
        else:
            assert at in (4, 5) or not np.array_equal(target, new), "only zlib's own head may say the same in another way"
    assert refused
    for wrong in (made[:3], made[:-1], np.zeros(0, np.uint8), np.zeros(40, np.uint8)):
        with pytest.raises(DamagedDifference):
            apply(wrong, old.copy())
    with pytest.raises(DamagedDifference):
        apply(made, old[:400].copy())
