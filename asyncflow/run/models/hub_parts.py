"""Files of weights from the Hub that come in parts: what has come of a file stays when the download is ended, however it is ended.

    missing files --HEAD--> parts, each with what is here of it --from there on, over HTTP--> hash --> the cache's blob

huggingface_hub keeps no part of a file for another process, since two may write it where a file system has no locks. Here such a
file is found by its hash, which the Hub gives for weights, and begun again. What has no such hash is left to huggingface_hub.
"""

from __future__ import annotations

import hashlib
import re
import threading
import time
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final
from urllib.parse import urlsplit

from huggingface_hub import DryRunFileInfo, constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import HfHubHTTPError
from huggingface_hub.file_download import http_get, repo_folder_name
from huggingface_hub.utils import WeakFileLock, build_hf_headers  # type: ignore[attr-defined]
from tqdm import tqdm

from asyncflow.types import UserError

SHA256: Final = re.compile(r"[0-9a-f]{64}")
HUB: Final = "huggingface.co"
AT_ONCE: Final = 8  # files, as many as huggingface_hub takes
IN_VAIN: Final = 5  # times in a row that nothing more of a file comes, before its download ends
PAUSE_SECONDS: Final = 1.0


@dataclass(frozen=True)
class FilePart:
    """A file of weights on its way. `url`: with the commit; `blob`: where the cache has it when it is whole; `size`: its bytes."""

    url: str
    blob: Path
    lock: Path
    size: int

    @property
    def path(self) -> Path:
        """File with the bytes that are here; its name is one that huggingface_hub's tools know."""
        return self.blob.with_name(f"{self.blob.name}.incomplete")

    @property
    def here(self) -> int:
        """Bytes that are here of it."""
        return self.path.stat().st_size if self.path.exists() else 0


def parts_of(repo: str, files: Iterable[DryRunFileInfo]) -> list[FilePart]:
    """Parts of the missing files that have a hash and are not too large for HTTP."""
    name, cache = repo_folder_name(repo_id=repo, repo_type="model"), Path(constants.HF_HUB_CACHE)

    def part_of(file: DryRunFileInfo) -> FilePart | None:
        url = hf_hub_url(repo, file.filename, revision=file.commit_hash)
        facts = get_hf_file_metadata(url, retry_on_errors=True)
        if not facts.size or facts.size > constants.MAX_HTTP_DOWNLOAD_SIZE or not SHA256.fullmatch(facts.etag or ""):
            return None
        blob, lock = cache / name / "blobs" / str(facts.etag), cache / ".locks" / name / f"{facts.etag}.lock"
        return FilePart(url, blob, lock, facts.size)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        return [part for part in pool.map(part_of, files) if part is not None]


def fetch(parts: Sequence[FilePart], bars: type[tqdm]) -> None:
    """Make blobs of them. `bars`: one is made, of all their bytes, which begins with what is here. Raises `UserError` for a file
    that has another hash twice, and the errors of huggingface_hub's HTTP client, after which the parts stay."""
    whole, lock = bars(unit="B", total=sum(part.size for part in parts), initial=sum(part.here for part in parts)), threading.Lock()

    class PartBar(tqdm):
        """Bar of one file, which draws nothing."""

        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__(disable=True)

        def update(self, count: float | None = 1) -> bool | None:
            with lock:
                return whole.update(count)

    with ThreadPoolExecutor(AT_ONCE) as pool:
        for _ in pool.map(lambda part: _fetch(part, PartBar), parts):
            pass


def _fetch(part: FilePart, bar: type[tqdm]) -> None:
    """Make a blob of the part, unless another user's is in the way, which is left there: huggingface_hub has names of its own."""
    for path in (part.blob, part.lock):
        path.parent.mkdir(parents=True, exist_ok=True)
    with WeakFileLock(part.lock):  # huggingface_hub's own
        for _ in range(2):  # what was here may have been of something else
            if part.blob.exists():
                return
            try:
                file = part.path.open("ab")
            except PermissionError:
                return
            with file:
                _complete(part, file, bar)
            with part.path.open("rb") as whole:
                is_right = hashlib.file_digest(whole, "sha256").hexdigest() == part.blob.name
            if is_right:
                part.path.replace(part.blob)
            else:
                part.path.unlink()
    if not part.blob.exists():
        raise UserError(f"{part.url} comes with another hash than the Hub says: its server, or one between, serves other bytes")


def _complete(part: FilePart, file: BinaryIO, bar: type[tqdm]) -> None:
    """Get the rest of the file, also where its connection breaks again and again, as long as something comes each time."""
    if file.tell() > part.size:
        file.truncate(0)
    in_vain = 0
    while (here := file.seek(0, 2)) < part.size:
        headers, location = build_hf_headers(), get_hf_file_metadata(part.url, retry_on_errors=True).location
        if not _is_of_hub(part.url, location):
            headers.pop("authorization", None)  # it is signed
        try:
            http_get(location, file, resume_size=here, headers=headers, expected_size=part.size, tqdm_class=bar)
        except HfHubHTTPError as error:
            if error.response.status_code < 500 or in_vain == IN_VAIN:
                raise
        except Exception:  # of the HTTP client, whose package has changed its name before
            if in_vain == IN_VAIN:
                raise
        else:
            return
        in_vain = 0 if file.seek(0, 2) > here else in_vain + 1
        time.sleep(PAUSE_SECONDS)


def _is_of_hub(url: str, location: str) -> bool:
    """Whether a token may go there: to where it was asked for, or to the Hub itself, behind a mirror."""
    asked, found = urlsplit(url), urlsplit(location)
    return (asked.scheme, asked.netloc) == (found.scheme, found.netloc) or (found.scheme, found.hostname) == ("https", HUB)
