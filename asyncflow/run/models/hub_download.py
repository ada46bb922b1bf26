"""Download of a model from the Hugging Face Hub: `python -m asyncflow.run.models.hub_download OWNER/NAME` prints its folder last.

    owner/name, revision, file --> which files are missing, how many bytes --> the cache's folder of that commit

A process of its own, which Ctrl-C ends at once: what has come stays (`hub_parts.py`), and a connection that breaks is continued.
Only files that a run needs are taken, of the first level; a file that is named is taken wherever it is. With HF_HUB_OFFLINE=1, or
where the Hub cannot be reached, the cache is taken; HF_HOME, HF_ENDPOINT and HF_TOKEN are huggingface_hub's own.
"""

from __future__ import annotations

import argparse
import glob
import io
import os
import signal
import sys
from collections.abc import Callable, Sequence
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    DryRunError,
    GatedRepoError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from tqdm import tqdm

from asyncflow.model_folder import holds_language_model, read_json, why_not_causal
from asyncflow.run.models.hub_parts import fetch, parts_of
from asyncflow.types import UserError
from asyncflow.user_file import status_of

FACTS: Final = ("*.json", "*.jinja", "*.txt", "*.model")
WEIGHTS: Final = ("*.safetensors",)
NOT_TAKEN: Final = ("*/*", "consolidated*", "*adapter*")  # copies for other libraries, and parts of models
REPORTS: Final = 20  # times at most that a download's progress is reported


def download(
    repo: str, revision: str | None, report: Callable[[str], None], *, file: str | None = None, has_weights: bool = True
) -> str:
    """Folder of the cache with what a run needs of a repository, or with `file` alone; without `has_weights`, with no weights.

    Raises `UserError`, also for a repository that has no weights of the format. `report`: takes lines about the progress.
    """
    where: dict[str, Any] = {"repo_id": repo, "revision": revision}
    if file is None:
        patterns = [*FACTS, *(WEIGHTS if has_weights else ())]
        where |= {"allow_patterns": patterns, "ignore_patterns": [*NOT_TAKEN]}
    else:
        where |= {"allow_patterns": [glob.escape(file)]}
    name = repo if revision is None else f"{repo}@{revision}"
    try:
        try:
            listed = snapshot_download(**where, dry_run=True)
        except DryRunError:  # the Hub cannot be asked: the cache may have it, or this says what is wrong
            return _with_file(snapshot_download(**where), name, file)
        has_some = any(_is_of(each.filename, WEIGHTS) for each in listed) if has_weights else _has_weights(repo, revision)
        if file is None and not has_some:
            raise UserError(
                f"{name} has no weights in safetensors format: write them with transformers' save_pretrained, or name one of its "
                f"GGUF files, such as {repo}/NAME.gguf, if it has any"
            )
        if file is None:
            first = {**where, "allow_patterns": [*FACTS], "tqdm_class": _bar(name, 0, report)}
            _check_causal(Path(snapshot_download(**first)), name)
            listed = [each for each in listed if not _is_of(each.filename, FACTS)]
        files = [each for each in listed if each.will_download]
        total, parts = sum(file.file_size or 0 for file in files), parts_of(repo, files)
        if total:
            here = sum(part.here for part in parts)
            rest = f", of which {here / 1e6:,.0f} MB are here" if here else ""
            report(f"downloading {name} from the Hugging Face Hub: {len(files)} files, {total / 1e6:,.0f} MB{rest}")
        bar = _bar(name, total, report)
        if parts:
            fetch(parts, bar)
        return _with_file(snapshot_download(**where, tqdm_class=bar), name, file)
    except UserError:
        raise
    except RevisionNotFoundError as error:
        raise UserError(f"the Hugging Face Hub has no revision {revision!r} of {repo}: name a branch, a tag or a commit") from error
    except GatedRepoError as error:
        raise UserError(
            f"{repo} is gated: ask for access on its page, then log in with `hf auth login`, or set HF_TOKEN"
        ) from error
    except RepositoryNotFoundError as error:
        raise UserError(
            f"{repo} is no folder here, and the Hugging Face Hub has no such model, or a private one: for that, log in with "
            f"`hf auth login`, or set HF_TOKEN"
        ) from error
    except LocalEntryNotFoundError as error:
        is_offline = os.environ.get("HF_HUB_OFFLINE", "0").upper() not in ("0", "", "FALSE", "NO", "OFF")
        why = "HF_HUB_OFFLINE is set" if is_offline else "the Hugging Face Hub cannot be reached"
        raise UserError(
            f"{name} is no folder here, {why}, and the cache does not have all of it: name a folder, or begin again where the Hub "
            f"can be reached (what has come stays)"
        ) from error
    except Exception as error:  # of many libraries: the Hub's, its HTTP client's
        lines = str(error).strip().splitlines() or [type(error).__name__]
        raise UserError(f"{name} cannot be had from the Hugging Face Hub: {lines[0]} (what has come stays)") from error


