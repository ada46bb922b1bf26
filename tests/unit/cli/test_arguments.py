"""Wrong arguments of the command line: one sentence, exit 2, nothing done."""

from __future__ import annotations

import errno
import shlex
import sys
from pathlib import Path

import pytest

from asyncflow.cli import verbs
from asyncflow.types import UserError


def said(arguments: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """Exit status of a command in this process, and what it says to standard error."""
    monkeypatch.setattr(sys, "argv", ["asyncflow", *shlex.split(arguments)])
    monkeypatch.setattr(verbs, "keep_going", lambda: None)
    with pytest.raises(SystemExit) as ended:
        verbs.run()
    return int(ended.value.code or 0), capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("reward r.yaml --rows x", "--rows: must be a whole number, not x"),
        ("reward r.yaml --rows 1.5", "--rows: must be a whole number, not 1.5"),
        ("plan r.yaml --devices 0", "--devices: must be 1 or more, not 0"),
        ("cluster scale rollout=2 --run r --grace=-1", "--grace: must be 0 or more, not -1"),
        ("check --deadline soon", "--deadline: must be a number, not soon"),
        ("eval m d --temperature hot", "--temperature: must be a number, not hot"),
        ("train", "asyncflow train needs CONFIG: `asyncflow train --help` says what it is"),
        ("trian r.yaml", "no such command 'trian'"),
        ("train r.yaml --resum", "no such option: --resum"),
        ("train r.yaml --fork-keep data", "--fork-keep says what a fork keeps, and this is none: give --fork-from, too"),
        ("plan r.yaml --devices 4 --nodes 2", "--devices and --nodes both say how many devices there are: take one of them"),
        ("plan recipe.yaml --per-node 3", "--per-node says how large a node is, and nothing says how many there are"),
        ("plan --from runs/a --devices 4", "--devices is for a new plan, and --from takes the devices that the run had"),
        ("plan --from runs/a --measure", "--measure is for a new plan"),
        ("plan some.yaml --json", "--json is for --from"),
        ("serve r.yaml --weights-from nowhere", "--weights-from nowhere is no folder: make it"),
        ("serve r.yaml --model-name x", "--model-name is for models that --tinker serves, and this serves a run"),
        ("serve r.yaml --samplers 2", "--samplers is for models that --tinker serves"),
        ("serve r.yaml --full-weights", "--full-weights is for models that --tinker serves"),
        ("serve m --tinker --resume", "--resume is for a run, and --tinker serves a model without one"),
        ("serve m --tinker --weights-from .", "--weights-from is for a run"),
        ("join http://127.0.0.1:1 --key-file k --engine '{slots: 4}'", "--engine {slots: 4} names no engine: take slots, or"),
        ("watch nowhere", "there is no folder nowhere"),
        ("watch . --listen 0.0.0.0:0", "--listen 0.0.0.0:0 can be reached from other machines, and this page is for this one"),
        ("compare . .", "a comparison needs the folders of two runs or more"),
        ("compare . nowhere", ". is no run's folder: it has no config.yaml"),
        ("merge nowhere out", "nowhere holds no low-rank adapter: it has no adapter_config.json"),
    ],
)
def test_wrong_arguments_are_one_sentence(
    arguments: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text("model: {path: nowhere}")
    status, errors = said(arguments, monkeypatch, capsys)
    assert status == 2 and errors.startswith(f"asyncflow: {words}") and len(errors.splitlines()) == 1, errors
    assert [path.name for path in tmp_path.iterdir()] == ["recipe.yaml"]


def test_a_driver_of_torchrun_s_ranks_is_started_with_all_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (recipe := tmp_path / "r.yaml").write_text("{model: {path: nowhere}, data: {path: x}, run: {name: x}}")
    given: list[str] = []
    module = sys.modules["asyncflow.cli.train"]
    monkeypatch.setattr(module, "is_rank", lambda: True)
    monkeypatch.setattr(module, "run_rank", lambda arguments, *others, **options: given.extend(arguments) or 0)
    options = "--fork-from runs/a@2 --fork-keep data --resume"
    status, errors = said(f"train {recipe} run.steps=3 {options}", monkeypatch, capsys)
    assert status == 0, errors
    assert given == ["train", str(recipe), "run.steps=3", *options.split()]
    status, errors = said(f"train {recipe} --dry-run", monkeypatch, capsys)
    assert status == 2 and "--dry-run starts nothing" in errors


def test_help_and_a_verb_of_verbs_are_told_what_there_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said("train --help", monkeypatch, capsys) == (0, "")
    status, errors = said("cluster", monkeypatch, capsys)
    assert status == 2 and "Traceback" not in errors


@pytest.mark.parametrize(
    ("cause", "status"),
    [
        (OSError(errno.EMFILE, "Too many open files"), 1),
        (OSError(errno.ENOENT, "No such file or directory"), 2),
        (ImportError("libc.so: failed to map segment from shared object"), 1),
        (None, 2),
    ],
)
def test_what_the_machine_was_short_of_is_no_mistake_in_the_command(
    cause: Exception | None, status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whoever takes it for one: after 1 a script that resumes runs tries again."""

    def called() -> int:
        try:
            raise ValueError("it could not be read") from cause
        except ValueError as error:
            raise UserError("the data file cannot be read") from error

    monkeypatch.setattr(verbs, "_called", called)
    monkeypatch.setattr(verbs, "keep_going", lambda: None)
    with pytest.raises(SystemExit) as ended:
        verbs.run()
    assert ended.value.code == status and capsys.readouterr().err == "asyncflow: the data file cannot be read\n"
