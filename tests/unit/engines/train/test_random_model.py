"""Random models load as any other, and are the same every time."""

import subprocess
import sys
from pathlib import Path
from random import Random
from string import ascii_lowercase

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from asyncflow.engines.train.random_model import END_TOKEN, SPECS, make_random_model
from asyncflow.types import UserError

TEXTS = ["Tom has 12 coins.\n12+3=15\n", "Ann finds 3 more, doesn't she?\n"]


@pytest.mark.parametrize("spec", sorted(SPECS))
def test_transformers_finds_every_weight_in_its_place(spec: str, tmp_path: Path) -> None:
    make_random_model(spec, tmp_path, TEXTS, seed=3)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values()), report
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.get_input_embeddings().weight.data_ptr()
    assert all(p.std().item() == pytest.approx(0.02, rel=0.1) for p in model.parameters() if p.ndim > 1)


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_the_tokenizer_gives_a_text_back_and_knows_the_end(family: str, tmp_path: Path) -> None:
    make_random_model(f"random:{family}-tiny", tmp_path, TEXTS, seed=0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    text = "Žofie has 12 coins 😀\n\n 3+4=7 "
    assert tokenizer.decode(tokenizer.encode(text)) == text
    # a decomposed accent: transformers and the file alone must agree, since a rollout worker reads the file alone
    for tricky in (text, "e\u0301 12  x" + END_TOKEN):
        assert tokenizer.encode(tricky) == Tokenizer.from_file(str(tmp_path / "tokenizer.json")).encode(tricky).ids
    assert tokenizer.encode(END_TOKEN) == [tokenizer.eos_token_id] == [model.config.eos_token_id]
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert [tokenizer.decode([i]) for i in tokenizer.encode("12")] == ["1", "2"]
    assert len(tokenizer) == model.config.vocab_size


def test_the_vocabulary_is_limited(tmp_path: Path) -> None:
    rng = Random(0)
    names = ["".join(rng.choices(ascii_lowercase, k=8)) for _ in range(2000)]
    make_random_model("random:qwen2-tiny", tmp_path, (f"{name} has {name[::-1]}" for name in names), seed=0)
    assert len(AutoTokenizer.from_pretrained(tmp_path)) == 2000


def test_the_same_seed_gives_the_same_bytes(tmp_path: Path) -> None:
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        make_random_model("random:qwen2-tiny", tmp_path / name, TEXTS, seed=seed)
    a, b, c = ((tmp_path / name / "model.safetensors").read_bytes() for name in "abc")
    assert a == b != c


def test_an_unknown_spec_lists_the_known_ones(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="random:qwen2-tiny, ") as caught:
        make_random_model("random:gpt9", tmp_path / "out", TEXTS, seed=0)
    assert "random:gpt9" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_the_program_makes_a_model_without_torch(tmp_path: Path) -> None:
    (tmp_path / "texts.txt").write_text("\n".join(TEXTS), encoding="utf-8")
    module = "asyncflow.engines.train.random_model"
    arguments = ["random:qwen2-tiny", str(tmp_path / "out"), "--texts", str(tmp_path / "texts.txt"), "--seed", "4"]
    code = f"import sys, runpy; sys.argv = ['x', *{arguments!r}]; runpy.run_module({module!r}, run_name='__main__')"
    check = "import atexit, sys; atexit.register(lambda: print('torch' in sys.modules, 'transformers' in sys.modules)); "
    done = subprocess.run([sys.executable, "-c", check + code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False False"), done.stderr
    with (tmp_path / "texts.txt").open(encoding="utf-8") as lines:
        make_random_model("random:qwen2-tiny", tmp_path / "again", lines, seed=4)
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes()


def test_the_program_reports_a_mistake_in_one_line(tmp_path: Path) -> None:
    arguments = ["random:gpt9", str(tmp_path / "out"), "--texts", "/dev/null"]
    done = subprocess.run(
        [sys.executable, "-m", "asyncflow.engines.train.random_model", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.count("\n") == 1 and "random:qwen2-tiny" in done.stderr
