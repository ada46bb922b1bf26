"""Where a model comes from: names on the Hub, downloaded, cached and resumed; GGUF files. The Hub is a stand-in (tests/hub.py)."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from asyncflow.engines.lora_files import lora_shapes
from asyncflow.run.models.model_source import HubName, check_folder, folder_of, gguf_file, is_made
from asyncflow.types import LoraSpec, UserError
from tests.conftest import MODEL
from tests.depth import in_gate
from tests.hub import TOKEN, Hub, served
from tests.patience import patience

NAME = "somebody/tiny-model"
WEIGHTS = "model.safetensors"


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A Hub with one model of two revisions, one of which has what nobody needs; an empty cache."""
    main, old = tmp_path / "main", tmp_path / "old"
    shutil.copytree(MODEL, main)
    shutil.copytree(MODEL, old)
    (old / "generation_config.json").write_text('{"eos_token_id": 7}')
    (main / "pytorch_model.bin").write_bytes(b"a pickle")
    (main / "onnx").mkdir()
    (main / "onnx" / "model.safetensors").write_bytes(b"another")
    (main / "consolidated.safetensors").write_bytes(b"the same once more")
    with served(Hub({NAME: {"main": main, "old": old}, "somebody/secret": {"main": main}}, frozenset({"somebody/secret"}))) as hub:
        for variable in ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_HUB_CACHE"):
            monkeypatch.delenv(variable, raising=False)
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        monkeypatch.setenv("HF_HOME", str(tmp_path / "cache"))
        yield hub


def fetched(path: str, scratch: Path, lines: list[str] | None = None, *, has_weights: bool = True) -> Path:
    told = [] if lines is None else lines
    return asyncio.run(folder_of(path, scratch, told.append, has_weights=has_weights))


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("Qwen/Qwen2.5-0.5B-Instruct", HubName("Qwen/Qwen2.5-0.5B-Instruct")),
        ("a/b@refs/pr/3", HubName("a/b", "refs/pr/3")),
        ("a/b.gguf-repo/file-Q4.gguf@v1", HubName("a/b.gguf-repo", "v1", "file-Q4.gguf")),
        ("/no/such/folder", None),
        ("runs/a/model", None),
        ("model", None),
        ("recipes/models", None),  # is there
        ("../up", None),
    ],
)
def test_what_has_the_form_of_a_name_on_the_hub(path: str, name: HubName | None) -> None:
    assert HubName.of(path) == name and is_made(path) == (name is not None)


def test_a_model_is_downloaded_once_with_its_progress_and_without_what_no_run_needs(hub: Hub, tmp_path: Path) -> None:
    lines: list[str] = []
    folder = fetched(NAME, tmp_path, lines)
    assert (folder / WEIGHTS).read_bytes() == (MODEL / WEIGHTS).read_bytes()
    assert sorted(file.name for file in folder.iterdir()) == sorted(file.name for file in MODEL.iterdir() if file.suffix != ".md")
    assert lines[0].startswith(f"downloading {NAME} from the Hugging Face Hub: ") and "MB" in lines[0]
    hub.asked.clear()
    again: list[str] = []
    assert fetched(NAME, tmp_path, again) == folder and not again
    assert not [path for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path]


def test_a_revision_is_another_folder_and_one_that_is_not_there_is_named(hub: Hub, tmp_path: Path) -> None:
    folder = fetched(f"{NAME}@old", tmp_path)
    assert '"eos_token_id": 7' in (folder / "generation_config.json").read_text()
    assert fetched(f"{NAME}@{hub.commit(NAME, 'old')}", tmp_path) == folder != fetched(NAME, tmp_path)
    with pytest.raises(UserError, match=f"the Hugging Face Hub has no revision 'new' of {NAME}"):
        fetched(f"{NAME}@new", tmp_path)


