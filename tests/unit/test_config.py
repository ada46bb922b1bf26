"""The configuration: whatever is wrong is found at load, and said in one sentence."""

from __future__ import annotations

import errno
import math
import re
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from asyncflow.config import Config, dump, load, parse, parse_dumped
from asyncflow.run.device_shares import num_devices
from asyncflow.run.factories import (
    PASS_TOKENS,
    PASS_TOKENS_CPU,
    critic_options,
    leaves_out_equal_rewards,
    make_algorithm,
    queue_schema,
    shape_of,
    tasks_before_training,
    tokens_per_pass,
    train_engine_options,
    update_plan,
    weights_need_key,
)
from asyncflow.run.preparation.checks import check_choices
from asyncflow.run.preparation.notes import advice, pass_note
from asyncflow.settings import Choice, apply_override
from asyncflow.types import RunError, UserError
from asyncflow.weight_sync import WEIGHT_SYNC_FACTS, WEIGHT_SYNCS

NEEDED: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d.jsonl"}}


def write(folder: Path, text: str) -> Path:
    path = folder / "config.yaml"
    path.write_text(text)
    return path


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"rollout": {"grup_size": 4}}, "unknown key 'rollout.grup_size': did you mean 'group_size'?"),
        ({"rolout": {}}, "unknown key 'rolout': did you mean 'rollout'?"),
        ({"train": {"zzz": 1}}, "unknown key 'train.zzz': known here are engine, prompts_per_step, "),
        ({"weight_sync": {"nmae": "shared_memory"}}, "unknown key 'weight_sync.nmae': did you mean 'name'?"),
        (
            {"weight_sync": {"path": "f.py:Mine", "every": 3}},
            "unknown key 'weight_sync.every': known here are name, options, dtype",
        ),
        ({"weight_sync": {"path": "f.py:Mine", "optoins": {}}}, "unknown key 'weight_sync.optoins': did you mean 'options'?"),
        (
            {"weight_sync": {"path": "f.py:Mine", "name": "network"}},
            "weight_sync: has both the name 'network' and the path 'f.py:Mine': leave one of them out",
        ),
        ({"weight_sync": {"options": 3}}, "weight_sync.options: must be a mapping, not 3"),
        ({"weight_sync": 3}, "weight_sync: .*, not 3"),
        ({"queue": {"samplers": ["oldest"]}}, "queue.samplers: must be a mapping, not \\[oldest\\]"),
        ({"queue": {"samplers": {"train": {"window": 3}}}}, "queue.samplers.train: needs a name, or a path as in"),
        ({"model": {}}, "'model.path' is missing"),
        ({"run": {"steps": "many"}}, "run.steps: must be a whole number, not many"),
        ({"run": {"steps": 0}}, "run.steps: must be 1 or more, not 0"),
        ({"run": {"seed": -1}}, "run.seed: must be 0 or more, not -1"),
        ({"train": {"learning_rate": 0.0}}, "train.learning_rate: must be more than 0, not 0.0"),
        ({"train": {"max_grad_norm": float("inf")}}, "train.max_grad_norm: must be a finite number, not .inf"),
        ({"train": {"betas": [0.9, 1]}}, "train.betas.1: must be less than 1, not 1"),
        ({"train": {"no_weight_decay": ["norm", "("]}}, "no_weight_decay.1: .* is no regular expression"),
        ({"train": {"learning_rate": 1e-6, "min_learning_rate": 1e-5}}, "train.min_learning_rate=1e-05 is more than"),
        ({"rollout": {"top_p": 0.0}}, "rollout.top_p: must be more than 0, not 0.0"),
        ({"rollout": {"stop": [""]}}, "rollout.stop.0: must be at least 1 long, not ''"),
        ({"rollout": {"temperature": float("nan")}}, "rollout.temperature: must be a finite number, not .nan"),
        ({"train": {"log_prob_chunk_tokens": 0}}, "train.log_prob_chunk_tokens: must be more than 0, not 0"),
        ({"train": {"old": "older"}}, "train.old: must be 'current', 'step_start', 'previous' or 'rollout', not older"),
        ({"rollout": {"group_size": 1}}, "rollout.group_size: must be 2 or more, not 1"),
        ({"rollout": {"dtype": "float16"}}, "rollout.dtype: must be 'float32' or 'bfloat16', not float16"),
        ({"run": None}, "run: must be a section with keys, not null"),
        ({"run": {"steps": True}}, "run.steps: true is neither a number nor a name here"),
        ({"train": {"device": "tpu"}}, "train.device: there is no device 'tpu': take cpu, cuda or npu"),
        ({"eval": {"every_steps": 3}}, "eval: every_steps is set, and path is not: nothing would be evaluated"),
        ({"reward": {"scorers": {"1a": {"scorer": "length"}}}}, "reward.scorers.1a: '1a' is no name of a reward"),
        ({"reward": {"scorer": {"name": "a", "path": "b"}}}, "reward.scorer: has both the name 'a' and the path 'b': leave"),
        ({"reward": {"scorer": {"name": "a", "options": 3}}}, "reward.scorer: 'options' must be a mapping"),
        ({"reward": {"scorer": 3}}, "reward.scorer: .*, not 3"),
    ],
)
def test_a_mistake_is_one_sentence_naming_the_key(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence) as caught:
        parse({**NEEDED, **tree})
    assert "\n" not in str(caught.value)


