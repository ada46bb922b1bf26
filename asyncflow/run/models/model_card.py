"""Model card of a finished run, and the way of its model to the Hugging Face Hub.

configuration, metrics, evaluations --> README.md in the model's folder --> hub_push.py, a process of its own
"""

from __future__ import annotations

import importlib.metadata
import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from asyncflow.config import Config, dump
from asyncflow.engines.lora_files import CONFIG_FILE as ADAPTER_CONFIG
from asyncflow.loops.evaluation import EvaluationRow
from asyncflow.model_folder import read_json
from asyncflow.run.models.model_source import HubName, Log, run_module
from asyncflow.run_dir import RunDir
from asyncflow.types import RunError, UserError

CARD_FILE = "README.md"
_LIBRARIES = ("asyncflow-rl", "torch", "transformers")


def may_push() -> bool:
    """Whether this machine has a token of the Hub."""
    from huggingface_hub import get_token

    return get_token() is not None


async def push_model(
    config: Config, rows: Mapping[int, Mapping[str, float]], evaluations: Sequence[EvaluationRow], log: Log
) -> None:
    """Write the card of the run's final model, and send both to the Hub. A failure is told with a way out: the run is done."""
    folder, name = RunDir(config.run_dir).model, config.model.push_to_hub
    assert name is not None
    (folder / CARD_FILE).write_text(model_card(config, rows, evaluations), encoding="utf-8")
    options = ["--private"] if config.model.private else []
    pushed = _pushed(folder, HubName.of(config.model.path))
    try:
        url = (await run_module("asyncflow.run.models.hub_push", log, str(pushed), name, *options))[-1]
    except (UserError, RunError) as error:
        command = shlex.join(["hf", "upload", name, str(pushed), *options])
        log(f"the model could not be pushed to the Hugging Face Hub: {error}; it is in {folder}, and to push it: {command}")
        return
    log(f"the model is at {url}")
    if pushed != folder:
        shutil.rmtree(pushed)


def _pushed(folder: Path, base: HubName | None) -> Path:
    """Folder as others get it: an adapter's base is where it was found on the Hub, not on this machine. A copy, where it is another
    one."""
    settings = read_json(folder / ADAPTER_CONFIG)
    if not settings or base is None:
        return folder
    found = Path(str(settings["base_model_name_or_path"]))  # a snapshot of huggingface_hub's is named by its commit
    revision = found.name if found.parent.name == "snapshots" else base.revision
    settings |= {"base_model_name_or_path": base.repo, "revision": revision}
    pushed = folder.with_name(f"{folder.name}-to-push")
    shutil.rmtree(pushed, ignore_errors=True)
    shutil.copytree(folder, pushed)
    (pushed / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    return pushed


def model_card(config: Config, rows: Mapping[int, Mapping[str, float]], evaluations: Sequence[EvaluationRow]) -> str:
    """Markdown with the Hub's header: what was trained, on what, how, and what came of it. `rows`: metrics by step."""
    path, data = config.model.path, config.data.path or "prompts that came over the wire"
    base, title = HubName.of(path), config.model.push_to_hub or config.run.name
    lora = config.model.lora
    header: dict[str, Any] = {"library_name": "transformers" if lora is None else "peft", "pipeline_tag": "text-generation"}
    if base is not None:
        header["base_model"] = base.repo
    if config.data.path is not None and "/" in data and not Path(data).exists():
        header["datasets"] = [data]
    header["tags"] = ["asyncflow", "reinforcement-learning", config.algorithm.name]
    train, rollout = config.train, config.rollout
    scorers = ", ".join(part.scorer.name for part in config.reward.parts.values())
    models = [f"the reward model {config.reward.model.path}"] if config.reward.model is not None else []
    of_what, adapter = "", list[str]()
    if lora is not None:
        targets = ", ".join(lora.targets) or "all linear layers"
        of_what, adapter = "An adapter of ", [f"| adapter | rank {lora.rank}, alpha {lora.alpha:g}, of {targets} |"]
    lines = [
        f"# {title.rpartition('/')[2]}",
        "",
        f"{of_what}{_linked(path, base)}, trained with {config.algorithm.name.upper()} by AsyncFlow for {config.run.steps} steps "
        f"of {train.prompts_per_step} prompts with {rollout.group_size} responses each, schedule {config.schedule.name}.",
        "",
        "| | |",
        "|---|---|",
        f"| data | {data}{f', {config.data.subset}' if config.data.subset else ''} |",
        f"| reward | {' and '.join([*([scorers] if scorers else []), *models])} |",
        *adapter,
        f"| learning rate | {train.learning_rate:g}, {train.learning_rate_schedule}, {train.warmup_steps} updates of warm-up |",
        f"| sampling | temperature {rollout.temperature:g}, at most {rollout.max_new_tokens} tokens |",
        f"| seed | {config.run.seed} |",
    ]
    means = [rows[step]["reward/mean"] for step in sorted(rows) if "reward/mean" in rows[step]]
    if means:
        lines.append(f"| mean reward, first and last step | {means[0]:.3f}, {means[-1]:.3f} |")
    for row in evaluations:
        found = [f"{key.removeprefix('accuracy/')} {value:.3f}" for key, value in row.items() if key.startswith("accuracy/")]
        lines.append(f"| held-out accuracy after {row['step']} steps ({row['num_prompts']} prompts) | {', '.join(found)} |")
    versions = ", ".join(f"{name} {importlib.metadata.version(name)}" for name in _LIBRARIES)
    lines += ["", f"Made with {versions}. The whole configuration:", "", "```yaml", dump(config).rstrip(), "```", ""]
    return f"---\n{yaml.safe_dump(header, sort_keys=False)}---\n\n" + "\n".join(lines)


def _linked(path: str, base: HubName | None) -> str:
    if base is None:
        return Path(path).name
    return f"[{base.repo}](https://huggingface.co/{base.repo})" + (f" at {base.revision}" if base.revision else "")
