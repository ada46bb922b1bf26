"""The recipe for the real data set, on a few of its questions, with a randomly initialised model."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from itertools import islice
from pathlib import Path

import pytest

from asyncflow.config import load
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.run.preparation.prompts import read_source, tokenize
from tests.conftest import MODEL, ROOT, gsm8k_folder
from tests.e2e.commands import rows, run_command
from tests.hub import Hub, served


def test_gsm8k_recipe_runs_on_64_questions(tmp_path: Path) -> None:
    folder = gsm8k_folder()
    if folder is None:
        pytest.skip("GSM8K is not here: set ASYNCFLOW_GSM8K to the folder of its train.jsonl")
    data = tmp_path / "train.jsonl"
    with (folder / "train.jsonl").open() as file:
        data.write_text("".join(islice(file, 64)))
    command = run_command(
        "train", ROOT / "recipes" / "gsm8k.yaml", f"data.path={data}", f"run.dir={tmp_path / 'runs'}", "run.steps=2",
        "train.prompts_per_step=4", "rollout.group_size=2", "rollout.max_new_tokens=16",
    )  # fmt: skip
    assert command.returncode == 0, command.stderr
    run_dir = tmp_path / "runs" / "gsm8k"
    metrics = rows(run_dir / "metrics.jsonl")
    assert [row["rows/trained"] for row in metrics] == [8, 8]
    assert (run_dir / "model" / "model.safetensors").stat().st_size > 0


async def test_all_questions_become_prompts_with_their_answers(tmp_path: Path) -> None:
    folder = gsm8k_folder()
    if folder is None:
        pytest.skip("GSM8K is not here: set ASYNCFLOW_GSM8K to the folder of its train.jsonl")
    overrides = [f"data.path={folder / 'train.jsonl'}", f"eval.path={folder / 'test.jsonl'}", "eval.num_prompts=null"]
    config = load(ROOT / "recipes" / "gsm8k.yaml", [*overrides, f"model.path={MODEL}"])
    source, tokenizer = read_source(config, "train"), CheckpointTokenizer(MODEL)
    prompts, held_out = tokenize(config, tokenizer, source), read_source(config, "heldout")
    assert (len(prompts), len(held_out.rows)) == (7473, 1319)
    assert all(
        prompt.example == row and "#### " in prompt.example["answer"] for prompt, row in zip(prompts, source.rows, strict=True)
    )
    assert min(len(prompt.ids) for prompt in prompts) > 30
    text = tokenizer.decode(prompts[0].ids)
    assert text.startswith("Natalia sold clips") and text.endswith("end with #### and the answer.\n")


def test_the_command_of_the_page_that_evaluates_a_real_model_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As it is written, with another model of that name on a stand-in of the Hub, and a folder of the data set's name."""
    page = (ROOT / "docs" / "evaluation.md").read_text()
    (text,) = re.findall(r"(?m)^    \$ (asyncflow eval HuggingFaceTB/.*(?:\n      .*)*)", page)
    _, verb, name, data, *others = shlex.split(text)
    assert "recipes/gsm8k.yaml" in others and data == "openai/gsm8k" and "data.subset=main" in others
    model = tmp_path / "model"
    shutil.copytree(MODEL, model)
    (model / "chat_template.jinja").write_text("{% for message in messages %}{{ message['content'] }}{% endfor %}")
    questions = tmp_path / data / "main"
    questions.mkdir(parents=True)
    asked = {"question": "Tom has 2 coins. Tom finds 3. How many coins does Tom have?", "answer": "2 + 3 = 5\n#### 5"}
    (questions / "test.jsonl").write_text(json.dumps(asked) + "\n")
    (tmp_path / data / "README.md").write_text(
        "---\nconfigs:\n- config_name: main\n  data_files:\n  - {split: test, path: main/test.jsonl}\n---\n"
    )
    (tmp_path / "recipes").symlink_to(ROOT / "recipes")
    monkeypatch.chdir(tmp_path)
    hub = Hub({name: {"main": model}})
    with served(hub):
        cache = {"HF_HOME": str(tmp_path / "cache"), "HF_DATASETS_CACHE": str(tmp_path / "cache" / "datasets")}
        command = run_command(verb, name, data, *others, HF_ENDPOINT=hub.url, HF_HUB_OFFLINE="0", **cache)
    assert command.returncode == 0, command.stderr
    figures = r"sampled  mean@1 [01]\.\d+ .* of 1 prompts"
    assert f"downloading {name}" in command.stdout and re.search(figures, command.stdout), command.stdout
    assert re.search(r"(?m)^    sampled  mean@1 \d\.\d+ \[.*\] .* of \d+ prompts$", page.split(text)[1].split("\n\n")[0])
