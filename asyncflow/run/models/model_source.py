"""Source of a run's model: whatever `model.path` names becomes a folder in Hugging Face format.

    a folder -------------------------------------------+
    owner/name[@revision] ---> hub_download.py ---------+
    file.gguf, a folder with one, owner/name/file.gguf -+--> gguf_model.py --+--> a folder: config, weights, tokenizer
    one of several modalities --------------------------+--> text_model.py --+
    random:SPEC ---------------------------------------------> random_model.py

This process imports no torch: what needs it, and what may take long, is a process of its own.

consumes: `model.path`, and for random weights the data's texts
waits for: those processes
is unblocked by: their end; each line that one writes is told
"""

from __future__ import annotations

import asyncio
import re
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from asyncflow.config import Config
from asyncflow.model_folder import holds_language_model, read_json, weight_files, why_not_causal
from asyncflow.run.preparation.prompts import DataRows
from asyncflow.types import RunError, UserError

SHAPES: Final = "shapes:"
"""Prefix of the file of a `config.json`'s fields: a model of which only the arithmetic is asked."""
RANDOM: Final = "random:"
GGUF: Final = ".gguf"
_HUB_NAME: Final = re.compile(r"(?P<repo>[\w][\w.-]*/[\w][\w.-]*?)(?:/(?P<file>[^@]+\.gguf))?(?:@(?P<revision>[\w./-]+))?")

Log = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class HubName:
    """A repository of the Hugging Face Hub; `revision`: a branch, tag or commit; `file`: a GGUF file in it."""

    repo: str
    revision: str | None = None
    file: str | None = None

    @classmethod
    def of(cls, path: str) -> HubName | None:
        """The name that `model.path` is, if it has the form of one and is nothing that is here."""
        found = None if Path(path).exists() else _HUB_NAME.fullmatch(path)
        return None if found is None else cls(found["repo"], found["revision"], found["file"])


def is_made(path: str) -> bool:
    """Whether the folder is not where `model.path` says: it is made, or found at a commit that a branch may leave behind."""
    is_converted = gguf_file(Path(path)) is not None or holds_language_model(read_json(Path(path) / "config.json"))
    return path.startswith(RANDOM) or HubName.of(path) is not None or is_converted


def gguf_file(path: Path) -> Path | None:
    """The GGUF file that a path is, or the only one in a folder without a config.json."""
    if path.suffix == GGUF and path.is_file():
        return path
    found = [*path.glob(f"*{GGUF}")] if path.is_dir() and not (path / "config.json").is_file() else []
    if len(found) > 1:
        raise UserError(f"the folder {path} has {len(found)} GGUF files: name one of them, such as {min(found)}")
    return found[0] if found else None


async def model_folder(config: Config, source: DataRows | None, scratch: Path, log: Log = print) -> Path:
    """The model's folder; one that has to be made is made in `scratch`. `source`: texts whose words are a random one's vocabulary.

    Raises `UserError` if it holds no causal language model that can be trained.
    """
    path = config.model.path
    if path.startswith(SHAPES):
        raise UserError(
            f"model.path {path!r} is a model's shapes alone, for --dry-run: set model.path to the folder of a model to train it"
        )
    if path.startswith(RANDOM):
        texts = source.texts() if source is not None else ()
        return await _random_model(config, texts, scratch / "random-model")
    return check_folder("model.path", await folder_of(path, scratch, log), path)


async def folder_of(path: str, scratch: Path, log: Log, *, has_weights: bool = True) -> Path:
    """Folder that a path or a name on the Hub stands for. Without `has_weights`, of the Hub's only what describes the model."""
    name = HubName.of(path)
    here = Path(path)
    if name is not None:
        options = ["--revision", name.revision] if name.revision else []
        options += ["--file", name.file] if name.file else ["--facts"] if not has_weights else []
        here = Path((await run_module("asyncflow.run.models.hub_download", log, name.repo, *options))[-1])
        if name.file:
            here /= name.file
    if (file := gguf_file(here)) is not None:
        log(f"dequantising {file.name}")
        await run_module("asyncflow.engines.train.gguf_model", log, str(file), str(scratch / "gguf-model"))
        return scratch / "gguf-model"
    fields = read_json(here / "config.json")
    if holds_language_model(fields):
        if has_weights:
            check_weights("model.path", here, path)
            log(f"{path} is a {why_not_causal(fields)}: its language model is taken out of it, without what sees or hears")
        options = [] if has_weights else ["--facts"]
        await run_module("asyncflow.engines.train.text_model", log, str(here), str(scratch / "text-model"), *options)
        return scratch / "text-model"
    return here


def check_folder(option: str, folder: Path, path: str, *, has_weights: bool = True) -> Path:
    """Check that a folder holds a causal language model; the option gives it as `path`. Raises `UserError`."""
    settings = read_json(folder / "config.json")
    if not settings:
        hint = "it has no config.json" if folder.exists() else "there is none, and it has not the form owner/name of the Hub's"
        raise UserError(f"{option} {path!r} is no folder with a model in Hugging Face format: {hint}")
    if other := why_not_causal(settings):
        raise UserError(f"{option} {path!r} is a {other}; it takes a causal language model, such as Qwen2ForCausalLM")
    if has_weights:
        check_weights(option, folder, path)
    return folder


def check_weights(option: str, folder: Path, path: str) -> None:
    """Check that all files of a model's weights are in its folder. Raises `UserError`."""
    if not [*folder.glob("*.safetensors")]:
        raise UserError(f"{option} {path!r} has no weights in safetensors format; write them with transformers' save_pretrained")
    if missing := [file.name for file in weight_files(folder) if not file.is_file()]:
        whence = "" if HubName.of(path) is None else ", and is not in the cache: begin again where the Hub can be reached"
        raise UserError(f"{option} {path!r} has not all of its weights: {missing[0]} is missing{whence}")


async def _random_model(config: Config, texts: Iterable[str], folder: Path) -> Path:
    """Make a model with random weights."""
    with tempfile.NamedTemporaryFile("wb", suffix=".jsonl") as file:
        file.write(b"\n".join(msgspec.json.encode(text) for text in texts))
        file.flush()
        options = ["--texts", file.name, "--seed", str(config.run.seed)]
        await run_module("asyncflow.engines.train.random_model", lambda line: None, config.model.path, str(folder), *options)
    return folder


async def run_module(module: str, log: Log, *arguments: str) -> list[str]:
    """Run a module of ours in a process, and return what it writes, line by line; each line but the last is told when it comes.

    Raises its last words: `UserError` if it ends with 2, `RunError` if with anything else but 0.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, *arguments),
        stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    errors = asyncio.ensure_future(process.stderr.read())
    lines: list[str] = []
    try:
        async for line in process.stdout:
            if lines:
                log(lines[-1])
            lines.append(line.decode(errors="replace").rstrip())
        await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    last = ((await errors).decode(errors="replace").strip().splitlines() or ["nothing was said"])[-1]
    if process.returncode:
        raise (UserError if process.returncode == 2 else RunError)(f"model.path: {last}")
    return lines
