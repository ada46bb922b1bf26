"""`asyncflow eval` from the command line: its figures, its files, and any rollout engine."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from asyncflow.cli.eval import _config
from asyncflow.types import UserError
from tests.conftest import MODEL, ROOT
from tests.depth import deep
from tests.e2e.commands import run_command


def test_an_evaluation_and_its_files(tmp_path: Path) -> None:
    data = tmp_path / "test.jsonl"
    problems = [
        {"problem": f"Tom has {n} coins. Tom finds 3. How many coins does Tom have?", "solution": str(n + 3)} for n in range(2, 12)
    ]
    data.write_text("".join(json.dumps(row) + "\n" for row in problems))
    command = run_command(
        "eval", MODEL, data, "rollout.max_new_tokens=32", "--samples", "4", "--temperature", "0.8", "--out", tmp_path / "out"
    )
    assert command.returncode == 0, command.stderr
    tree = json.loads((tmp_path / "out" / "evaluation.json").read_text())
    sampled, greedy = tree["prompts"]["sampled"], tree["prompts"]["greedy"]
    assert [p["prompt"] for p in sampled] == list(range(10)) and {len(p["rewards"]) for p in sampled} == {4}
    assert {len(p["rewards"]) for p in greedy} == {1}
    mean = sum(sum(p["rewards"]) for p in sampled) / 40
    figures = tree["figures"]
    assert figures["accuracy/sampled"] == pytest.approx(mean) == pytest.approx(figures["pass@1/sampled"])
    assert figures["pass@1/sampled"] <= figures["pass@2/sampled"] <= figures["pass@4/sampled"]
    assert figures["interval/sampled/low"] <= mean <= figures["interval/sampled/high"]
    for k in (1, 2, 4):
        low, high = figures[f"interval/pass@{k}/sampled/low"], figures[f"interval/pass@{k}/sampled/high"]
        assert low <= figures[f"pass@{k}/sampled"] <= high
        assert f"pass@{k} {figures[f'pass@{k}/sampled']:.4f} [{low:.4f}, {high:.4f}]" in command.stdout
    assert tree["settings"]["temperature"] == 0.8 and len(tree["samples"]) == 20
    assert {s["answer"] for s in tree["samples"]} == {row["solution"] for row in problems}
    assert f"mean@4 {mean:.4f}" in command.stdout and "10 prompts" in command.stdout
    assert "Tom finds 3." in (tmp_path / "out" / "evaluation.html").read_text()


@deep
def test_the_same_twice_is_the_same(tmp_path: Path) -> None:
    shown = [
        run_command("eval", MODEL, "generated:arithmetic", "--prompts", "8", "--samples", "2", "run.seed=3", "rollout.num_slots=8")
        for _ in range(2)
    ]
    assert shown[0].returncode == 0, shown[0].stderr
    assert shown[0].stdout == shown[1].stdout


def test_an_engine_of_ones_own(tmp_path: Path) -> None:
    """By its path: this one says that it is there."""
    engine = tmp_path / "mine.py"
    engine.write_text(
        "from asyncflow.engines.rollout.engine import SlotEngine\n"
        "class Mine(SlotEngine):\n"
        "    def __init__(self, *, mark, **options):\n"
        "        super().__init__(**options)\n"
        "        open(mark, 'w').write('generated here')\n"
    )
    command = run_command(
        "eval",
        MODEL,
        "generated:arithmetic",
        "--prompts",
        "4",
        "--engine",
        f"{engine}:Mine",
        f"rollout.engine.mark={tmp_path / 'mark'}",
    )
    assert command.returncode == 0, command.stderr
    assert (tmp_path / "mark").read_text() == "generated here"


def test_what_is_evaluated_is_the_held_out_split_unless_said_otherwise() -> None:
    def splits(*overrides: str, config: Path | None = None) -> tuple[str, str]:
        parsed = _config("m", "openai/gsm8k", list(overrides), config, "scratch", {}, None)
        return parsed.data.split, parsed.eval.split

    recipe = ROOT / "recipes" / "papers" / "qwen2.5-7b-gsm8k.yaml"
    assert splits() == splits(config=recipe) == ("test", "test")
    assert splits("data.split=dev") == splits("eval.split=dev") == ("dev", "dev")
    assert _config("m", "d.jsonl", [], None, "s", {}, None).eval.num_prompts is None
    assert _config("m", "generated:arithmetic", [], None, "s", {}, None).eval.num_prompts == 256


def test_options_are_the_configurations_keys() -> None:
    recipe = ROOT / "recipes" / "papers" / "qwen2.5-7b-gsm8k.yaml"
    given = {"eval.samples_per_prompt": 16, "rollout.temperature": 0.6}
    parsed = _config("m", "d.jsonl", [], recipe, "s", given, "vllm")
    assert parsed.eval.samples_per_prompt == 16 and parsed.rollout.temperature == 0.6
    assert parsed.rollout.engine.options == {"instances": 1, "tensor_parallel": 2}, "the engine's options in the configuration stay"
    assert _config("m", "d.jsonl", [], recipe, "s", {}, "slots").rollout.engine.options == {}
    with pytest.raises(UserError, match=r"an option of the command says rollout\.temperature, too"):
        _config("m", "d.jsonl", ["rollout.temperature=1.0"], None, "s", given, None)
    with pytest.raises(UserError, match="given by the command's own arguments"):
        _config("m", "d.jsonl", ["eval.path=x"], None, "s", {}, None)
    for whole in ("eval={path: x}", "run={dir: x, seed: 3}"):
        with pytest.raises(UserError, match="given by the command's own arguments"):
            _config("m", "d.jsonl", [whole], None, "s", {}, None)
    parsed = _config("m", "d.jsonl", ["eval={greedy: false}", "run={seed: 3}"], None, "s", {}, None)
    assert (parsed.eval.path, parsed.eval.greedy, str(parsed.run_dir), parsed.run.seed) == ("d.jsonl", False, "s/eval", 3)


def test_what_training_demands_is_not_demanded_of_an_evaluation(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    train = "{prompts_per_step: 10, mini_batches: 5, epochs: 2, old: step_start, responses_per_micro_batch: 3, reference: task}"
    config.write_text(
        f"train: {train}\nrollout: {{group_size: 9, num_workers: 5}}\nalgorithm: {{name: ppo, kl_coefficient: 0.1}}\n"
        "plan: {train: {dp: 2}}\nweight_sync: {min_healthy_workers: 5}\nschedule: bounded\nqueue: {samplers: {values: oldest}}\n"
    )
    for overrides in (["rollout.num_workers=3"], ["rollout.group_size=1"], ["rollout.num_workers=4", "rollout.group_size=2"]):
        parsed = _config("m", "d.jsonl", overrides, config, "s", {}, None)
        assert parsed.train.prompts_per_step == 10
        assert (parsed.layout.size, parsed.algorithm.name, parsed.train.reference) == (1, "grpo", "fused")
        assert not parsed.queue.samplers and parsed.weight_sync.min_healthy_workers == 1
    assert _config("m", "d.jsonl", ["rollout.num_workers=11"], config, "s", {}, None).train.prompts_per_step == 11
    assert _config("m", "d.jsonl", [], None, "s", {}, None).train.prompts_per_step == 32
    with pytest.raises(UserError, match=r"rollout\.num_workers: must be more than 0"):
        _config("m", "d.jsonl", ["rollout.num_workers=0"], None, "s", {}, None)
    given = ("rollout.num_workers=3", "rollout.group_size=1", "--prompts", "6", "rollout.max_new_tokens=8", "rollout.num_slots=4")
    command = run_command("eval", MODEL, "generated:arithmetic", *given)
    assert command.returncode == 0, command.stderr
    assert "of 6 prompts" in command.stdout


def test_where_nothing_can_be_written_nothing_is_begun(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("here")
    for out in (tmp_path / "file", tmp_path / "file" / "out"):
        command = run_command("eval", MODEL, "generated:arithmetic", "--prompts", "4", "--out", out)
        assert command.returncode == 2 and f"--out {out} is no folder" in command.stderr and command.stdout == ""


def scorer_that_fails(folder: Path, every: int) -> str:
    """For each problem whose number divides by `every`."""
    path = folder / f"fails_{every}.py"
    path.write_text(
        "def score(sample):\n"
        f"    if int(sample.example['number']) % {every} == 0:\n"
        "        raise ValueError('nothing to go by')\n"
        "    return 1.0\n"
    )
    return f"reward.scorer={{path: '{path}:score'}}"


@pytest.fixture
def numbered(tmp_path: Path) -> Path:
    data = tmp_path / "numbered.jsonl"
    data.write_text("".join(json.dumps({"question": f"Tom has {n} coins.", "number": n}) + "\n" for n in range(1, 9)))
    return data


def test_an_evaluation_of_which_nothing_could_be_scored_fails(numbered: Path, tmp_path: Path) -> None:
    given = (
        "rollout.max_new_tokens=8",
        scorer_that_fails(tmp_path, 1),
        "reward.max_failed_fraction=1.0",
        "--out",
        tmp_path / "out",
    )
    command = run_command("eval", MODEL, numbered, *given)
    assert command.returncode == 1 and "no response was scored (16 could not be)" in command.stderr
    assert "nothing to go by" in command.stdout and "held-out accuracy: none (8 prompts, 16 responses" in command.stdout
    assert not (tmp_path / "out" / "evaluation.json").exists()


def test_more_failures_than_are_allowed_fail_it_and_others_are_told(numbered: Path, tmp_path: Path) -> None:
    half = ("rollout.max_new_tokens=8", scorer_that_fails(tmp_path, 2), "eval.greedy=false")
    command = run_command("eval", MODEL, numbered, *half, "--out", tmp_path / "out")
    assert command.returncode == 1
    assert "4 of 8 responses could not be scored, more than reward.max_failed_fraction=0.25" in command.stderr
    assert "of 4 prompts  4 responses could not be scored" in command.stdout
    assert json.loads((tmp_path / "out" / "evaluation.json").read_text())["figures"]["unscored/sampled"] == 4
    command = run_command("eval", MODEL, numbered, *half, "reward.max_failed_fraction=0.5")
    assert command.returncode == 0, command.stderr
    assert "mean@1 1.0000" in command.stdout and "4 responses could not be scored" in command.stdout
    command = run_command("eval", MODEL, numbered, *half, "reward.value_on_failure=0.0")
    assert command.returncode == 1 and "4 of 8 responses could not be scored" in command.stderr, "a value for failures hides none"
    assert "mean@1 0.5000" in command.stdout