def test_without_the_hub_the_cache_is_taken_and_what_is_not_there_is_said(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match="is no folder here, and the Hugging Face Hub has no such model, or a private one"):
        fetched("somebody/nothing", tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=f"{NAME} is no folder here, HF_HUB_OFFLINE is set, and the cache does not have all of it"):
        fetched(NAME, tmp_path)
    monkeypatch.delenv("HF_HUB_OFFLINE")
    folder = fetched(NAME, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    hub.asked.clear()
    assert fetched(NAME, tmp_path) == folder and not hub.asked
    for has_weights in (True, False):
        assert fetched(f"{NAME}@{folder.name}", tmp_path, has_weights=has_weights) == folder, "its commit"
    monkeypatch.delenv("HF_HUB_OFFLINE")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody is there
    assert fetched(NAME, tmp_path) == folder
    with pytest.raises(UserError, match="the Hugging Face Hub cannot be reached"):
        fetched("somebody/nothing", tmp_path)


def test_a_private_model_takes_a_token(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match="set HF_TOKEN"):
        fetched("somebody/secret", tmp_path)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetched("somebody/secret", tmp_path) / WEIGHTS).is_file()


def test_the_facts_of_a_model_come_without_its_weights(hub: Hub, tmp_path: Path) -> None:
    folder = fetched(NAME, tmp_path, has_weights=False)
    assert (folder / "config.json").is_file() and not (folder / WEIGHTS).exists()
    with pytest.raises(UserError, match="has no weights in safetensors format"):
        check_folder("model.path", folder, NAME)


@pytest.mark.parametrize("has_weights", [True, False])
def test_a_model_with_weights_of_another_format_alone_is_refused_before_anything_is_downloaded(
    hub: Hub, tmp_path: Path, has_weights: bool
) -> None:
    (hub.revisions[NAME]["main"] / WEIGHTS).unlink()
    with pytest.raises(UserError, match=f"{NAME} has no weights in safetensors format"):
        fetched(NAME, tmp_path, has_weights=has_weights)
    assert not [path for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path]


def test_what_is_no_causal_language_model_is_refused_before_its_weights_are_downloaded(hub: Hub, tmp_path: Path) -> None:
    config = hub.revisions[NAME]["main"] / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "architectures": ["T5ForConditionalGeneration"]}))
    for has_weights in (True, False):
        with pytest.raises(UserError, match=f"{NAME} is a T5ForConditionalGeneration; model.path takes a causal language model"):
            fetched(NAME, tmp_path, has_weights=has_weights)
    assert not [path for method, path, _ in hub.asked if method == "GET" and path.endswith(WEIGHTS)]


def test_a_part_of_the_weights_in_the_cache_is_not_enough(hub: Hub, tmp_path: Path) -> None:
    folder = fetched(NAME, tmp_path)
    index = {"weight_map": {"a": WEIGHTS, "b": "model-00002-of-00002.safetensors"}}
    (folder / WEIGHTS).rename(folder / "model-00001-of-00002.safetensors")
    (folder / f"{WEIGHTS}.index.json").write_text(json.dumps(index))
    with pytest.raises(UserError, match="is missing, and is not in the cache: begin again where the Hub can be reached"):
        check_folder("model.path", folder, NAME)


@pytest.mark.parametrize("file", ["BF16/x.gguf", "x-adapter[1].gguf", "consolidated.gguf"])
def test_a_file_of_a_repository_comes_wherever_it_is_and_alone(hub: Hub, tmp_path: Path, file: str) -> None:
    there = hub.revisions[NAME]["main"] / file
    there.parent.mkdir(exist_ok=True)
    there.write_bytes(b"GGUF of the tests")
    for _ in range(2):  # downloaded, and of the cache
        done = hub_file(file)
        assert done.returncode == 0, done.stderr
    folder = Path(done.stdout.splitlines()[-1])
    assert [p.relative_to(folder).as_posix() for p in folder.rglob("*") if p.is_file()] == [file]
    assert (folder / file).read_bytes() == b"GGUF of the tests"


def test_a_file_that_a_repository_does_not_have_is_named(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UserError, match=f"{NAME} has no file BF16/y.gguf on the Hugging Face Hub"):
        fetched(f"{NAME}/BF16/y.gguf", tmp_path)
    fetched(NAME, tmp_path)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(UserError, match=f"{NAME} has no file BF16/y.gguf on the Hugging Face Hub, or the cache has it not"):
        fetched(f"{NAME}/BF16/y.gguf", tmp_path)


