"""Verbs that work on folders: a low-rank adapter that is merged, a page that is opened."""

from __future__ import annotations

import asyncio
import json
import stat
import webbrowser
from pathlib import Path
from urllib.parse import unquote, urlparse

import numpy as np
import pytest
from safetensors.numpy import load_file

from asyncflow.cli.merge import merge
from asyncflow.cli.watch import _open, predicted
from asyncflow.engines.lora_files import write_lora
from asyncflow.types import LoraSpec, UserError
from tests.conftest import MODEL

TARGET = "model.layers.0.self_attn.q_proj"


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    """An adapter of one layer, whose product adds 2 to each weight: alpha / rank is 2."""
    rows, columns = load_file(MODEL / "model.safetensors")[f"{TARGET}.weight"].shape
    arrays = {
        f"{TARGET}.lora_A.weight": np.ones((1, columns), np.float32),
        f"{TARGET}.lora_B.weight": np.ones((rows, 1), np.float32),
    }
    write_lora(tmp_path / "adapter", LoraSpec(1, 2.0), Path("gone"), arrays)
    return tmp_path / "adapter"


def test_an_adapter_is_merged_into_the_base_that_is_named(
    adapter: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UserError, match=r"The adapter's base gone is no model's folder here: give it by --base"):
        merge(adapter, tmp_path / "out")
    merge(adapter, tmp_path / "out", MODEL)
    assert capsys.readouterr().out == f"{tmp_path / 'out'}\n"
    before, merged = load_file(MODEL / "model.safetensors"), load_file(tmp_path / "out" / "model.safetensors")
    differs = [name for name, values in before.items() if not np.array_equal(values, merged[name])]
    assert differs == [f"{TARGET}.weight"] and np.allclose(merged[differs[0]] - before[differs[0]], 2.0, atol=1e-5)
    assert {"config.json", "tokenizer.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    with pytest.raises(UserError, match="out is there already: give another folder"):
        merge(adapter, tmp_path / "out", MODEL)


def test_the_key_of_a_page_is_in_no_argument_of_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[str] = []
    monkeypatch.setattr(webbrowser, "open", opened.append)
    _open("http://127.0.0.1:1/watch/#key=secret", tmp_path)
    (uri,) = opened
    assert "secret" not in uri
    file = Path(unquote(urlparse(uri).path))
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert 'url=http://127.0.0.1:1/watch/#key=secret"' in file.read_text()


@pytest.mark.parametrize(
    ("section", "is_told"),
    [
        ({}, True),
        ({"reward": {"scorer": "OWN"}}, True),  # a simulation sleeps instead
        ({"algorithm": "OWN"}, False),
        ({"schedule": {"path": "OWN"}}, False),
        ({"weight_sync": {"name": "OWN"}}, False),
        ({"queue": {"samplers": {"rollout": "OWN"}}}, False),
    ],
)
async def test_nothing_is_predicted_where_code_that_a_run_names_would_be_imported(
    section: dict[str, object], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, is_told: bool
) -> None:
    asked: list[tuple[str, ...]] = []

    async def ask(*command: str, **_: object) -> object:
        asked.append(command)
        raise InterruptedError

    monkeypatch.setattr(asyncio, "create_subprocess_exec", ask)
    tree = {"model": {"path": "m"}, "data": {"path": "d"}, "reward": {"scorer": "exact_match"}, **section}
    own = tmp_path / "own.py"
    own.write_text("raise AssertionError")
    (tmp_path / "config.yaml").write_text(json.dumps(tree).replace("OWN", f"{own}:Own"))
    if is_told:
        with pytest.raises(InterruptedError):
            await predicted(tmp_path, "schedule=bounded")
    else:
        assert await predicted(tmp_path, "schedule=bounded") == ""
    assert bool(asked) == is_told
