"""Low-rank adapters in the decoder: beside PEFT's model, installed over any other, and bits that do not depend on neighbours."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor

from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout import probe
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.engines.rollout.decoder_weights import load_tensors
from asyncflow.engines.rollout.low_rank import AdapterRows, LowRank
from asyncflow.types import LoraSpec
from tests.unit.engines.rollout.test_decoder import MODELS, new_model

SPEC = LoraSpec(rank=4, alpha=8.0)


def new_decoder(path: Path, spec: LoraSpec = SPEC, dtype: torch.dtype = torch.float32) -> Decoder:
    config = DecoderConfig.from_fields(json.loads((path / "config.json").read_text()))
    decoder = Decoder(config, num_slots=6, max_context=64, dtype=dtype, device=torch.device("cpu"), lora=spec)
    decoder.install(load_tensors(path))
    return decoder


def adapter(decoder: Decoder, seed: int = 1) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(piece.shape, generator=generator) * 0.1 for name, piece in decoder.lora.slices.items()}


@torch.inference_mode()
def logits_of(decoder: Decoder, tokens: np.ndarray) -> Tensor:
    """After a prefill of all tokens but the last two, and after each of these: [3, V]."""
    first = decoder.prefill([tokens[:-2]], [[0]])
    return torch.cat([first, *(decoder.decode(tokens[i : i + 1], np.array([i])) for i in (len(tokens) - 2, len(tokens) - 1))])


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("targets", [(), ("q_proj", "v_proj", "down_proj"), ("k_proj", "up_proj", "o_proj")], ids=str)
def test_logits_are_those_of_peft(name: str, targets: tuple[str, ...], tmp_path: Path) -> None:
    model = new_model(name)
    model.save_pretrained(tmp_path)
    decoder = new_decoder(tmp_path, LoraSpec(4, 8.0, targets))
    tensors = adapter(decoder)
    wanted = list(targets) or "all-linear"
    theirs = get_peft_model(model, LoraConfig(r=4, lora_alpha=8.0, target_modules=wanted, task_type="CAUSAL_LM")).eval()
    own = {f"base_model.model.{n}".replace(".weight", ".default.weight"): t for n, t in tensors.items()}
    found = theirs.load_state_dict(own, strict=False)
    assert not found.unexpected_keys and not [key for key in found.missing_keys if "lora_" in key], "another set of adapters"
    tokens = np.arange(3, 25) * 5 % 96
    with torch.no_grad():
        base = logits_of(decoder, tokens)
        expected = theirs(torch.tensor(tokens[None])).logits[0, -3:]
    decoder.install(tensors)
    made = logits_of(decoder, tokens)
    torch.testing.assert_close(made, expected, rtol=1e-4, atol=1e-4)
    assert (made - base).abs().max() > 0.1, "the adapter changes nothing"
    decoder.install({})
    assert torch.equal(logits_of(decoder, tokens), base), "without an adapter the model is its base, to the bit"


def test_an_adapter_replaces_another_and_the_weights_stay(tmp_path: Path) -> None:
    new_model("qwen2").save_pretrained(tmp_path)
    decoder, tokens = new_decoder(tmp_path), np.arange(3, 25)
    first, second = adapter(decoder, 1), adapter(decoder, 2)
    before = {name: decoder.installed(name).clone() for name in decoder.shapes}
    seen = []
    for tensors in (first, second, first):
        assert decoder.prepare(tensors) == []
        decoder.install(tensors)
        assert all(torch.equal(decoder.installed(name), tensor) for name, tensor in tensors.items())
        seen.append(logits_of(decoder, tokens))
    assert torch.equal(seen[0], seen[2]) and not torch.equal(seen[0], seen[1])
    assert all(torch.equal(decoder.installed(name), tensor) for name, tensor in before.items())
    decoder.install(load_tensors(tmp_path))  # whole weights, which an adapter is over
    assert torch.equal(logits_of(decoder, tokens), seen[2])


def test_an_adapter_that_binds_to_nothing_or_in_part_is_refused(tmp_path: Path) -> None:
    new_model("qwen2").save_pretrained(tmp_path)
    decoder = new_decoder(tmp_path)
    tensors = adapter(decoder)
    decoder.install(tensors)
    before = logits_of(decoder, np.arange(3, 25))
    half = {name: tensor for name, tensor in tensors.items() if "layers.1." not in name}
    strange = {name.replace("model.layers", "layers"): tensor for name, tensor in tensors.items()}
    wrong = {**tensors, "model.layers.0.self_attn.q_proj.lora_A.weight": torch.zeros(8, 48)}
    for wanted, why in ((half, "lacks 14 of 42 tensors"), (strange, "lacks 42 of 42 tensors"), (wrong, "has shape|of shape")):
        for call in (decoder.prepare, decoder.install):
            with pytest.raises(ValueError, match=why):
                call(wanted)
    assert torch.equal(logits_of(decoder, np.arange(3, 25)), before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_bit_of_a_slot_depends_on_its_neighbours(dtype: torch.dtype, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    new_model("qwen2").save_pretrained(tmp_path)
    decoder = new_decoder(tmp_path, dtype=dtype)
    assert probe.find_dependence(decoder, num_slots=6, max_context=64, lora=SPEC) == ""
    assert logits_of(decoder, np.arange(3, 25)).equal(logits_of(new_decoder(tmp_path, dtype=dtype), np.arange(3, 25)))
    plain = LowRank.add_to

    def by_number_of_rows(self: LowRank, output: Tensor, x: Tensor, adapted: AdapterRows) -> None:
        plain(self, output, x, adapted)
        output.mul_(1 + len(x) * 2e-3)

    def of_all_rows(self: LowRank, output: Tensor, x: Tensor, adapted: AdapterRows) -> None:
        plain(self, output, x, AdapterRows(adapted.number))

    for fault, seen in ((by_number_of_rows, "depend on the prompts beside it"), (of_all_rows, "the adapter of the slot beside it")):
        monkeypatch.setattr(LowRank, "add_to", fault)
        assert seen in probe.find_dependence(decoder, num_slots=6, max_context=64, lora=SPEC)
