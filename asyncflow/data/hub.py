"""Data sets through the package `datasets`: saved ones (`save_to_disk`), folders of files, and those of the Hugging Face Hub.

    a folder with state.json or dataset_dict.json --load_from_disk--+
    another folder, owner/name --load_dataset-----------------------+--> one split --> rows

A data set's own code is not run: `datasets` reads data files alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from asyncflow.types import UserError

HUB_SECONDS: Final = 10.0
"""Seconds that the Hub has to say whether it has a data set."""


def read_data_set(path: str, named: str, subset: str | None, limit: int | None) -> Iterator[dict[str, Any]]:
    """The first `limit` rows of a split. Raises `UserError` where there is no such data set, subset or split.

    A saved data set that is one split is read whatever `named` says.
    """
    try:
        import datasets
    except ImportError as error:
        raise UserError(f"{path} is a data set for the package datasets: pip install 'asyncflow-rl[data]'") from error
    folder = Path(path)
    try:
        if any((folder / name).is_file() for name in ("state.json", "dataset_dict.json")):
            found = datasets.load_from_disk(path)
        elif folder.exists():
            found = datasets.load_dataset(path, subset)
        else:
            with _without_retries(path):
                found = datasets.load_dataset(path, subset)
    except Exception as error:  # of many libraries: the Hub's, its HTTP client's, pyarrow's
        lines = str(error).strip().splitlines() or [type(error).__name__]
        where = "cannot be read" if folder.exists() else "is no file or folder here, and cannot be had from the Hugging Face Hub"
        raise UserError(f"the data set {path}{f' ({subset})' if subset else ''} {where}: {lines[0]}") from error
    if isinstance(found, datasets.DatasetDict):
        if named not in found:
            splits = ", ".join(map(str, found))
            raise UserError(f"the data set {path} has no split {named!r}, but {splits}: name one by data.split, or eval.split")
        found = found[named]
    return iter(found if limit is None else found.select(range(min(limit, len(found)))))


@contextlib.contextmanager
def _without_retries(path: str) -> Iterator[None]:
    """Context in which a data set of the Hub is loaded: from the cache alone where the Hub cannot be reached now, since `datasets`
    would try for half a minute. Raises `LookupError` or `ConnectionError` where it cannot be had."""
    import datasets
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, RepositoryNotFoundError

    if datasets.config.HF_HUB_OFFLINE:
        yield
        return
    try:
        HfApi(endpoint=datasets.config.HF_ENDPOINT).dataset_info(path, timeout=HUB_SECONDS)
    except RepositoryNotFoundError as error:
        raise LookupError("it has none of this name, or none that your token (HF_TOKEN) may read") from error
    except HfHubHTTPError:  # it is there: what is wrong `datasets` says
        pass
    except Exception:  # of its HTTP client, whichever that is
        datasets.config.HF_HUB_OFFLINE = True
    try:
        yield
    except ConnectionError as error:
        if datasets.config.HF_HUB_OFFLINE:
            raise ConnectionError("it cannot be reached, and the cache has no such data set") from error
        raise
    finally:
        datasets.config.HF_HUB_OFFLINE = False