def hub_file(file: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "asyncflow.run.models.hub_download", NAME, "--file", file]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_a_connection_that_breaks_is_continued_in_the_middle_of_a_file(hub: Hub, tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(25 << 20)  # huggingface_hub writes 10 MiB at a time
    (hub.revisions[NAME]["main"] / WEIGHTS).write_bytes(content)
    hub.cuts = (WEIGHTS, 22 << 20)
    lines: list[str] = []
    folder = fetched(NAME, tmp_path, lines)
    assert (folder / WEIGHTS).read_bytes() == content
    told = [re.fullmatch(rf"  {NAME}: (\d+) of (\d+) MB", line) for line in lines[1:]]
    done = [int(line[1]) for line in told if line is not None]
    assert len(done) == len(told) >= 2 and done == sorted(done), lines
    assert {line[2] for line in told if line is not None} == {"26"} and done[-1] < 26
    assert [asked for method, path, asked in hub.asked if method == "GET" and path.endswith(WEIGHTS)] == ["", f"bytes={20 << 20}-"]


def test_a_download_that_was_killed_keeps_the_files_that_are_whole(hub: Hub, tmp_path: Path) -> None:
    hub.holds = WEIGHTS
    command = [sys.executable, "-m", "asyncflow.run.models.hub_download", NAME]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline, others = time.monotonic() + patience(60), {file.name for file in MODEL.iterdir()} - {WEIGHTS}
    try:
        while {file.name for file in (tmp_path / "cache").rglob("snapshots/*/*")} != others:
            assert time.monotonic() < deadline and process.poll() is None, "the other files have not come"
            time.sleep(0.02)
    finally:
        process.kill()
        process.wait()
    hub.holds = ""
    hub.asked.clear()
    assert (fetched(NAME, tmp_path) / WEIGHTS).read_bytes() == (MODEL / WEIGHTS).read_bytes()
    assert {path.rpartition("/")[2] for method, path, _ in hub.asked if method == "GET" and "/resolve/" in path} == {WEIGHTS}


@pytest.mark.parametrize("how", in_gate(signal.SIGKILL, of=[signal.SIGINT, signal.SIGTERM, signal.SIGKILL]))
def test_a_download_that_was_ended_goes_on_in_the_middle_of_a_file(hub: Hub, tmp_path: Path, how: signal.Signals) -> None:
    content = np.random.default_rng(0).bytes(25 << 20)
    (hub.revisions[NAME]["main"] / WEIGHTS).write_bytes(content)
    hub.stands = (WEIGHTS, 22 << 20)
    process = subprocess.Popen([sys.executable, "-m", "asyncflow.run.models.hub_download", NAME], stderr=subprocess.DEVNULL)
    deadline, here = time.monotonic() + patience(60), 0
    try:
        while here < 20 << 20:  # it is written 10 MiB at a time
            assert time.monotonic() < deadline and process.poll() is None, "the first part has not come"
            here = sum(file.stat().st_size for file in (tmp_path / "cache").rglob("*.incomplete"))
            time.sleep(0.02)
        process.send_signal(how)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience(0.5))  # it may wait for what stands: who has started it kills it then
    finally:
        process.kill()
        process.wait()
    hub.stands = None
    hub.asked.clear()
    lines: list[str] = []
    assert (fetched(NAME, tmp_path, lines) / WEIGHTS).read_bytes() == content
    asked = [asked for method, path, asked in hub.asked if method == "GET" and path.endswith(WEIGHTS)]
    assert asked == [f"bytes={here}-"] and "26 MB, of which 21 MB are here" in lines[0], lines
    assert not list((tmp_path / "cache").rglob("*.incomplete"))


@pytest.mark.parametrize("what", ["another", "longer"])
def test_a_part_of_something_else_is_found_by_the_hash(hub: Hub, tmp_path: Path, what: str) -> None:
    content = (MODEL / WEIGHTS).read_bytes()
    name = f"{hashlib.sha256(content).hexdigest()}.incomplete"
    part = tmp_path / "cache" / "hub" / "models--somebody--tiny-model" / "blobs" / name
    part.parent.mkdir(parents=True)
    part.write_bytes(bytes(1000) if what == "another" else content + b"more")
    lines: list[str] = []
    assert (fetched(NAME, tmp_path, lines) / WEIGHTS).read_bytes() == content
    assert not part.exists()


