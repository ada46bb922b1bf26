"""Small random models of many families, and whether AsyncFlow computes them as transformers does: `python -m tests.families FILE`.

    config of a family -> folder -> logits, log-probs, gradients, a GRPO step, a checkpoint --> Findings
                                 -> the same step on two ranks, sharded each way -----------+
                                 -> responses of the rollout engines -----------------------+

Run as a program, it examines all of them, and writes the table into a page (docs/models.md) between its two marks. Where
ASYNCFLOW_VLLM_PYTHON names an interpreter that has vLLM, that is asked for its list of models.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from asyncflow.algorithms.grpo import GRPO
from asyncflow.engines.base import MicroBatch, Response, RolloutEngine, SampleKey, Sampling, TrainEngine
from asyncflow.engines.rollout.engine import SlotEngine
from asyncflow.engines.rollout.transformers_engine import TransformersEngine
from asyncflow.engines.train import OUTSIDE, TRAIN_ENGINE_CHECKS
from asyncflow.engines.train.model.log_probs import _logits
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.model_folder import read_json
from asyncflow.registry import build
from asyncflow.types import Layout, Ragged, UserError
from tests.conftest import MODEL
from tests.unit.engines.train.parallel.processes import Processes
from tests.unit.engines.train.training import torch_engine, train_options
from tests.vllm.servers import VLLM_PYTHON

BASE: dict[str, Any] = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
CAPS = {"final_logit_softcapping": 2.0, "attn_logit_softcapping": 1.0, "query_pre_attn_scalar": 8}
MOE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
MAMBA = {"state_size": 8, "expand": 2, "conv_kernel": 4}
CONFIGS: dict[str, tuple[str, dict[str, Any], str]] = {
    # model_type, what differs from BASE, what is special
    "qwen2": ("qwen2", {}, "biases of q, k, v"),
    "qwen3": ("qwen3", {}, "norms of heads"),
    "llama": ("llama", {}, ""),
    "mistral": ("mistral", {"sliding_window": None}, ""),
    "mistral, windows": ("mistral", {"sliding_window": 6}, "sliding windows"),
    "phi3": ("phi3", {"sliding_window": None, "partial_rotary_factor": 0.5}, "fused matrices, partial rotary"),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "residual_multiplier": 0.3, "attention_multiplier": 0.2, "logits_scaling": 4.0},
        "multipliers",
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}, "layers without rotary"),
    "olmo2": ("olmo2", {}, "norms behind the layers"),
    "gemma": ("gemma", {"tie_word_embeddings": True}, "scaled embeddings"),
    "gemma2": ("gemma2", {"sliding_window": 128, **CAPS}, "soft caps, norms on both sides"),
    "gemma2, windows": ("gemma2", {"sliding_window": 6, **CAPS}, "soft caps, sliding windows"),
    "gemma3_text": ("gemma3_text", {"sliding_window": 128, "query_pre_attn_scalar": 8}, "two rotations, norms on both sides"),
    "gemma3_text, windows": ("gemma3_text", {"sliding_window": 6, "query_pre_attn_scalar": 8}, "two rotations, sliding windows"),
    "cohere": ("cohere", {"logit_scale": 0.25}, "parallel layers, scaled logits"),
    "starcoder2": ("starcoder2", {"sliding_window": None}, "LayerNorm, biases"),
    "glm": ("glm", {"partial_rotary_factor": 0.5}, "partial rotary"),
    "helium": ("helium", {}, ""),
    "seed_oss": ("seed_oss", {}, ""),
    "ernie4_5": ("ernie4_5", {}, ""),
    "stablelm": ("stablelm", {"partial_rotary_factor": 0.5}, "partial rotary"),
    "gpt2": ("gpt2", {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "n_inner": 48}, "learned positions"),
    "gpt_neox": ("gpt_neox", {"rotary_pct": 0.5}, "parallel layers, partial rotary"),
    "opt": ("opt", {"ffn_dim": 48, "word_embed_proj_dim": 32}, "learned positions"),
    "phi": ("phi", {"partial_rotary_factor": 0.5}, "bias of the output layer"),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}, "ALiBi"),
    "mixtral": ("mixtral", {**MOE, "sliding_window": None}, "mixture of experts"),
    "qwen3_moe": ("qwen3_moe", {**MOE, "mlp_only_layers": []}, "mixture of experts"),
    "gpt_oss": ("gpt_oss", {**MOE, "sliding_window": 6}, "mixture of experts, sinks, sliding windows"),
    "deepseek_v3": (
        "deepseek_v3",
        {
            **{"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "n_group": 2},
            **{"topk_group": 1, "first_k_dense_replace": 1, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 8, "v_head_dim": 8, "head_dim": 8, "num_key_value_heads": 4},
        },
        "MLA, mixture of experts",
    ),
    "mamba": ("mamba", MAMBA, "state space"),
    "mamba2": ("mamba2", {**MAMBA, "num_heads": 8, "head_dim": 8, "n_groups": 2, "chunk_size": 16}, "state space"),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8}, "convolutions and attention"),
    "recurrent_gemma": (
        "recurrent_gemma",
        {"lru_width": 32, "attention_window_size": 6, "num_hidden_layers": 3, "logits_soft_cap": 2.0},
        "recurrences and attention, soft caps, sliding windows",
    ),
    # Its caches have heads of a size that it rounds up to 64 for all of them together.
    "xlstm": ("xlstm", {"num_heads": 2, "hidden_size": 128, "output_logit_soft_cap": 2.0}, "matrix memories, soft caps"),
    "falcon_h1": (
        "falcon_h1",
        {
            **{"mamba_d_ssm": 32, "mamba_n_heads": 4, "mamba_d_head": 8, "mamba_n_groups": 1, "mamba_d_state": 8},
            **{"mamba_chunk_size": 16, "lm_head_multiplier": 0.5},
        },
        "hybrid of attention and state space",
    ),
    "jamba": (
        "jamba",
        {
            **{
                "attn_layer_period": 2,
                "attn_layer_offset": 1,
                "expert_layer_period": 2,
                "expert_layer_offset": 1,
                "num_experts": 4,
            },
            **{"num_experts_per_tok": 2, "mamba_d_state": 8, "mamba_dt_rank": 4, "use_mamba_kernels": False},
        },
        "hybrid of attention and state space, mixture of experts",
    ),
    "rwkv": ("rwkv", {"attention_hidden_size": 32, "context_length": 128}, "recurrent"),
}
PROMPT, RESPONSES = 7, (9, 4, 12)
OPTIONS: dict[str, Any] = {"temperature": 0.7, "learning_rate": 1e-3, "max_grad_norm": None}
OBJECTIVE = GRPO(clip_low=0.2, clip_high=0.2)
CUTS = {"dp": Layout(2, 1, 1), "tp": Layout(1, 2, 1), "pp": Layout(1, 1, 2)}
LISTED = "import json, vllm; print(json.dumps([vllm.__version__, [*vllm.ModelRegistry.get_supported_archs()]]))"
BEGIN, END = "<!-- made by `python -m tests.families docs/models.md` -->", "<!-- end -->"


@dataclass
class Findings:
    """What was seen of a family. Differences are in nats, those of gradients relative to their norm."""

    way: str
    architecture: str
    logits: float
    logprobs: float
    gradients: float
    trainers: list[str]
    cuts: dict[str, float] = field(default_factory=dict)  # largest difference from one rank, by what the model is sharded by
    rollout: dict[str, float] = field(default_factory=dict)  # largest difference by engine
    refused: dict[str, str] = field(default_factory=dict)
    is_loaded: bool = False


def write_model(name: str, folder: Path) -> Path:
    """A random model of the family, whose norms and biases are random, too."""
    kind, changes, _ = CONFIGS[name]
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **{**BASE, **changes}), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    model.save_pretrained(folder)
    return folder


def micro_batch(seed: int = 0) -> MicroBatch:
    """Rows of several lengths, long enough for the sliding windows."""
    rng = np.random.default_rng(seed)
    ids, offsets = rng.integers(3, 61, sum(RESPONSES)), np.cumsum([0, *RESPONSES])
    return MicroBatch(
        indices=np.arange(len(RESPONSES)),
        prompt_ids=rng.integers(3, 61, PROMPT),
        response_ids=Ragged(ids, offsets),
        loss_mask=Ragged(np.ones(len(ids), np.uint8), offsets),
        rollout_logprobs=Ragged(np.full(len(ids), -4.0, np.float32), offsets),
        advantages=np.array([1.0, -0.5, 0.7], np.float32),
        staleness=np.zeros(len(RESPONSES), np.int64),
    )


def plain_logits(model: Any, prompt_ids: np.ndarray, response_ids: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """Logits [length, V] of a response's tokens by transformers alone, a row of its own."""
    row = torch.tensor(np.concatenate([prompt_ids, response_ids]))
    logits: torch.Tensor = model(input_ids=row[None], use_cache=False).logits[0, len(prompt_ids) - 1 : -1].float() / temperature
    return logits


