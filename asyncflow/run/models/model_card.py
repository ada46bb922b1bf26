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
from asyncflow.run.models.model_source import HubName, Log, is_made, run_module
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
    options, pushed = ["--private"] if config.model.private else [], folder
    try:
        pushed = await _pushed(config, folder)
        if config.lora is not None and not (pushed / ADAPTER_CONFIG).is_file():
            (pushed / CARD_FILE).write_text(model_card(config, rows, evaluations, is_merged=True), encoding="utf-8")
        url = (await run_module("asyncflow.run.models.hub_push", log, str(pushed), name, *options))[-1]
    except (UserError, RunError, OSError) as error:
        command = shlex.join(["hf", "upload", name, str(pushed), *options])
        log(f"the model could not be pushed to the Hugging Face Hub: {error}; it is in {folder}, and to push it: {command}")
        return
    log(f"the model is at {url}")
    if pushed != folder:
        shutil.rmtree(pushed)


async def _pushed(config: Config, folder: Path) -> Path:
    """Folder as others get it. An adapter's is another one: its base has the Hub's name in it, not this machine's. Where the run
    has made that base (of a GGUF file, of a model of several modalities, of random numbers), the two go merged: nobody else has
    it, and the modules of what it was made of have other names."""
    settings, base = read_json(folder / ADAPTER_CONFIG), HubName.of(config.model.path)
    if not settings:
        return folder
    found, pushed = Path(str(settings["base_model_name_or_path"])), folder.with_name(f"{folder.name}-to-push")
    shutil.rmtree(pushed, ignore_errors=True)
    if base is not None and found.parent.name == "snapshots":  # of huggingface_hub's cache, by its commit
        settings |= {"base_model_name_or_path": base.repo, "revision": found.name}
        shutil.copytree(folder, pushed)
        (pushed / ADAPTER_CONFIG).write_text(json.dumps(settings, indent=2), encoding="utf-8")
    elif is_made(config.model.path):
        await run_module("asyncflow.run.models.merged_model", lambda line: None, str(found), str(folder), str(pushed))
    else:
        return folder
    return pushed


def model_card(
    config: Config, rows: Mapping[int, Mapping[str, float]], evaluations: Sequence[EvaluationRow], *, is_merged: bool = False
) -> str:
    """Markdown with the Hub's header: what was trained, on what, how, and what came of it. `rows`: metrics by step. `is_merged`:
    the model is whole, with the adapter that was trained merged into its base."""
    path, data = config.model.path, config.data.path or "prompts that came over the wire"
    base, title = HubName.of(path), config.model.push_to_hub or config.run.name
    lora = config.model.lora
    library = "transformers" if lora is None or is_merged else "peft"
    header: dict[str, Any] = {"library_name": library, "pipeline_tag": "text-generation"}
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
        of_what = f"An adapter of {'(merged into it) ' if is_merged else ''}"
        adapter = [f"| adapter | rank {lora.rank}, alpha {lora.alpha:g}, of {targets} |"]
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
