"""A run that is killed before each kind of operation on its folder, and resumed: it always goes on, and comes to the same bits.

The kinds are found by runs that nothing disturbs: one that begins, one that resumes a checkpoint, one that is a fork, and others
that have more in their folders.
"""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.conftest import merged
from tests.depth import deep, few, in_gate
from tests.e2e.attempts import AttemptProcess
from tests.e2e.commands import rows
from tests.e2e.test_resume import tree

STEPS = 3
NOTHING = "nothing"
SHORT: dict[str, Any] = {
    "run": {"steps": STEPS},
    "schedule": "delayed",
    "train": {"old": "previous", "prompts_per_step": 2},
    "rollout": {"max_new_tokens": 8},
    "eval": {"path": None, "every_steps": None},
    "checkpoint": {"keep": 1},
}
OTHERS: dict[str, dict[str, Any]] = {
    "critic": {
        "schedule": "periodic",
        "algorithm": {"name": "ppo"},
        "train": {"old": "step_start", "critic": {"learning_rate": 1e-3}},
    },
    "adapter": {"schedule": "periodic", "model": {"lora": {"rank": 4, "alpha": 8}}, "train": {"old": "step_start"}},
    "bounded": {"schedule": "bounded", "train": {"old": "step_start"}},
}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """Folder of a run that nothing has disturbed, and the kinds of its operations."""
    attempt = AttemptProcess(tree(tmp_path_factory.mktemp("whole"), SHORT), resume=False, kill_before=NOTHING)
    assert attempt.end(seconds=120) == 0, attempt.said()
    yield attempt.run_dir, kinds(attempt)


def kinds(attempt: AttemptProcess) -> list[str]:
    """Kinds of operations in the order in which they came first."""
    return list(dict.fromkeys(attempt.operations.read_text().splitlines()))


def copy_run(run_dir: Path, to: Path) -> None:
    """A copy of a run's folder, without its socket."""
    shutil.copytree(run_dir, to, ignore=shutil.ignore_patterns("control.sock"))


def some_of(found: list[str], at_least: int) -> list[str]:
    """All of them in the deep suite, a few in the gate."""
    assert len(found) >= at_least, found
    return random.Random(0).sample(found, few(min(2, len(found)), len(found)))


def check(config: dict[str, Any], whole: Path, *, has_bits: bool = True) -> None:
    """Resumed in a loop, with half-written lines in its files, the run comes to its end, and to the bits of the whole one if it
    has such."""
    run_dir = Path(config["run"]["dir"]) / config["run"]["name"]
    for file in run_dir.glob("*.jsonl"):
        with file.open("ab") as opened:
            opened.write(b'{"step": 1, "half of')
    for _ in range(3):
        attempt = AttemptProcess(config)
        if (status := attempt.end(seconds=120)) == 0:
            break
    assert status == 0, attempt.said()
    for file in (files := [*whole.glob("*/*.safetensors")]):
        weights, expected = (load_file(folder / file.relative_to(whole)) for folder in (run_dir, whole))
        assert weights.keys() == expected.keys(), file
        assert not has_bits or all(np.array_equal(weights[name], expected[name]) for name in expected), file
    assert any(file.parent.name == "model" for file in files)
    for name in ("metrics.jsonl", "samples.jsonl", "fingerprints.jsonl"):
        found = [sorted((row["step"], row.get("row", -1)) for row in rows(folder / name)) for folder in (run_dir, whole)]
        assert found[0] == found[1], name
    left = {path.name for path in run_dir.rglob("*") if path.name.endswith((".partial", ".over"))}
    assert not left, left
    assert AttemptProcess(config).end() == 0  # finished already


def test_killed_before_each_kind_of_operation_of_a_run_that_begins(whole: tuple[Path, list[str]], tmp_path: Path) -> None:
    undisturbed, found = whole
    for number, kind in enumerate(some_of(found, 30)):
        config = tree(tmp_path / str(number), SHORT)
        attempt = AttemptProcess(config, resume=False, kill_before=kind)
        assert attempt.end(seconds=120) in (137, 0), (kind, attempt.said())
        try:
            check(config, undisturbed)
        except AssertionError as error:
            raise AssertionError(f"killed before {kind}") from error