def plain_log_probs(model: Any, prompt_ids: np.ndarray, response_ids: np.ndarray, temperature: float = 1.0) -> torch.Tensor:
    """Log-probs of a response by transformers alone, a row of its own."""
    logits = plain_logits(model, prompt_ids, response_ids, temperature)
    return logits.log_softmax(-1).gather(1, torch.tensor(response_ids)[:, None])[:, 0]


def trainers_of(fields: Mapping[str, Any], **changes: Any) -> list[str]:
    """Train engines whose checks take a model, with these options, whether or not they are installed here."""
    found = []
    with patch("asyncflow.engines.train.adapters.checks._check_installed"):
        for name in [name for name in TRAIN_ENGINE_CHECKS if name != OUTSIDE]:
            try:
                build("train engine", name, {"options": train_options(**changes), "fields": fields}, TRAIN_ENGINE_CHECKS)
            except UserError:
                continue
            found.append(name)
    return found


def rank_s_part(path: Path, layout: Layout) -> tuple[float, np.ndarray] | None:
    """A rank's part of a GRPO step of two groups: of a leader the gradient's norm, and log-probs after the update."""
    engine = torch_engine(path, layout=layout, **OPTIONS)
    if engine.data_parallel_rank is None:
        asyncio.run(engine.follow(OBJECTIVE, lambda name: nullcontext()))
        return None
    return asyncio.run(_step(engine, engine.data_parallel_rank, layout.dp))