def test_several_mistakes_are_all_said() -> None:
    with pytest.raises(UserError) as caught:
        parse({"data": {"path": "d", "x": 1}, "runn": {}})
    assert str(caught.value).split("; ") == [
        "'model' is missing",
        "unknown key 'data.x': known here are path, subset, split, prompt_template, prompt_column, answer_column, chat_template, "
        "chat_template_options, max_prompt_tokens, limit, seed",
        "unknown key 'runn': did you mean 'run'?",
    ]


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        (
            {"rollout": {"group_size": 8}, "train": {"responses_per_micro_batch": 3}},
            "train.responses_per_micro_batch does not divide rollout.group_size: 8 = 2 x 3 + 2; take one of 1, 2, 4, 8",
        ),
        (
            {"rollout": {"num_workers": 6}, "train": {"prompts_per_step": 4}},
            "rollout.num_workers=6 is more than train.prompts_per_step=4, so 2 of them would have nothing to generate: "
            "take 4 workers or fewer, or more prompts",
        ),
        (
            {"eval": {"num_workers": 2}},
            "eval.num_workers=2 have nothing to evaluate: set eval.path, or leave it out",
        ),
    ],
)
def test_numbers_that_do_not_fit_together_are_refused_with_the_arithmetic(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        parse({**NEEDED, **tree})
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("written", "chosen"),
    [
        ("mine", Choice(name="mine")),
        ({"name": "mine", "strict": True}, Choice(name="mine", options={"strict": True})),
        ({"path": "f.py:Mine", "strict": True}, Choice(name="f.py:Mine", options={"strict": True})),
        ({"name": "mine", "options": {"strict": True}}, Choice(name="mine", options={"strict": True})),
        ({"name": "mine", "options": {"strict": True}, "k": 2}, Choice(name="mine", options={"strict": True, "k": 2})),
        ({"require_end": False}, Choice(name="final_answer", options={"require_end": False})),
    ],
)
def test_a_choice_is_a_name_or_a_mapping_with_its_options(written: Any, chosen: Choice) -> None:
    assert parse({**NEEDED, "reward": {"scorer": written}}).reward.scorer == chosen


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"schedule": "periodik"}, "schedule 'periodik' is not known; choose one of .*periodic, sub_step, synchronous, or give"),
        ({"algorithm": {"name": "gpro"}}, "algorithm 'gpro' is not known; choose one of .*grpo"),
        ({"reward": {"scorer": "x"}}, "reward 'x' is not known; choose one of .*final_answer"),
        ({"queue": {"storage": "disk"}}, "queue storage 'disk' is not known; choose one of memory"),
        ({"rollout": {"engine": "x"}}, "rollout engine 'x' is not known; choose one of .*slots"),
        ({"train": {"engine": "x"}}, "train engine 'x' is not known; choose one of .*torch"),
        ({"cluster": "slurm"}, "cluster 'slurm' is not known; choose one of inline, local, ray"),
        ({"cluster": {"address": "auto"}}, "cluster 'local' has no option 'address': it has none"),
        ({"cluster": {"name": "ray", "adress": "auto"}}, "cluster 'ray' has no option 'adress': did you mean 'address'"),
        ({"cluster": {"name": "ray", "resources": {"rollout": {"GPU": 1.5}}}}, "cluster.resources.rollout.GPU=1.5 is neither"),
        ({"queue": {"listen": "tls:0.0.0.0:7001"}}, "queue.listen=tls:0.0.0.0:7001 names no machine, .*: take this machine's own"),
        ({"weight_sync": {"name": "network", "listen": "tls:[::]:0"}}, r"weight_sync.listen=tls:\[::\]:0 names no machine"),
        (
            {"weight_sync": "colective"},
            "weight sync 'colective' is not known; choose one of collective, network, shared_memory, or",
        ),
        (
            {"weight_sync": {"path": "no_file.py:Mine"}},
            "weight sync 'no_file.py:Mine' cannot be imported: there is no file no_file",
        ),
        (
            {"weight_sync": {"listen": "tls:h:1"}},
            "weight_sync.listen=tls:h:1: .* travel by shared_memory: take collective or network$",
        ),
        (
            {"eval": {"num_workers": 1, "path": "d"}, "weight_sync": {"name": "collective"}},
            "weight_sync.name=collective broadcasts each version to all workers that have once asked for one, and "
            "eval.num_workers=1 take only some, later: take shared_memory or network, or eval.num_workers=0$",
        ),
        (
            {"queue": {"samplers": {"rolout": "oldest"}}},
            "queue.samplers.rolout: this run has no task 'rolout': its tasks are rollout, train, eval$",
        ),
        ({"queue": {"samplers": {"values": "oldest"}}}, "has no task 'values': its tasks are rollout, train, eval$"),
        ({"queue": {"samplers": {"train": "fifo"}}}, "queue.samplers.train: sampler 'fifo' is not known; choose one of oldest, "),
        ({"queue": {"samplers": {"train": {"name": "token_balanced", "ranks": 2}}}}, "queue.samplers.train: .* stand still$"),
        ({"queue": {"samplers": {"train": {"name": "token_balanced", "ranks": 0}}}}, "queue.samplers.train: .*: 0 ranks"),
        ({"queue": {"samplers": {"train": {"name": "oldest", "x": 1}}}}, "sampler 'oldest' has no option 'x'"),
        ({"queue": {"samplers": {"rollout": "whole_groups"}}}, "queue.samplers.rollout: .*'rollout', which may split groups"),
    ],
)
def test_an_unknown_choice_lists_the_known_ones(tree: dict[str, Any], sentence: str) -> None:
    config = parse({**NEEDED, **tree})
    with pytest.raises(UserError, match=sentence):
        check_choices(config)
    check_choices(parse(NEEDED))
    check_choices(parse({**NEEDED, "reward": {"scorer": {"path": "my_file.py:Mine"}}}))