def weights_asked(hub: Hub) -> list[str]:
    """Ranges of the requests for weights."""
    return [asked for method, path, asked in hub.asked if method == "GET" and path.endswith(WEIGHTS)]


def test_bytes_that_have_another_hash_twice_are_refused(hub: Hub, tmp_path: Path) -> None:
    hub.serves_wrong = WEIGHTS
    with pytest.raises(UserError, match=rf"{WEIGHTS} comes with another hash than the Hub says"):
        fetched(NAME, tmp_path)
    assert weights_asked(hub) == ["", ""] and not list((tmp_path / "cache").rglob(WEIGHTS))


def test_a_connection_that_is_reset_is_continued(hub: Hub, tmp_path: Path) -> None:
    content = np.random.default_rng(0).bytes(25 << 20)
    (hub.revisions[NAME]["main"] / WEIGHTS).write_bytes(content)
    hub.resets = (WEIGHTS, 22 << 20)
    assert (fetched(NAME, tmp_path) / WEIGHTS).read_bytes() == content
    first, second = weights_asked(hub)
    assert first == "" and second in (f"bytes={10 << 20}-", f"bytes={20 << 20}-")  # a reset may drop what was not read yet


@pytest.mark.parametrize("name", [NAME, "somebody/secret"])
def test_weights_that_are_elsewhere_come_without_the_token(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    hub.has_cdn = True
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert (fetched(name, tmp_path) / WEIGHTS).read_bytes() == (MODEL / WEIGHTS).read_bytes()
    assert [path for method, path, _ in hub.asked if method == "GET" and "/cdn/" in path]


def test_weights_whose_hash_the_hub_does_not_give_come_all_the_same(hub: Hub, tmp_path: Path) -> None:
    hub.knows_hashes = False
    assert (fetched(NAME, tmp_path) / WEIGHTS).read_bytes() == (MODEL / WEIGHTS).read_bytes()


def test_of_two_downloads_of_one_model_one_brings_the_weights(hub: Hub, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "asyncflow.run.models.hub_download", NAME]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    folders = [Path(process.communicate()[0].splitlines()[-1]) for process in both]
    assert [process.returncode for process in both] == [0, 0] and len(set(folders)) == 1
    assert (folders[0] / WEIGHTS).read_bytes() == (MODEL / WEIGHTS).read_bytes() and weights_asked(hub) == [""]


def test_gguf_files(tmp_path: Path) -> None:
    for name in ("a-Q4.gguf", "b-Q8.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    assert gguf_file(tmp_path / "a-Q4.gguf") == tmp_path / "a-Q4.gguf"
    with pytest.raises(UserError, match=r"has 2 GGUF files: name one of them"):
        gguf_file(tmp_path)
    (tmp_path / "b-Q8.gguf").unlink()
    assert gguf_file(tmp_path) == tmp_path / "a-Q4.gguf"
    (tmp_path / "config.json").write_text("{}")  # a folder in Hugging Face format, whatever else it holds
    assert gguf_file(tmp_path) is None and gguf_file(tmp_path / "none") is None


@pytest.mark.parametrize(
    ("name", "is_taken"), [("GPT2LMHeadModel", True), ("T5ForConditionalGeneration", False), ("BertModel", False)]
)
def test_a_class_that_transformers_makes_for_causal_language_models_is_taken(tmp_path: Path, name: str, is_taken: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": [name]}))
    (tmp_path / "model.safetensors").touch()
    if is_taken:
        assert check_folder("model.path", tmp_path, NAME) == tmp_path
    else:
        with pytest.raises(UserError, match=f"is a {name}; it takes a causal language model"):
            check_folder("model.path", tmp_path, NAME)


def test_a_model_without_linear_layers_gets_no_adapter() -> None:
    with pytest.raises(UserError, match="no linear layers of the kind that gets an adapter"):
        lora_shapes({}, LoraSpec(rank=4, alpha=8.0))