async def _step(engine: TrainEngine, rank: int, dp: int) -> tuple[float, np.ndarray]:
    batches = [micro_batch(0), micro_batch(1)]
    await engine.begin_step()
    await engine.forward_backward(batches[rank::dp], OBJECTIVE)
    result = await engine.optim_step(2 * sum(RESPONSES))
    log_probs = (await engine.log_probs(batches[0].prompt_ids, batches[0].response_ids)).values
    await engine.close()
    return result.grad_norm, log_probs


def cut_differences(path: Path, ranks: Processes | None) -> dict[str, float]:
    """Largest difference of a step on two ranks from one on one: of the gradient's norm (relative) and log-probs (nats), for each
    way in which the model can be sharded. Without `ranks`, which are only started for such a model, there must be none."""
    found, fields = dict[str, float](), read_json(path / "config.json")
    for cut, layout in CUTS.items():
        if "torch" not in trainers_of(fields, layout=layout):
            continue
        assert ranks is not None, "the model can be sharded"
        norm, log_probs = asyncio.run(_step(torch_engine(path, **OPTIONS), 0, 1))
        leaders = [answer for answer in ranks.run(rank_s_part, path, layout) if answer is not None]
        assert len(leaders) == layout.dp
        found[cut] = max(max(abs(n / norm - 1), float(np.abs(theirs - log_probs).max())) for n, theirs in leaders)
    return found