@deep
@pytest.mark.parametrize("name", OTHERS)
def test_killed_before_each_kind_of_operation_that_only_other_runs_have(
    whole: tuple[Path, list[str]], tmp_path: Path, name: str
) -> None:
    short = merged(SHORT, OTHERS[name])
    calm = AttemptProcess(tree(tmp_path / "calm", short), resume=False, kill_before=NOTHING)
    assert calm.end(seconds=120) == 0, calm.said()
    own = [kind for kind in kinds(calm) if kind not in whole[1]]
    assert own
    statuses = []
    for number, kind in enumerate(own):
        config = tree(tmp_path / str(number), short)
        attempt = AttemptProcess(config, resume=False, kill_before=kind)
        statuses.append(attempt.end(seconds=120))
        assert statuses[-1] in (137, 0), (kind, attempt.said())
        try:
            check(config, calm.run_dir, has_bits=name != "bounded")
        except AssertionError as error:
            raise AssertionError(f"killed before {kind}") from error
    assert name == "bounded" or set(statuses) == {137}, "there, rows may be under way at a checkpoint, or not"


@pytest.mark.parametrize("state", in_gate("longer", of=["cut", "longer"]))
def test_killed_before_each_kind_of_operation_of_a_run_that_resumes(
    whole: tuple[Path, list[str]], tmp_path: Path, state: str
) -> None:
    """`cut`: it was killed before its first checkpoint was one. `longer`: it had ended, was to make more steps, and was killed
    before it had its new model."""
    undisturbed, _ = whole
    folder = tmp_path / state
    if state == "cut":
        cut = AttemptProcess(
            tree(folder, SHORT), resume=False, kill_before="open /checkpoints/step-n.partial/manifest.json.partial"
        )
        assert cut.end(seconds=120) == 137, cut.said()
    else:
        first = AttemptProcess(tree(folder, SHORT, {"run": {"steps": 2}}), resume=False)
        assert first.end(seconds=120) == 0, first.said()
        longer = AttemptProcess(tree(folder, SHORT), kill_before="os.rename /model")
        assert longer.end(seconds=120) == 137, longer.said()
    copy_run(folder / "test", folder / "calm" / "test")
    calm = AttemptProcess(tree(folder / "calm", SHORT), kill_before=NOTHING)
    assert calm.end(seconds=120) == 0, calm.said()
    for number, kind in enumerate(some_of(kinds(calm), 15)):
        config = tree(folder / str(number), SHORT)
        copy_run(folder / "test", folder / str(number) / "test")
        attempt = AttemptProcess(config, kill_before=kind)
        assert attempt.end(seconds=120) in (137, 0), (kind, attempt.said())
        try:
            check(config, undisturbed)
        except AssertionError as error:
            raise AssertionError(f"killed before {kind}, where a run was {state}") from error


@deep
def test_a_fork_that_is_killed_before_each_kind_of_operation_is_made_to_its_end(
    whole: tuple[Path, list[str]], tmp_path: Path
) -> None:
    """By the same command, `--fork-from` with `--resume`: it never begins with other weights than those of its origin."""
    origin = f"{whole[0]}@{STEPS}"
    longer = merged(SHORT, {"run": {"steps": STEPS + 1}})
    calm = AttemptProcess(tree(tmp_path / "calm", longer), kill_before=NOTHING, origin=origin)
    assert calm.end(seconds=120) == 0, calm.said()
    found = kinds(calm)
    expected = load_file(calm.run_dir / "model" / "model.safetensors")
    for number, kind in enumerate(some_of(found[: found.index("os.rename /checkpoints/step-n.added") + 1], 12)):
        config = tree(tmp_path / str(number), longer)
        attempt = AttemptProcess(config, kill_before=kind, origin=origin)
        assert attempt.end(seconds=120) == 137, (kind, attempt.said())
        last = AttemptProcess(config, origin=origin)
        assert last.end(seconds=120) == 0, (kind, last.said())
        weights = load_file(last.run_dir / "model" / "model.safetensors")
        assert all(np.array_equal(weights[name], expected[name]) for name in expected), kind
