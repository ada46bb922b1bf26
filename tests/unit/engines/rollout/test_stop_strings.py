"""Stop strings: found when, and only when, the newest token completes one."""

from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from asyncflow.engines.rollout.stop_strings import StopStrings


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tokenizer of bytes, with the pieces `\\nEnd` and `d.` besides, and a special token, the last one."""
    letters = {letter: i for i, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(vocab=letters, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_tokens(["\nEnd", "d."])
    tokenizer.add_special_tokens([AddedToken("<|end|>", special=True)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    return tmp_path


@pytest.mark.parametrize(
    ("text", "stop", "at"),
    [
        ("so\nEnd it", ("\nEnd",), "so\nEnd"),
        ("the end. And", ("end",), "the end."),  # `d.` completes it, and has more
        ("a<|end|>b c", ("ab",), "a<|end|>b"),  # special tokens have no text
        ("x \u00e4\u00f6 y", ("\u00e4\u00f6",), "x \u00e4\u00f6"),  # two bytes each
        ("aaaa", ("b", "aaa"), "aaa"),
        ("nothing of it", ("End", "zz"), ""),
    ],
)
def test_a_response_ends_with_the_token_that_completes_a_text(folder: Path, text: str, stop: tuple[str, ...], at: str) -> None:
    strings, tokenizer = StopStrings(folder), Tokenizer.from_file(str(folder / "tokenizer.json"))
    strings.load()
    ids = np.array(tokenizer.encode(text, add_special_tokens=False).ids)
    found = [count for count in range(1, len(ids) + 1) if strings.are_completed(ids[:count], stop)]
    said = [tokenizer.decode(ids[:count].tolist(), skip_special_tokens=False) for count in found[:1]]
    assert said == ([at] if at else [])


def test_a_model_without_a_tokenizer_is_told(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"rollout\.stop needs a tokenizer"):
        StopStrings(tmp_path).load()
