"""`asyncflow eval`: how good a model is on held-out problems, by any rollout engine."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from asyncflow.cli.display import Display
from asyncflow.config import Config, TrainConfig, parse
from asyncflow.data.datasets import GENERATED, has_parts
from asyncflow.rows import ANSWER
from asyncflow.settings import apply_override, read_yaml, refuse_overrides
from asyncflow.threads import run_ready
from asyncflow.types import RunError, UserError

if TYPE_CHECKING:
    from asyncflow.run.job import Job

GENERATED_PROMPTS = 256
KEPT_SAMPLES = 100
GIVEN = ("run.name", "run.dir", "model.path", "data.path", "eval.path", "eval.num_workers")
"""Keys that overrides may not set."""


def evaluate(
    model: Annotated[str, typer.Argument(help="What model.path takes: a folder such as runs/quickstart/model, a name on the Hub.")],
    data: Annotated[str, typer.Argument(help="What data.path takes: a file, a folder, a name on the Hub, generated:arithmetic.")],
    overrides: Annotated[list[str] | None, typer.Argument(help="key.path=value of a run's configuration.")] = None,
    config: Annotated[Path | None, typer.Option(help="Take everything else from this run's YAML file.")] = None,
    samples: Annotated[int | None, typer.Option(min=1, help="Sampled responses per prompt: the n of mean@n and pass@n.")] = None,
    prompts: Annotated[int | None, typer.Option(min=1, help="Use only so many prompts, from the first on.")] = None,
    temperature: Annotated[float | None, typer.Option(help="Of the sampled responses.")] = None,
    engine: Annotated[
        str | None, typer.Option(help="The rollout engine, such as vllm; its options by rollout.engine.key=value.")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Write evaluation.json and evaluation.html into this folder.")] = None,
) -> None:
    """pass@1, pass@k and mean@n with confidence intervals, response lengths and truncation, of sampled and of greedy responses."""
    given: dict[str, Any] = {
        "eval.samples_per_prompt": samples,
        "eval.num_prompts": prompts,
        "rollout.temperature": temperature,
    }
    if out is not None:
        _make_folder(out)
    with tempfile.TemporaryDirectory(prefix="asyncflow-eval-") as scratch:
        chosen = {key: value for key, value in given.items() if value is not None}
        resolved = _config(model, data, overrides or [], config, scratch, chosen, engine)
        raise typer.Exit(0 if run_ready(_evaluate(resolved, out)) else 130)


def _config(
    model: str, data: str, overrides: list[str], config: Path | None, scratch: str, given: Mapping[str, Any], engine: str | None
) -> Config:
    """Configuration of a run without steps: its first evaluation is all of it. Keys of training decide nothing."""
    tree: dict[str, Any] = read_yaml(config) if config is not None else {}
    if config is None:  # all of a data set, unless it has no end
        tree["eval"] = {"num_prompts": GENERATED_PROMPTS if data.startswith(GENERATED) else None}
    tree["data"] = {key: value for key, value in (tree.get("data") or {}).items() if key != "split"}  # that is training's
    if not has_parts(data):  # those that the file names are of its own data set
        for section in ("data", "eval"):
            tree[section] = {key: value for key, value in (tree.get(section) or {}).items() if key not in ("split", "subset")}
    tree["telemetry"] = {"trackers": [], "samples_per_step": KEPT_SAMPLES}
    if engine is not None:
        _choose_engine(tree, engine)
    refuse_overrides(overrides, GIVEN, "{key} is given by the command's own arguments")
    refuse_overrides(overrides, given, "an option of the command says {key}, too: take one of them")
    for override in overrides:
        apply_override(tree, override)
    own: dict[str, Any] = {"run.name": "eval", "run.dir": scratch, "model.path": model, "data.path": data, "eval.path": data}
    own["eval.num_workers"] = 0  # the rollout workers have nothing else to do
    for key, value in {**given, **own}.items():
        section, _, name = key.partition(".")
        tree[section] = {**(tree.get(section) or {}), name: value}
    _without_training(tree)
    split = tree["eval"].get("split") or tree["data"].get("split") or "test"
    tree["data"], tree["eval"] = {**tree["data"], "split": split}, {**tree["eval"], "split": split}
    parsed = parse(tree)
    if not parsed.rollout.num_workers:
        raise UserError("rollout.num_workers: must be more than 0: an evaluation generates itself")
    return parsed


def _make_folder(out: Path) -> None:
    """Make the folder of the results before hours are spent on them. Raises `UserError`."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out {out} is no folder, and cannot be made: {error.strerror}") from error
    if not os.access(out, os.W_OK | os.X_OK):
        raise UserError(f"--out {out} is a folder in which nothing may be written")


