"""Files of weights from the Hub that come in parts: what has come of a file stays when the download is ended, however it is ended.

    missing files --HEAD--> Parts, each with what is here of it --from there on, over HTTP--> hash --> the cache's blob

huggingface_hub keeps no part of a file for another process, since two may write it where a file system has no locks. Here such a
file is found by its hash, which the Hub gives for weights, and left to huggingface_hub, as all that has no such hash.
"""

from __future__ import annotations

import hashlib
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from huggingface_hub import DryRunFileInfo, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from tqdm import tqdm

SHA256: Final = re.compile(r"[0-9a-f]{64}")
AT_ONCE: Final = 8  # files, as many as huggingface_hub takes


@dataclass(frozen=True)
class FilePart:
    """A file of weights on its way. `url`: with the commit; `blob`: where the cache has it when it is whole; `size`: its bytes."""

    url: str
    blob: Path
    lock: Path
    size: int

    @property
    def path(self) -> Path:
        """What is here of it; the name is one that huggingface_hub's tools know."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    @property
    def here(self) -> int:
        """Bytes that are here of it."""
        return self.path.stat().st_size if self.path.exists() else 0


def parts_of(repo: str, files: Iterable[DryRunFileInfo]) -> list[FilePart]:
    """Those of the missing files that have a hash and are not too large for HTTP."""
    name, cache = repo_folder_name(repo_id=repo, repo_type="model"), Path(constants.HF_HUB_CACHE)
    parts = []
    for file in files:
        url = hf_hub_url(repo, file.filename, revision=file.commit_hash)
        facts = get_hf_file_metadata(url)
        if facts.size and facts.size <= constants.MAX_HTTP_DOWNLOAD_SIZE and SHA256.fullmatch(facts.etag or ""):
            blob, lock = cache / name / "blobs" / str(facts.etag), cache / ".locks" / name / f"{facts.etag}.lock"
            parts.append(FilePart(url, blob, lock, facts.size))
    return parts


def fetch(parts: Sequence[FilePart], bars: type[tqdm], report: Callable[[str], None]) -> None:
    """Make blobs of them. `bars`: one is made, of all their bytes, which begins with what is here; `report`: takes a line about a
    file with a wrong hash, which is left to huggingface_hub. Raises the errors of its HTTP client, after which the parts stay."""
    whole, lock = bars(unit="B", total=sum(part.size for part in parts), initial=sum(part.here for part in parts)), threading.Lock()

    class PartBar(tqdm):
        """Bar of one file, which draws nothing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(disable=True)

        def update(self, count: float | None = 1) -> bool | None:
            with lock:
                return whole.update(count)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for part, is_right in zip(parts, pool.map(lambda part: _fetch(part, PartBar), parts), strict=True):
            if not is_right:
                report(f"  what has come of {part.url} has not its hash: it is taken again")


def _fetch(part: FilePart, bar: type[tqdm]) -> bool:
    """Whether the blob is there."""
    for path in (part.blob, part.lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(part.lock):  # huggingface_hub's own
        if part.blob.exists():
            return True
        with part.path.open("ab") as file:
            if file.tell() > part.size:
                file.truncate(0)
            here = file.seek(0, 2)
            http_get(part.url, file, resume_size=here, headers=build_hf_headers(), expected_size=part.size, tqdm_class=bar)
        with part.path.open("rb") as file:
            is_right = hashlib.file_digest(file, "sha256").hexdigest() == part.blob.name
        if is_right:
            part.path.replace(part.blob)
        else:
            part.path.unlink()
        return is_right