def examine(name: str, folder: Path, ranks: Processes | None = None) -> Findings:
    """Examine one family in an empty folder. `ranks`: two, for one that can be sharded."""
    path = write_model(name, folder / "model")
    fields = read_json(path / "config.json")
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    batch, temperature = micro_batch(), OPTIONS["temperature"]
    training = OneRank(path, train_options(**OPTIONS))
    with torch.no_grad():
        logits_TV = _logits(*training.policy.hidden(training.policy.pack(batch.prompt_ids, batch.response_ids)))
        plain_TV = torch.cat([plain_logits(model, batch.prompt_ids, response, temperature) for response in batch.response_ids])
    ours = training.log_probs(batch.prompt_ids, batch.response_ids).values
    theirs_T = torch.cat([plain_log_probs(model, batch.prompt_ids, response, temperature) for response in batch.response_ids])
    # The first update of GRPO: ratios are 1, so its gradient is that of the sum of advantage x log-prob.
    (theirs_T * torch.from_numpy(batch.token_advantages)).sum().neg().backward()
    training.forward_backward([batch], OBJECTIVE)
    own = {n: p.grad for n, p in training.policy.parameters.items()}
    pairs = [[torch.zeros_like(p) if g is None else g.clone() for g in (own[n], p.grad)] for n, p in model.named_parameters()]
    distance, size = (
        torch.stack([t.double().norm() for t in ts]).norm().item() for ts in ([a - b for a, b in pairs], [b for _, b in pairs])
    )
    found = Findings(
        training.policy.way,
        fields["architectures"][0],
        float((logits_TV - plain_TV).abs().max()),
        float(np.abs(ours - theirs_T.detach().numpy()).max()),
        distance / size,
        trainers_of(fields),
        cut_differences(path, ranks),
    )

    before = {n: p.detach().clone() for n, p in training.policy.parameters.items()}
    result = training.optim_step(len(batch.response_ids.values))
    assert not result.skipped and any(not torch.equal(before[n], p) for n, p in training.policy.parameters.items())
    training.save(folder / "out")
    again = AutoModelForCausalLM.from_pretrained(folder / "out", dtype=torch.float32).eval()
    with torch.no_grad():
        loaded_T = torch.cat([plain_log_probs(again, batch.prompt_ids, response, temperature) for response in batch.response_ids])
    trained = training.log_probs(batch.prompt_ids, batch.response_ids).values
    found.is_loaded = float(np.abs(trained - loaded_T.numpy()).max()) < 1e-4 and float(np.abs(trained - ours).max()) > 1e-4

    weights = {n: p.detach() for n, p in training.policy.parameters.items()}
    for engine, make in (("slots", SlotEngine), ("transformers", TransformersEngine)):
        try:
            built = make(path, num_slots=6, max_context=64, stop_ids=())
        except ValueError as error:
            found.refused[engine] = str(error)
            continue
        found.rollout[engine] = asyncio.run(_rollout_difference(built, weights, model, again, batch.prompt_ids))
    return found


async def _rollout_difference(
    engine: RolloutEngine, weights: dict[str, torch.Tensor], before: Any, after: Any, prompt_ids: np.ndarray
) -> float:
    """Largest difference of an engine's log-probs from plain transformers': with the first weights, and with trained ones."""
    largest = 0.0
    try:
        for version, model in ((0, before), (1, after)):
            if version:
                await engine.install(version, weights)
            stream = engine.generate(prompt_ids, samples=range(3), sampling=Sampling(0.7, 20), key=SampleKey(1, 2))
            made: list[Response] = [response async for response in stream]
            assert {len(r.token_ids) for r in made} == {20} and len({tuple(r.token_ids) for r in made}) == 3
            for response in made:
                with torch.no_grad():
                    theirs = plain_log_probs(model, prompt_ids, response.token_ids, 0.7).numpy()
                largest = max(largest, float(np.abs(theirs - response.logprobs).max()))
    finally:
        await engine.close()
    return largest