@pytest.mark.parametrize(
    ("written", "name", "options"),
    [
        ("network", "network", {}),
        ({"name": "network", "dtype": "bfloat16"}, "network", {}),
        ({"path": "f.py:Mine", "options": {"every": 3}, "dtype": "bfloat16"}, "f.py:Mine", {"every": 3}),
        ({"name": "mine", "options": {"every": 3}}, "mine", {"every": 3}),
        ({}, "shared_memory", {}),
    ],
)
def test_a_weight_sync_is_a_name_or_a_path_beside_the_sections_own_keys(written: Any, name: str, options: dict[str, Any]) -> None:
    config = parse({**NEEDED, "weight_sync": written})
    assert (config.weight_sync.name, config.weight_sync.options) == (name, options)
    assert parse_dumped(dump(config)) == config
    tree = {**NEEDED, "weight_sync": written}
    for override in ("weight_sync.deadline_seconds=5", "weight_sync.options.every=4"):
        apply_override(tree, override)
    changed = parse(tree).weight_sync
    assert (changed.name, changed.options, changed.deadline_seconds) == (name, {"every": 4}, 5)


OWN_SYNC = """
from asyncflow.weight_sync.base import WeightSyncFacts
class Plain:
    def __init__(self, options): ...
    def sender(self, incarnation): ...
    def receiver(self, name): ...
class Doors(Plain): facts = WeightSyncFacts(has_door=True)
class Keys(Plain): facts = WeightSyncFacts(needs_key=True)
class Broadcast(Plain): facts = WeightSyncFacts(is_broadcast=True)
class Wrong(Plain): facts = {"has_door": True}
class OneEnd:
    def sender(self, incarnation): ...
"""


def test_what_the_driver_must_know_of_a_weight_sync_is_asked_of_its_class(tmp_path: Path) -> None:
    (tmp_path / "syncs.py").write_text(OWN_SYNC)

    def config(name: str, listen: str | None = None, evaluators: int = 0) -> Config:
        own = {"path": f"{tmp_path / 'syncs.py'}:{name}", "listen": listen}
        return parse({**NEEDED, "weight_sync": own, "eval": {"num_workers": evaluators, "path": "d" if evaluators else None}})

    for name, listen, evaluators in (("Plain", None, 1), ("Doors", "tls:h:1", 1), ("Keys", None, 1), ("Broadcast", None, 0)):
        check_choices(config(name, listen, evaluators))
    for name, listen, evaluators, sentence in (
        ("Plain", "tls:h:1", 0, "weight_sync.listen=tls:h:1: no process connects to it when weights travel by .*syncs.py:Plain"),
        ("Broadcast", None, 1, "syncs.py:Broadcast broadcasts each version"),
        ("Wrong", None, 0, "has {'has_door': True} as its facts, which are no WeightSyncFacts: asyncflow/weight_sync/base.py says"),
        ("OneEnd", None, 0, "has no 'receiver': asyncflow/weight_sync/base.py says what is needed"),
    ):
        with pytest.raises(UserError, match=sentence):
            check_choices(config(name, listen, evaluators))
    assert [weights_need_key(config(name)) for name in ("Plain", "Doors", "Keys")] == [False, False, True]
    assert weights_need_key(config("Doors", "tls:h:1"))
    built_in = {name: weights_need_key(parse({**NEEDED, "weight_sync": name})) for name in WEIGHT_SYNCS}
    assert built_in == {"shared_memory": False, "collective": False, "network": True}
    assert WEIGHT_SYNC_FACTS.keys() == WEIGHT_SYNCS.keys()


