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
        (["plan.train.tp=3"], ["plan.train.tp is 3", "sharded by 1, 2 alone"]),
        (["plan.train.pp=9"], ["plan.train.pp is 9", "layers"]),
        (["plan.train.dp=9"], ["plan.train.dp=9", "4 prompts"]),
        (["train.engine=deepspeed", "plan.train.tp=2"], ["deepspeed engine is data parallel only"]),
        (["train.engine={name: deepspeed, stages: 2}"], ["train engine 'deepspeed'", "stages"]),
        (["train.engine=megatron", "train.accumulate=exact"], ["megatron engine", "train.accumulate to fp32"]),
        (["weight_sync.min_healthy_workers=2"], ["weight_sync.min_healthy_workers=2", "take 1 or less"]),
        (["weight_sync={name: network, options: {keep: 3}}"], ["weight_sync=network has no options of its own", "keep"]),
        ([f"weight_sync={{path: '{A_SYNC}', options: {{evry: 2}}}}"], [f"{A_SYNC!r} has no option 'evry': it has none"]),
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
        *(
            ([f"run.name={name}"], ["run.name", "is no name of a run", "run.dir"])
            for name in (".", "..", "../../x", "a/b", "a@1", "''")
        ),
        (["run.steps=99999999999999999999999"], ["run.steps: must be a smaller number"]),
        (["run.steps=2000000000"], ["run.steps: must be 1000000000 or less"]),
        ([CHOOSING, "run.steps=100000000"], ["run.steps=100000000", "groups", "take fewer"]),
        *(
            ([f"schedule={{name: bounded, max_staleness: {value}}}"], ["schedule 'bounded': max_staleness must be a whole number"])
            for value in ("1.5", "true", ".inf", "two")
        ),
        (["schedule={name: bounded, stale: 2}"], ["has no option 'stale': did you mean 'max_staleness'?"]),
        (["schedule={name: sub_step, max_installing: 1.5}"], ["max_installing must be a whole number or null, not 1.5"]),
        *(
            ([f"algorithm={{name: dapo, {key}: {value}}}"], [f"algorithm 'dapo': {key} must be"])
            for key, value in (
                ("dynamic_sampling", "maybe"),
                ("overlong_filter", "7"),
                ("clip_low", "abc"),
                ("clip_high", "true"),
                ("kl_coefficient", "'0.1'"),
                ("kl_coefficient", ".nan"),
                ("overlong_length", "abc"),
            )
        ),
        (["rollout.engine={name: slots, foo: 1}"], ["rollout engine 'slots' has no option 'foo': it has "]),
        (["train.engine={name: torch, foo: 1}"], ["train engine 'torch' has no option 'foo'"]),
        (["train.engine={path: 'missing.py:Engine'}"], ["train engine 'missing.py:Engine' cannot be imported: there is no file"]),
        (["rollout.engine={name: vllm, python: /no/python}"], ["rollout.engine.python is '/no/python', which cannot be started"]),
        (["queue.storage={path: 'missing.py:Storage'}"], ["queue storage 'missing.py:Storage' cannot be imported"]),
        (["queue.storage={name: redis, ulr: x}"], ["queue storage 'redis' has no option 'ulr': did you mean 'url'?"]),
        (["queue.storage={name: redis, url: 'redis://127.0.0.1:1'}"], ["queue.storage: the redis server at redis://127.0.0.1:1"]),
        (["--dry-run", "model.lora={rank: 4}", "rollout.engine=transformers"], ["transformers applies no low-rank adapters"]),
        (["model.lora={targets: [nolayer]}"], ["model.lora.targets", "no linear layer 'nolayer'", "q_proj"]),
        (["telemetry.trackers=[wandb]"], ["telemetry.trackers has wandb, which is not installed"]),
        (["model.push_to_hub=foo"], ["model.push_to_hub: 'foo' is no repository", "owner/name"]),
        (["data.prompt_template='no column at all'"], ["names no column", "'{question}'"]),
        (["data.path=rows.jsonl", "data.split=train2"], ["data.split=train2, but rows.jsonl is one whole"]),
        (["data.subset=main"], ["data.subset=main, but generated:arithmetic is one whole"]),
        (["checkpoint.keep=0", "checkpoint.every_steps=1"], ["keep=0 writes no checkpoints, and every_steps=1"]),
        (["eval.correct_from=.nan"], ["eval.correct_from: must be a finite number"]),
        (["algorithm={name: grpo, path: 'x.py:Y'}"], ["has both the name 'grpo' and the path 'x.py:Y'"]),
    ],
)
def test_a_wrong_value(small: Small, tmp_path: Path, overrides: list[str], words: list[str]) -> None:
    message = refusal(write_config(tmp_path, small()), *overrides)
    assert not [word for word in words if word not in message], message