def _without_training(tree: dict[str, Any]) -> None:
    """Configuration without training's own keys, so that their rules need not hold. A worker takes as many prompts at once as a
    step has, so a step has one for each worker at least."""
    train, rollout = tree.get("train") or {}, dict(tree.get("rollout") or {})
    workers, prompts = rollout.get("num_workers", 1), train.get("prompts_per_step", TrainConfig().prompts_per_step)
    for section in ("algorithm", "schedule", "train", "plan", "checkpoint"):
        tree.pop(section, None)
    if isinstance(workers, int) and isinstance(prompts, int) and workers > 0:
        tree["train"] = {"prompts_per_step": max(prompts, workers)}
    if rollout.get("group_size") == 1:
        rollout.pop("group_size")
    tree["rollout"] = rollout
    apply_override(tree, "weight_sync.min_healthy_workers=1")
    if isinstance(queue := tree.get("queue"), dict):
        queue.pop("samplers", None)  # of tasks that are not there, perhaps


def _choose_engine(tree: dict[str, Any], engine: str) -> None:
    """Choose an engine by name; options of another engine in the configuration are left out."""
    rollout = dict(tree.get("rollout") or {})
    before = rollout.get("engine")
    is_same = isinstance(before, Mapping) and before.get("name") == engine
    rollout["engine"] = before if is_same else {"name": engine}
    tree["rollout"] = rollout


async def _evaluate(config: Config, out: Path | None) -> bool:
    from asyncflow.run.job import Job, run_with_signals
    from asyncflow.telemetry.evaluation import lines_of, result_of, write_evaluation

    with Display("eval", 1, is_training=False) as display:
        job = Job(config, display, evaluate_only=True)
        is_finished = await run_with_signals(job, job.run())
    if not is_finished:
        return False
    if not job.responses:
        raise RunError(f"no response was scored ({_count_unscored(job)} could not be): the messages above say why; mend the scorer")
    samples = list(_samples(config, job.prepared.held_out, len(job.prepared.held_out)))
    result = result_of(config.model.path, config.data.path or "", _settings(config), job.evaluations[-1], job.responses, samples)
    for line in lines_of(result):
        print(line)
    for path in write_evaluation(out, result, correct_from=config.eval.correct_from) if out is not None else ():
        print(f"  {path}")
    held_out, most = config.eval, config.reward.max_failed_fraction
    unscored, total = _count_unscored(job), len(job.prepared.held_out) * (held_out.samples_per_prompt + held_out.greedy)
    if unscored > most * total:
        raise RunError(
            f"{unscored} of {total} responses could not be scored, more than reward.max_failed_fraction={most:g}, so these figures "
            f"say little: mend the scorer (the messages above say what failed), or raise that"
        )
    return True


def _count_unscored(job: Job) -> int:
    return int(sum(value for name, value in job.evaluations[-1].items() if name.startswith("unscored/")))


def _settings(config: Config) -> dict[str, Any]:
    """Settings on which the figures depend, apart from the model and the data."""
    rollout, held_out, data = config.rollout, config.eval, config.data
    return {
        "engine": rollout.engine.name,
        "split": held_out.split,
        "temperature": rollout.temperature,
        **{name: getattr(rollout, name) for name in ("top_p", "top_k", "min_p") if rollout.is_truncated},
        **({"stop": ", ".join(map(repr, rollout.stop))} if rollout.stop else {}),
        "samples per prompt": held_out.samples_per_prompt,
        "max_new_tokens": rollout.max_new_tokens,
        "dtype": rollout.dtype,
        "seed": config.sampling_seed,
        "scorer": ", ".join(part.scorer.name for part in config.reward.parts.values()) or ", ".join(config.reward.names),
        "environment": config.environment.name if config.environment is not None else None,
        "prompt_template": data.prompt_template,
        "chat_template": data.chat_template or None,
    }


def _samples(config: Config, prompts: Sequence[Any], count: int) -> Iterator[dict[str, Any]]:
    """Kept responses, each with the number of its prompt, its kind, and the answer that it was compared with."""
    from asyncflow.loops.samples import EVALUATION_GROUPS
    from asyncflow.run.factories import shape_of
    from asyncflow.run_dir import SAMPLES_FILE
    from asyncflow.telemetry.run_reader import read_rows

    for row in sorted(read_rows(config.run_dir / SAMPLES_FILE), key=lambda row: row["row"]):
        group = row["row"] >> shape_of(config).group_bits
        kind, number = divmod(group - EVALUATION_GROUPS, count)
        kept = {name: row[name] for name in ("prompt", "response", "reward", "finish_reason")}
        answer = prompts[number].example.get(ANSWER)
        yield {"prompt_number": number, "kind": ("sampled", "greedy")[kind], "answer": answer, **kept}