def test_each_task_of_the_queue_has_the_sampler_that_was_chosen_for_it() -> None:
    samplers = {"train": {"name": "token_balanced", "ranks": 1, "window": 8}, "evaluate": "shortest_queue"}
    config = parse({**NEEDED, "queue": {"samplers": samplers}, "eval": {"num_workers": 1, "path": "d"}})
    check_choices(config)
    assert parse_dumped(dump(config)) == config
    chosen = {task.name: (task.sampler, task.sampler_options) for task in queue_schema(config).tasks}
    assert chosen == {
        "rollout": ("oldest", {}),
        "train": ("token_balanced", {"ranks": 1, "window": 8}),
        "eval": ("whole_groups", {}),
        "evaluate": ("shortest_queue", {}),
    }
    train = queue_schema(config).task("train")
    assert (train.lease_seconds, train.whole_groups, train.topic) == (120.0, True, "train"), "and is otherwise as it was"


def test_staleness_is_corrected_unless_told_otherwise(tmp_path: Path) -> None:
    (tmp_path / "stale.py").write_text(
        "from asyncflow.control.modes import Periodic\n"
        "class Stale(Periodic):\n"
        "    def __init__(self, *, max_staleness):\n"
        "        self.max_staleness = max_staleness\n"
    )
    own = {"path": "asyncflow.algorithms.grpo:GRPO"}  # what is not chosen by name says itself what it does

    def correction(max_staleness: int, algorithm: Any = "grpo", old: str = "current") -> str:
        schedule = {"path": f"{tmp_path / 'stale.py'}:Stale", "max_staleness": max_staleness}
        return make_algorithm(parse({**NEEDED, "schedule": schedule, "algorithm": algorithm, "train": {"old": old}})).correction

    assert make_algorithm(parse(NEEDED)).correction == correction(0) == correction(1, old="rollout") == "none"
    assert correction(1) == correction(3) == correction(1, {**own, "correction": "decoupled"}) == "decoupled"
    assert correction(1, {"name": "grpo", "correction": "masked"}) == "masked"
    for wrong in ({"name": "grpo", "correction": "none"}, own):
        with pytest.raises(UserError, match=r"staleness up to 1, train\.old=current is the policy that sampled up to 0 only"):
            correction(1, wrong)


def test_overrides_win_over_the_file_and_are_yaml(tmp_path: Path) -> None:
    path = write(tmp_path, "model: {path: m}\ndata: {path: d}\ntrain: {learning_rate: 1e-5}\nrollout:\nalgorithm: grpo\n")
    overrides = [
        "run.steps=7",
        "train.learning_rate=3e-4",
        "rollout.group_size=4",
        "telemetry.trackers=[]",
        "reward.scorer.require_end=false",
        "algorithm.clip_low=1e-2",
        "eval.path=null",
        "data.prompt_template='{a}={b}'",
    ]
    config = load(path, overrides)
    assert (config.run.steps, config.train.learning_rate, config.rollout.group_size) == (7, 3e-4, 4)
    assert config.telemetry.trackers == () and config.eval.path is None and config.data.prompt_template == "{a}={b}"
    assert config.reward.scorer == Choice(name="final_answer", options={"require_end": False})
    assert config.algorithm == Choice(name="grpo", options={"clip_low": 0.01})
    assert load(path, overrides[2:3]).train.learning_rate == 1e-5


@pytest.mark.parametrize(
    ("override", "sentence"),
    [
        ("run.steps", "'run.steps' is not of the form key.path=value"),
        ("=3", "not of the form"),
        ("data.limit.x=3", "'limit' has no keys below it"),
        ("run.steps=[1", "the value is not YAML"),
        ("run.stepz=1", "unknown key 'run.stepz': did you mean 'steps'?"),
    ],
)
def test_an_override_that_says_nothing_sensible_is_refused(tmp_path: Path, override: str, sentence: str) -> None:
    path = write(tmp_path, "model: {path: m}\ndata: {path: d, limit: 3}\n")
    with pytest.raises(UserError, match=sentence):
        load(path, [override])


def test_an_override_reaches_below_a_choice_that_was_dumped() -> None:
    tree: dict[str, Any] = {**NEEDED, "reward": {"scorer": {"name": "final_answer", "options": {"answer_column": "a"}}}}
    apply_override(tree, "reward.scorer.require_end=false")
    assert parse(tree).reward.scorer.options == {"answer_column": "a", "require_end": False}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (None, "cannot be read: No such file"),
        ("a: [1", "is not YAML"),
        ("- 1", "holds no sections"),
        ("", "holds no sections"),
        ("model: !!python/object/apply:os.getcwd []", "is not YAML"),
    ],
)
def test_a_file_that_is_no_configuration_is_refused(tmp_path: Path, text: str | None, sentence: str) -> None:
    path = tmp_path / "absent.yaml" if text is None else write(tmp_path, text)
    with pytest.raises(UserError, match=sentence) as caught:
        load(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)