def _has_weights(repo: str, revision: str | None) -> bool:
    """Whether there are files of weights to be taken, by the Hub's list; no file is asked for. Offline nobody can tell."""
    try:
        names = HfApi().list_repo_files(repo, revision=revision)
    except OfflineModeIsEnabled:
        return True
    return any(_is_of(name, WEIGHTS) and not _is_of(name, NOT_TAKEN) for name in names)


def _is_of(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch(name, pattern) for pattern in patterns)


def _check_causal(folder: Path, name: str) -> None:
    """Check that it is a causal language model, or has one, before its weights are taken. Raises `UserError`."""
    fields = read_json(folder / "config.json")
    if (other := why_not_causal(fields)) and not holds_language_model(fields):
        raise UserError(f"{name} is a {other}; model.path takes a causal language model, such as Qwen2ForCausalLM")


def _with_file(folder: str, name: str, file: str | None) -> str:
    """The folder, which has the file."""
    if file is not None and not (Path(folder) / file).is_file():
        raise UserError(
            f"{name} has no file {file} on the Hugging Face Hub, or the cache has it not: look at the list of its files"
        )
    return folder


def _bar(name: str, total: int, report: Callable[[str], None]) -> type[tqdm]:
    """Class of progress bars that report a line now and then, and draw nothing."""
    reported = 0

    class DownloadBar(tqdm):
        """Bar of the bytes of all files, or of the number of files, of which nothing is reported."""

        def __init__(self, *arguments: Any, **options: Any) -> None:
            options.pop("name", None)
            super().__init__(*arguments, **{**options, "file": io.StringIO(), "disable": False})

        def update(self, count: float | None = 1) -> bool | None:
            nonlocal reported
            drawn = super().update(count)
            here, whole = round(self.n / 1e6), round(total / 1e6)
            if self.unit == "B" and here < whole and (share := int(REPORTS * self.n / total)) > reported:
                reported = share
                report(f"  {name}: {here:,} of {whole:,} MB")
            return drawn

    return DownloadBar


def main() -> int:
    """Run the module as a program. Lines about the progress, and last the folder, go to standard output."""
    parser = argparse.ArgumentParser(
        prog="python -m asyncflow.run.models.hub_download", description="Download a model from the Hub."
    )
    parser.add_argument("repo")
    parser.add_argument("--revision")
    parser.add_argument("--file", help="this file alone, such as a GGUF file")
    parser.add_argument("--facts", action="store_true", help="no weights")
    arguments = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # no thread is waited for: what has come is in its file
    asked: dict[str, Any] = {"file": arguments.file, "has_weights": not arguments.facts}
    try:
        print(download(arguments.repo, arguments.revision, lambda line: print(line, flush=True), **asked), flush=True)
    except UserError as error:
        print(error, file=sys.stderr)
        return status_of(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
