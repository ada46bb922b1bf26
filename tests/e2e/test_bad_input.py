"""A mistake of the user's is one sentence and exit code 2, before anything starts."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from asyncflow.cli.verbs import app
from asyncflow.types import UserError
from tests.conftest import MODEL
from tests.e2e.commands import run_command, write_config

Small = Callable[..., dict[str, Any]]

A_SYNC = "asyncflow.weight_sync.shared_memory:SharedMemory"
CHOOSING = "algorithm={name: dapo, dynamic_sampling: true}"


def refusal(config: Path, *overrides: str) -> str:
    """What `asyncflow train` refuses with; nothing may have been started."""
    result = CliRunner().invoke(app, ["train", str(config), *overrides])
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    assert not (config.parent / "runs").exists()
    message = str(result.exception)
    assert "\n" not in message
    return message


def model_with(folder: Path, **changes: Any) -> Path:
    """The shipped model with its config.json changed; None removes a key."""
    target = folder / "model"
    shutil.copytree(MODEL, target)
    for name in ("config.json", "generation_config.json"):
        tree = json.loads((target / name).read_text()) | changes
        (target / name).write_text(json.dumps({key: value for key, value in tree.items() if value is not None}))
    return target


def test_the_command_itself_ends_with_2_and_one_line(small: Small, tmp_path: Path) -> None:
    command = run_command("train", write_config(tmp_path, small()), "rollout.temprature=0.5")
    assert command.returncode == 2 and command.stdout == ""
    assert command.stderr == "asyncflow: unknown key 'rollout.temprature': did you mean 'temperature'?\n"


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["runn.steps=3"], ["unknown key 'runn'", "'run'"]),
        (["train.learning_rat=3"], ["unknown key 'train.learning_rat'", "'learning_rate'"]),
        (["run.steps=many"], ["run.steps", "a whole number", "not many"]),
        (["rollout.dtype=float16"], ["rollout.dtype", "float32", "bfloat16"]),
        (["schedule=periodical"], ["schedule 'periodical'", "periodic", "synchronous"]),
        (["algorithm=ppoo"], ["algorithm 'ppoo'", "grpo"]),
        (["algorithm={name: grpo, clip_hihg: 0.3}"], ["algorithm", "clip_hihg"]),
        (["train.reference=task"], ["train.reference=task", "no KL term"]),
        (["train.offload=true"], ["train.offload", "this run has neither"]),
        (["train.oversampling=2"], ["train.oversampling and train.max_candidates", "dynamic_sampling of dapo", "leave them out"]),
        (["algorithm=dapo", "train.max_candidates=9"], ["train.oversampling and train.max_candidates"]),
        ([CHOOSING, "schedule={name: bounded, membership: first_come}"], ["first_come", "dynamic sampling", "take strict"]),
        ([CHOOSING, "train.max_candidates=7", "train.oversampling=2"], ["max_candidates is 7", "begins with 8 prompts"]),
        ([CHOOSING, "train.oversampling=0.5"], ["train.oversampling", "must be 1 or more"]),
        (["reward.scorer=exact"], ["reward 'exact'", "final_answer"]),
        (["reward.scorer={path: 'missing.py:Score'}"], ["missing.py"]),
        (["rollout.group_size=6", "train.responses_per_micro_batch=4"], ["6 = 1 x 4 + 2", "1, 2, 3, 6"]),
        (["rollout.num_workers=5"], ["rollout.num_workers=5 is more than train.prompts_per_step=4", "1 of them"]),
        (["plan.train.tp=3"], ["plan.train.tp is 3", "cut by 1, 2 alone"]),
        (["plan.train.pp=9"], ["plan.train.pp is 9", "layers"]),
        (["plan.train.dp=9"], ["plan.train.dp=9", "4 prompts"]),
        (["train.engine=deepspeed", "plan.train.tp=2"], ["deepspeed engine is data parallel only"]),
        (["train.engine={name: deepspeed, stages: 2}"], ["train engine 'deepspeed'", "stages"]),
        (["train.engine=megatron", "train.accumulate=exact"], ["megatron engine", "train.accumulate to fp32"]),
        (["weight_sync.min_healthy_workers=2"], ["weight_sync.min_healthy_workers=2", "take 1 or less"]),
        (["weight_sync={name: network, options: {keep: 3}}"], ["weight_sync=network has no options of its own", "keep"]),
        ([f"weight_sync={{path: '{A_SYNC}', options: {{evry: 2}}}}"], [f"{A_SYNC!r} does not take these options", "'evry'"]),
        (["rollout.min_healthy_workers=1"], ["unknown key", "did you mean 'weight_sync.min_healthy_workers'"]),
        (["data.limit=3"], ["3 rows", "prompts_per_step = 4"]),
        (["model.path=nowhere"], ["nowhere"]),
        (["model.path=random:gpt-9"], ["gpt-9", "qwen2-tiny"]),
        (["data.path=nowhere.jsonl"], ["nowhere.jsonl", "No such file"]),
        (["data.prompt_template='{problem}'"], ["'problem'", "answer, question"]),
        (["rollout.max_new_tokens=100000"], ["max_position_embeddings", "rollout.max_new_tokens"]),
        (["model.max_context_tokens=40"], ["model.max_context_tokens is 40"]),
        (["data.chat_template=true"], ["data.chat_template=false"]),
        (["run.steps"], ["key.path=value"]),
    ],
)
def test_a_wrong_value(small: Small, tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    message = refusal(write_config(tmp_path, small()), *overrides)
    assert not [word for word in words if word not in message], message


def test_a_model_that_is_not_causal(small: Small, tmp_path: Path) -> None:
    model = model_with(tmp_path, architectures=["Qwen2ForSequenceClassification"])
    assert "Qwen2ForSequenceClassification" in refusal(write_config(tmp_path, small(model={"path": str(model)})))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gpt2"}, "a model of type 'gpt2' so: models of type qwen2, qwen3, llama alone are cut over devices"),
        ({"use_sliding_window": True, "sliding_window": 16}, "sliding windows"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_a_model_that_cannot_be_cut_over_devices(small: Small, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    model = model_with(tmp_path, **fields)
    assert words in refusal(write_config(tmp_path, small(model={"path": str(model)}, plan={"train": {"dp": 2}})))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "train.critic.path '{}' is a Qwen2ForSequenceClassification"),
        ({"vocab_size": 5}, "the critic's model {} has 5 tokens, and the policy's 373"),
        ({"max_position_embeddings": 30}, "the critic's max_position_embeddings is 30"),
    ],
)
def test_a_critic_that_cannot_be_trained_beside_the_policy(
    small: Small, tmp_path: Path, fields: dict[str, Any], words: str
) -> None:
    critic = model_with(tmp_path, **fields)
    config = write_config(tmp_path, small(train={"critic": {"path": str(critic)}}, algorithm="ppo"))
    assert words.format(critic) in refusal(config)


def test_a_critic_without_weights_or_with_other_tokens(small: Small, tmp_path: Path) -> None:
    critic = model_with(tmp_path, vocab_size=400)  # more rows than tokens are no mistake
    config = write_config(tmp_path, small(train={"critic": {"path": str(critic)}}, algorithm="ppo", run={"steps": 1}))
    tokenizer = json.loads((critic / "tokenizer.json").read_text())
    vocabulary = tokenizer["model"]["vocab"]
    tokenizer["model"]["vocab"] = dict(zip(vocabulary, reversed(vocabulary.values()), strict=True))
    (critic / "tokenizer.json").write_text(json.dumps(tokenizer))
    assert f"the critic's model {critic} has another tokenizer than the policy's" in refusal(config)
    (critic / "model.safetensors").unlink()
    assert "has no weights in safetensors format" in refusal(config)
    shutil.rmtree(critic)
    assert f"train.critic.path '{critic}' is no folder with a model" in refusal(config)


def test_a_tokenizer_without_an_end_token(small: Small, tmp_path: Path) -> None:
    model = model_with(tmp_path, eos_token_id=None)
    assert "end token" in refusal(write_config(tmp_path, small(model={"path": str(model)})))


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ("", "has no rows"),
        ('{"question": "a", "answer": "1"}\n{"question": \n', "line 2 is not JSON"),
        ('{"question": "a", "answer": "1"}\n["b"]\n', "line 2 is not an object"),
        ('{"question": "a", "answer": "1"}\n{"answer": "1"}\n', "row 2"),
    ],
)
def test_malformed_data_names_file_and_line(small: Small, tmp_path: Path, lines: str, words: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(lines)
    message = refusal(write_config(tmp_path, small(data={"path": str(data), "limit": None})))
    assert str(data) in message and words in message


def test_a_config_that_is_not_there_or_no_yaml(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(tmp_path / "none.yaml")
    (tmp_path / "bad.yaml").write_text("run: [")
    assert "is not YAML" in refusal(tmp_path / "bad.yaml")


def test_a_folder_that_no_run_wrote_is_never_removed(small: Small, tmp_path: Path) -> None:
    kept = tmp_path / "runs" / "test" / "thesis.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("years of work")
    result = CliRunner().invoke(app, ["train", str(write_config(tmp_path, small())), "run.overwrite=true"])
    assert isinstance(result.exception, UserError) and kept.read_text() == "years of work"


def refused(*arguments: object) -> str:
    """What a verb refuses with."""
    result = CliRunner().invoke(app, [*map(str, arguments)])
    assert isinstance(result.exception, UserError), (result.output, result.exception)
    assert "\n" not in str(result.exception) and "Errno" not in str(result.exception)
    return str(result.exception)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["status", "nowhere"], "there is no run in nowhere: name a run's folder"),
        (["cluster", "scale", "rollout=2", "--run", "nowhere"], "there is no run in nowhere: name a run's folder"),
        (["status", "ended"], "no run is live in ended: it has ended"),
        (
            ["join", "http://127.0.0.1:1", "--key-file", "nowhere"],
            "nowhere holds no key of a service (No such file or directory): name the server's",
        ),
        (["join", "http://127.0.0.1:1", "--key-file", "file"], "file holds no key of a service: name the server's"),
        (
            ["join", "https://127.0.0.1:1", "--key-file", "key", "--certificate", "file"],
            "the certificate file cannot be used: name the server's tls.crt",
        ),
        (
            ["queue", "metrics", "unix:nowhere"],
            "no queue is served there, or it does not let you in: nobody answers at unix:nowhere",
        ),
        (
            ["queue", "serve", "nowhere", "--address", "unix:q"],
            "the queue's file nowhere cannot be read: No such file or directory",
        ),
        (["init", "/proc/x"], "the folder /proc/x cannot be made: No such file or directory; name another one"),
        (
            ["train", "config.yaml", "run.dir=file"],
            "the run's folder file/test cannot be made, since file is a file: give another run.dir",
        ),
        (["train", "config.yaml", "run.dir=/proc/x"], "the run's folder /proc/x/test cannot be made (No such file or directory)"),
        (
            ["plan", "config.yaml", "--devices", "2", "--hardware", "config.yaml"],
            "config.yaml is no device's file: it has data, model, rollout, and a device has name, memory_gib",
        ),
        (
            ["serve", "config.yaml", "--certificate", "file"],
            "the certificate file cannot be used: it must hold a certificate and its key",
        ),
    ],
    ids=lambda value: " ".join(value)[:40] if isinstance(value, list) else "",
)
def test_a_path_that_is_not_what_it_should_be(
    small: Small, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    write_config(tmp_path, small())
    Path("file").write_text("text\n")
    Path("key").write_text('{"keys": [{"secret": "af-key"}]}')
    Path("ended").mkdir()
    Path("ended", ".asyncflow-run").touch()
    assert words in refused(*arguments)
    assert not (tmp_path / "runs").exists()


def test_report_and_status_of_what_is_no_run(tmp_path: Path) -> None:
    for verb in ("report", "status"):
        command = run_command(verb, tmp_path)
        assert command.returncode == 2 and str(tmp_path) in command.stderr and len(command.stderr.splitlines()) == 1