def test_a_shortage_of_file_handles_is_no_mistake_of_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that reads the configuration is started again."""

    def short(path: Path, encoding: str) -> str:
        raise OSError(errno.EMFILE, "Too many open files", str(path))

    monkeypatch.setattr(Path, "read_text", short)
    with pytest.raises(RunError, match="cannot be read: Too many open files"):
        load(tmp_path / "config.yaml")


def test_what_is_dumped_loads_as_the_same(tmp_path: Path) -> None:
    config = parse(
        {
            **NEEDED,
            "run": {"seed": 3, "dir": "/x/y", "steps": 9},
            "train": {"learning_rate": 1e-6, "betas": [0.8, 0.99], "responses_per_micro_batch": 4},
            "reward": {"scorer": {"path": "f.py:Mine", "threshold": 1e-7, "names": ["a", "1e3"]}},
            "schedule": "synchronous",
            "telemetry": {"trackers": ["wandb"]},
        }
    )
    again = load(write(tmp_path, dump(config)))
    assert again == config
    assert again.run_dir == Path("/x/y/run")


def test_the_shipped_recipes_load() -> None:
    recipes = sorted((Path(__file__).parents[2] / "recipes").glob("*.yaml"))
    assert recipes
    for recipe in recipes:
        check_choices(load(recipe))


def test_the_configuration_cannot_be_changed() -> None:
    config = parse(NEEDED)
    with pytest.raises(ValidationError):
        config.run.steps = 3


def keys(section: type[BaseModel]) -> list[str]:
    """Dotted names of all keys below a section."""
    names: list[str] = []
    for name, field in section.model_fields.items():
        kind = field.annotation
        below = keys(kind) if isinstance(kind, type) and issubclass(kind, BaseModel) and kind is not Choice else []
        names += [f"{name}.{key}" for key in below] if below else [name]
    return names


def test_there_are_few_keys() -> None:
    assert 40 < len(keys(Config)) <= 152
    assert "reward.scorer" in keys(Config)


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        ({"mini_batches": 3, "old": "rollout"}, r"32 = 10 x 3 \+ 2; take one of 1, 2, 4, 8, 16, 32"),
        ({"mini_batches": 2}, r"2 updates a step.*train.old=current is not the policy that the step began with"),
        ({"epochs": 2, "old": "previous"}, "train.old=previous is not the policy that the step began with"),
    ],
)
def test_several_updates_a_step_need_equal_parts_and_a_fixed_old_policy(train: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        parse({**NEEDED, "train": train})
    for old in ("step_start", "rollout"):
        assert parse({**NEEDED, "train": {"epochs": 2, "mini_batches": 4, "old": old}}).train.epochs == 2


def test_every_rank_has_a_group_of_each_mini_batch() -> None:
    tree = {**NEEDED, "plan": {"train": {"dp": 4}}, "train": {"prompts_per_step": 8, "mini_batches": 4, "old": "rollout"}}
    with pytest.raises(UserError, match="nothing to share in a mini-batch of 2 prompts"):
        parse(tree)


@pytest.mark.parametrize(
    ("tree", "sentence"),
    [
        ({"schedule": {"name": "bounded", "membership": "first_come"}}, "first_come has groups change their steps"),
        ({"train": {"critic": {"path": "/no/such/model"}}}, "train.critic.path '/no/such/model' is no folder with a model"),
        ({"algorithm": {"name": "ppo", "kl_coefficient": 0.1}}, "set train.reference=task"),
    ],
)
def test_what_a_critic_cannot_be_trained_with_is_refused(tree: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        check_choices(parse({**NEEDED, "algorithm": "ppo", **tree}))


def test_values_without_a_critic_have_no_workers() -> None:
    sentence = "plan.values.num_workers=2, but the algorithm grpo has no critic whose values they could compute: take one that has"
    with pytest.raises(UserError, match=sentence):
        check_choices(parse({**NEEDED, "plan": {"values": {"num_workers": 2}}}))
    check_choices(parse({**NEEDED, "algorithm": "ppo", "plan": {"values": {"num_workers": 2}}}))


OWN = """
from asyncflow.algorithms.base import Algorithm, Critic
class Plain:
    normaliser = "tokens"
    def advantages(self, group): return group.rewards
    def loss(self, batch): ...
class Least(Plain):
    needs_reference, correction, is_token_local = False, "none", True
class Waits(Least):
    waits_for_batch = True
    def statistics(self, group, advantages): return (1.0,)