BROKEN = {
    "raises": ("raise RuntimeError('boom')", "cannot be imported: RuntimeError: boom", 1),
    "ends": ("import sys\nsys.exit(0)", "cannot be imported: it ends the program", 2),
    "unfinished": ("\n\ndef f(:", "cannot be imported: invalid syntax", 3),
}


OWN = [
    "algorithm", "schedule", "weight_sync", "cluster", "train.engine", "rollout.engine", "queue.storage", "queue.samplers.train",
    "reward.scorer", "environment", "episodes.format",
]  # fmt: skip


@pytest.mark.parametrize(
    ("key", "broken"),
    [
        *((key, "raises") for key in OWN),
        *((key, how) for key in ("algorithm", "reward.scorer", "environment") for how in ("ends", "unfinished")),
    ],
)
def test_a_file_of_ones_own_that_cannot_be_imported(small: Small, tmp_path: Path, key: str, broken: str) -> None:
    source, words, line = BROKEN[broken]
    (file := tmp_path / f"{broken}.py").write_text(source)
    own = [f"{key}={{path: '{file}:Own'}}", *(["environment={name: tools, tools: [python]}"] if key == "episodes.format" else [])]
    message = refusal(write_config(tmp_path, small()), *own)
    assert words in message and f"{file}:{line})" in message, message


@pytest.mark.parametrize(
    ("key", "words"),
    [
        ("schedule", "the schedule {file}:Own has no 'max_staleness': asyncflow/control/schedule.py says what is needed"),
        ("algorithm", "the algorithm {file}:Own has no 'normaliser': asyncflow/algorithms/base.py says"),
    ],
)
def test_a_class_of_ones_own_that_lacks_the_contract(small: Small, tmp_path: Path, key: str, words: str) -> None:
    (file := tmp_path / "own.py").write_text("class Own: ...\n")
    assert words.format(file=file) in refusal(write_config(tmp_path, small()), f"{key}={{path: '{file}:Own'}}")


def test_a_schedule_of_ones_own_whose_staleness_is_no_number(small: Small, tmp_path: Path) -> None:
    (file := tmp_path / "own.py").write_text(
        "from asyncflow.control.modes import Periodic\n\nclass Own(Periodic):\n    max_staleness = 1.5\n"
    )
    message = refusal(write_config(tmp_path, small()), f"schedule={{path: '{file}:Own'}}")
    assert f"the schedule {file}:Own: max_staleness must be a whole number, not 1.5; asyncflow/control/schedule.py" in message


def test_a_model_that_is_not_causal(small: Small, tmp_path: Path) -> None:
    model = model_with(tmp_path, architectures=["Qwen2ForSequenceClassification"])
    assert "Qwen2ForSequenceClassification" in refusal(write_config(tmp_path, small(model={"path": str(model)})))


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"model_type": "gpt2"}, "a model of type 'gpt2' so: models of type qwen2, qwen3, llama alone are sharded"),
        ({"use_sliding_window": True, "sliding_window": 16}, "sliding windows"),
        ({"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}}, "rope type 'dynamic'"),
    ],
)
def test_a_model_that_cannot_be_sharded(small: Small, tmp_path: Path, fields: dict[str, Any], words: str) -> None:
    model = model_with(tmp_path, **fields)
    assert words in refusal(write_config(tmp_path, small(model={"path": str(model)}, plan={"train": {"dp": 2}})))


def test_a_context_that_transformers_would_generate_otherwise_than_it_is_trained(small: Small, tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 8, "long_factor": [4.0] * 8}
    model = model_with(tmp_path, rope_parameters={**rope, "original_max_position_embeddings": 10})
    config = write_config(tmp_path, small(model={"path": str(model)}))
    told = refusal(config, "rollout.engine=transformers")
    assert "rollout.engine=transformers: under the rope type 'longrope' a row that exceeds 10 positions" in told
    assert told.endswith("set model.max_context_tokens=10, or fewer")


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
            "no queue is served there, or it does not let you in: nothing answers at unix:nowhere",
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
        (["train", "config.yaml", "run.dir=file", "--dry-run"], "file is a file: give another run.dir"),
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