def faults(found: Findings) -> list[str]:
    """What is not as it should be."""
    told = [f"{cut} differs by {value:.2g}" for cut, value in found.cuts.items() if value > 1e-4]
    if found.logits > 1e-4:
        told.append(f"logits differ by {found.logits:.2g}")
    if found.logprobs > 1e-4:
        told.append(f"log-probs differ by {found.logprobs:.2g}")
    if found.gradients > 1e-4:
        told.append(f"gradients differ by {found.gradients:.2g}")
    told += [f"{engine} differs by {value:.2g}" for engine, value in found.rollout.items() if value > 1e-4]
    if "transformers" not in found.rollout:
        told.append(f"transformers refuses it: {found.refused['transformers']}")
    if not found.is_loaded:
        told.append("its checkpoint is not what was trained")
    return told


def listed_by_vllm() -> tuple[str, list[str]]:
    """Version of the vLLM that is here, and the architectures in its list of models; "" and none where it is not."""
    if VLLM_PYTHON is None:
        return "", []
    said = subprocess.run([VLLM_PYTHON, "-c", LISTED], capture_output=True, text=True, check=True).stdout
    version, architectures = json.loads(said.splitlines()[-1])
    return version, architectures


def table(all_found: Mapping[str, Findings], vllm: tuple[str, list[str]]) -> str:
    """The table of docs/models.md, and what its last column says. `vllm`: from `listed_by_vllm`."""
    version, listed = vllm
    tested = read_json(MODEL / "config.json")["model_type"]
    columns = [
        *("`model_type`", "special", "trained", "prompts shared", "logits, log-probs, gradients against transformers"),
        *("trainers", "sharded by", "rollout: `slots`", "rollout: `transformers`", "rollout: `vllm`"),
    ]
    lines = [columns, ["---"] * len(columns)]
    for name, found in all_found.items():
        kind, _, special = CONFIGS[name]
        of_vllm = "tested" if kind == tested else "not tried here"
        if kind != tested and version:
            of_vllm = "listed" if found.architecture in listed else "-"
        lines.append(
            [
                f"`{kind}`",
                special,
                {"packed": "packed", "batched": "rows in batches", "alone": "rows one by one"}[found.way],
                "yes" if found.way == "packed" else "-",
                ", ".join(f"{value:.0e}" for value in (found.logits, found.logprobs, found.gradients)),
                ", ".join(f"`{trainer}`" for trainer in found.trainers),
                ", ".join(found.cuts) or "-",
                *(f"{found.rollout[engine]:.0e}" if engine in found.rollout else "-" for engine in ("slots", "transformers")),
                of_vllm,
            ]
        )
    told = f"`vllm`: `tested` by the suite of that name; `listed` in vLLM {version}'s list of models, and not tried here."
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + (f"\n\n{told}" if version else "")


def main() -> int:
    """Examine all families, and write the table into the page that is named."""
    found, bad, ranks = dict[str, Findings](), 0, Processes(2)
    for name in CONFIGS:
        with tempfile.TemporaryDirectory() as folder:
            try:
                found[name] = examine(name, Path(folder), ranks)
            except Exception as error:  # a family that cannot be examined is told, and the others are
                print(f"{name}: {type(error).__name__}: {error}", flush=True)
                bad += 1
                continue
        told = faults(found[name])
        bad += bool(told)
        print(f"{name}: {'; '.join(told) or 'as it should be'} {found[name]}", flush=True)
    ranks.close()
    if len(sys.argv) > 1 and not bad:
        page = Path(sys.argv[1])
        text = page.read_text()
        head, rest = text.split(BEGIN)
        page.write_text(f"{head}{BEGIN}\n\n{table(found, listed_by_vllm())}\n\n{END}{rest.split(END)[1]}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