class Half(Least, Algorithm):
    def __init__(self): self.waits_for_batch = True
    def statistics(self, group, advantages): return (1.0,)
class Lossless(Algorithm):
    normaliser, needs_reference, correction, is_token_local = "tokens", False, "none", True
    def advantages(self, group): return group.rewards
class Judged(Least):
    def __init__(self): self.critic = Plain()
class Unjudged(Least):
    class critic(Critic):
        normaliser = "tokens"
        def loss(self, batch): ...
    critic = critic()
class Nothing(Least):
    critic = object()
class Whole(Waits):
    def normalised(self, advantages, sums): return advantages
"""


@pytest.mark.parametrize(
    ("name", "lacks"),
    [
        ("Plain", "has no 'needs_reference'"),
        ("Waits", "Waits has no 'normalised', which waits_for_batch needs"),
        ("Half", "has no 'normalised', which waits_for_batch needs"),
        ("Lossless", "has no 'loss'"),
        ("Unjudged", "the critic of the algorithm .*Unjudged has no 'advantages'"),
        ("Nothing", "the critic of the algorithm .*Nothing has no 'normaliser'"),
    ],
)
def test_what_an_algorithm_of_ones_own_lacks_is_named(tmp_path: Path, name: str, lacks: str) -> None:
    (tmp_path / "own.py").write_text(OWN)
    with pytest.raises(UserError, match=lacks + ".*: asyncflow/algorithms/base.py says what is needed"):
        make_algorithm(parse({**NEEDED, "algorithm": {"path": f"{tmp_path / 'own.py'}:{name}"}}))


def test_what_an_algorithm_of_ones_own_may_leave_out_is_filled_in(tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN)
    least, judged, whole = (
        make_algorithm(parse({**NEEDED, "algorithm": {"path": f"{tmp_path / 'own.py'}:{name}"}}))
        for name in ("Least", "Judged", "Whole")
    )
    assert (least.critic, least.waits_for_batch, least.needs_reference_ahead, least.held_steps) == (None, False, False, 0)
    assert judged.critic is not None and judged.critic.waits_for_batch is False and not hasattr(judged.critic, "held_steps")
    assert whole.waits_for_batch


def test_a_critic_is_trained_as_the_policy_but_for_what_it_says() -> None:
    train = {"critic": {"learning_rate": 0.5, "warmup_steps": 3}, "learning_rate": 0.1, "old": "step_start", "accumulate": "exact"}
    config = parse({**NEEDED, "algorithm": "ppo", "train": train, "plan": {"train": {"dp": 2}}})
    options = critic_options(config)
    assert (options.learning_rate, options.warmup_steps, options.layout.size) == (0.5, 3, 1)
    assert (options.old, options.has_reference, options.accumulate) == ("current", False, "exact")
    assert num_devices(config) == 1 + 2 + 1 and tasks_before_training(config) == ("rollout", "values")


def test_rewards_are_one_scorer_or_several_and_perhaps_a_model() -> None:
    assert parse(NEEDED).reward.names == ["scorer"] and not parse(NEEDED).reward.has_parts
    several = {"scorers": {"a": {"scorer": "numeric"}, "b": {"scorer": {"name": "regex", "pattern": "x"}, "weight": -0.5}}}
    judged = {**several, "model": {"path": "judge"}, "place": "task"}
    config = parse({**NEEDED, "reward": judged})
    assert config.reward.names == ["a", "b", "model"] and config.reward.has_parts and config.reward.scorer is None
    assert config.reward.parts["b"].weight == -0.5 and config.reward.parts["b"].scorer.options == {"pattern": "x"}
    assert parse_dumped(dump(config)) == config
    alone = parse({**NEEDED, "reward": {"model": {"path": "judge"}, "place": "task"}})
    assert alone.reward.names == ["model"] and not alone.reward.parts and parse_dumped(dump(alone)) == alone
    assert parse({**NEEDED, "reward": {"value_on_failure": 0.0}}).reward.has_parts
    for reward, words in (
        ({**several, "scorer": "numeric"}, "scorer and scorers both say what scores"),
        ({"scorer": None}, "nothing scores"),
        ({"model": {"path": "judge"}}, "set reward.place=task"),
        ({"scorers": {"mean": {"scorer": "numeric"}}}, "the name 'mean' is taken"),
        ({"scorers": {"model": {"scorer": "numeric"}}, "model": {"path": "j"}, "place": "task"}, "the name 'model' is taken"),
        ({"model": {"path": "j", "template": "{prompt}"}, "place": "task"}, "must hold {response} once"),
        ({"scorers": {"a": {"scorer": "numeric", "weight": math.inf}}}, "weight"),
        ({"max_failed_fraction": 1.5}, "max_failed_fraction"),
    ):
        with pytest.raises(UserError, match=re.escape(words)):
            parse({**NEEDED, "reward": reward})


def test_seeds_of_data_and_noise_are_the_runs_unless_they_are_given() -> None:
    config = parse({**NEEDED, "run": {"seed": 3}})
    assert (config.data_seed, config.sampling_seed) == (3, 3)
    config = parse({**NEEDED, "run": {"seed": 3}, "data": {"path": "d", "seed": 0}, "rollout": {"seed": 5}})
    assert (config.data_seed, config.sampling_seed, shape_of(config).seed) == (0, 5, 5)


def test_a_falling_learning_rate_ends_with_the_last_update_of_each_model() -> None:
    train = {"learning_rate": 1e-4, "min_learning_rate": 1e-5, "epochs": 2, "old": "step_start", "critic": {"learning_rate": 1e-3}}
    config = parse(
        {**NEEDED, "run": {"steps": 10}, "algorithm": {"name": "ppo", "held_steps": 3}, "train": {**train, "reference": "task"}}
    )
    policy, critic = train_engine_options(config), critic_options(config)
    assert (policy.num_updates, critic.num_updates) == (14, 20)
    assert critic.min_learning_rate == pytest.approx(1e-4)


@pytest.mark.parametrize(
    ("train", "width", "expected"),
    [
        ({}, 576, PASS_TOKENS_CPU),
        ({}, 4096, PASS_TOKENS_CPU),
        ({}, 128, 2 * PASS_TOKENS_CPU),
        ({"accumulate": "exact"}, 576, PASS_TOKENS_CPU),
        ({"device": "cuda"}, 128, PASS_TOKENS),
        ({"device": "cuda", "accumulate": "exact"}, 128, None),
        ({"responses_per_micro_batch": 1}, 576, None),
        ({"engine": "deepspeed"}, 576, PASS_TOKENS_CPU),
        ({"engine": "megatron", "device": "cuda"}, 576, PASS_TOKENS),
        ({"engine": {"path": "my_engine.py:Engine"}}, 576, None),
        ({"engine": "outside"}, 576, None),
        ({"tokens_per_micro_batch": 77, "responses_per_micro_batch": 1}, 576, 77),
        ({"tokens_per_micro_batch": None}, 576, None),
    ],
)
def test_the_tokens_of_a_pass_go_by_the_models_width_and_the_device(
    train: dict[str, Any], width: int, expected: int | None
) -> None:
    fields = {"hidden_size": width}
    config = parse({**NEEDED, "train": {"helpers": 0, **train}})
    assert tokens_per_pass(config, fields) == update_plan(config, fields).tokens_per_round == expected
    assert train_engine_options(config, fields).tokens_per_pass == expected
    is_told = expected is not None and "tokens_per_micro_batch" not in train
    assert pass_note(config, fields).startswith(f"training passes take up to {expected:,} packed tokens") if is_told else True
    assert is_told or not pass_note(config, fields)
    note = pass_note(config, {**fields, "model_type": "gemma3_text"})
    is_alone = expected is not None and config.train.accumulate == "exact"
    assert note.startswith("training passes have one micro-batch each") if is_alone else note == pass_note(config, fields)
    assert pass_note(config, {**fields, "model_type": "qwen2"}) == pass_note(config, fields)


@pytest.mark.parametrize(
    ("accumulate", "layout", "expected"),
    [
        ("fp32", {"dp": 2}, PASS_TOKENS_CPU),
        ("exact", {"dp": 2}, PASS_TOKENS_CPU),
        ("exact", {"tp": 2}, PASS_TOKENS_CPU),
        ("fp32", {"pp": 2}, PASS_TOKENS_CPU),
        ("exact", {"pp": 2}, PASS_TOKENS_CPU),
        ("exact", {"pp": 2, "tp": 2}, PASS_TOKENS_CPU),
    ],
)
def test_the_tokens_of_a_pass_go_by_the_layout(accumulate: str, layout: dict[str, int], expected: int | None) -> None:
    config = parse({**NEEDED, "train": {"accumulate": accumulate}, "plan": {"train": layout}})
    assert tokens_per_pass(config, {"hidden_size": 576}) == expected


def test_a_pipelines_round_has_tokens_for_all_its_passes() -> None:
    train = {"tokens_per_micro_batch": 100, "pipeline_micro_batches": 3}
    plan = update_plan(parse({**NEEDED, "train": train, "plan": {"train": {"pp": 2}}}), {})
    assert (plan.groups_per_round, plan.tokens_per_round) == (3, 300)


def test_rows_without_advantages_are_left_out_unless_a_process_from_outside_trains() -> None:
    for train, expected in (
        ({}, True),
        ({"engine": "outside"}, False),
        ({"engine": "outside", "skip_zero_advantages": True}, True),
    ):
        assert shape_of(parse({**NEEDED, "train": train})).skips_zero_advantages is expected
    assert not shape_of(parse({**NEEDED, "train": {"skip_zero_advantages": False}})).skips_zero_advantages


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, True),
        ({"train": {"skip_zero_advantages": False}}, False),
        ({"algorithm": {"name": "grpo", "kl_coefficient": 0.1}}, False),
        ({"algorithm": {"name": "rloo", "kl_coefficient": 0.1, "kl_place": "reward"}, "train": {"reference": "task"}}, False),
        ({"algorithm": "ppo"}, False),
    ],
)
def test_equal_rewards_are_left_out_where_advantages_are_of_rewards_alone(changes: dict[str, Any], expected: bool) -> None:
    assert leaves_out_equal_rewards(parse({**NEEDED, **changes})) is expected


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 5}, {"min_p": 0.1}])
def test_truncated_sampling_is_corrected_for_unless_the_ratio_does_it(cut: dict[str, float]) -> None:
    for old, schedule, correction in (
        ("current", "periodic", "truncated"),
        ("rollout", "periodic", "none"),
        ("current", "delayed", "decoupled"),
    ):
        tree = {**NEEDED, "rollout": cut, "train": {"old": old}, "schedule": schedule}
        assert make_algorithm(parse(tree)).correction == correction
    with pytest.raises(UserError, match=r"drawn from a part of the policy's distribution.*take correction=truncated"):
        make_algorithm(parse({**NEEDED, "rollout": cut, "algorithm": {"name": "grpo", "correction": "none"}}))


@pytest.mark.parametrize("task", ["reward", "reference", "values"])
def test_a_task_on_one_device_a_worker_is_not_cut(task: str) -> None:
    with pytest.raises(UserError, match=rf"^plan.{task}: tp shards a model over devices, .* take num_workers$"):
        parse({**NEEDED, "plan": {task: {"num_workers": 2, "tp": 2}}})


def test_an_environment_scores_alone_unless_something_else_is_named() -> None:
    alone = parse({**NEEDED, "environment": "my_file.py:Game"})
    assert alone.reward.names == ["environment"] and alone.reward.weights == {"environment": 1.0}
    assert (alone.episodes_at_once, alone.num_parked) == (2 * alone.rollout.num_slots, alone.rollout.num_slots)
    both = parse({**NEEDED, "environment": "my_file.py:Game", "reward": {"scorer": "maths", "environment": 0.5}})
    assert both.reward.weights == {"scorer": 1.0, "environment": 0.5} and both.reward.has_parts
    assert parse_dumped(dump(both)) == both and parse_dumped(dump(alone)) == alone
    assert parse(NEEDED).reward.names == ["scorer"] and parse(NEEDED).num_parked == 0


@pytest.mark.parametrize("given", [{"reward": {"environment": 1.0}}, {"episodes": {"max_turns": 3}}])
def test_episodes_without_an_environment_are_refused(given: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="are for a run with an environment"):
        parse({**NEEDED, **given})


def test_credit_by_turn_needs_an_environment() -> None:
    tree = {**NEEDED, "algorithm": {"name": "grpo", "credit": "turn"}}
    with pytest.raises(UserError, match="there is no environment to give any"):
        check_choices(parse(tree))
    check_choices(parse({**tree, "environment": "my_file.py:Game"}))


def test_a_path_that_is_null_switches_evaluation_off() -> None:
    """Of a recipe that has one: `eval.path=null` is enough."""
    assert parse({**NEEDED, "eval": {"path": None, "every_steps": 3}}).eval.path is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"schedule": "sub_step", "rollout": {"num_workers": 1}}, "set rollout.num_workers=2 or more"),
        ({"schedule": "sub_step", "rollout": {"num_workers": 2}}, ""),
        ({"weight_sync": "network", "rollout": {"dtype": "bfloat16"}}, "with weight_sync.dtype=bfloat16 most of a version"),
        ({"weight_sync": {"name": "network", "dtype": "bfloat16"}, "rollout": {"dtype": "bfloat16"}}, ""),
        ({"weight_sync": "network"}, ""),
        ({"train": {"num_threads": "auto"}}, ""),
        (
            {"train": {"num_threads": "auto", "device": "cuda"}},
            "train.num_threads=auto deals out cores, and its engines compute on cuda",
        ),
        ({"train": {"num_threads": "auto", "accumulate": "exact"}}, "train.num_threads=auto changes bits"),
        ({"rollout": {"num_threads": "auto"}, "train": {"accumulate": "exact"}}, ""),
        ({"rollout": {"num_threads": "auto"}, "cluster": "ray"}, "rollout.num_threads=auto deals out the cores of one machine"),
    ],
)
def test_what_works_and_does_not_what_it_is_for_is_told(changes: dict[str, Any], words: str) -> None:
    said = "\n".join(advice(parse({**NEEDED, **changes})))
    assert words in said and bool(said) == bool(words)
