"""The torch engine under a layout, over gloo: what several ranks compute is what one process does, and nobody waits for ever."""

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from asyncflow.engines.train.model.packing import INERT_TOKENS, pack_thrifty
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.types import Array, Layout, LoraSpec
from tests import depth
from tests.depth import in_gate
from tests.unit.engines.train.parallel import training_ranks as on_ranks
from tests.unit.engines.train.parallel.processes import Processes, RankFailed
from tests.unit.engines.train.training import ModelPath, moved_less, train_options, untied

OPTIONS: dict[str, Any] = {"learning_rate": 1e-3, "warmup_steps": 3, "weight_decay": 0.1, "max_grad_norm": 0.05}
OPTIONS |= {"log_prob_chunk_tokens": 16}
LORA = LoraSpec(rank=2, alpha=4.0, targets=("q_proj", "down_proj"))


@pytest.fixture(scope="module")
def ranks() -> Iterator[Processes]:
    """Eight, of which most tests take two or four."""
    processes = Processes(8)
    yield processes
    processes.close()


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of eight layers, whose head is not its embedding and takes under a quarter of it."""
    return save_llama(tmp_path_factory.mktemp("deep"), num_hidden_layers=8, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of two layers, whose heads four ranks may share."""
    return save_llama(tmp_path_factory.mktemp("wide"), num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=4)


def save_llama(path: Path, **sizes: int) -> Path:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 64, "intermediate_size": 176, "vocab_size": 250, **sizes}
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False)).save_pretrained(path)
    return path


def difference(one: dict[str, Array], many: dict[str, Array]) -> float:
    """The distance of the gradients, relative to their norm."""
    assert one.keys() == many.keys()
    distance = sum(float(((one[name] - many[name]).astype(np.float64) ** 2).sum()) for name in one)
    return float(np.sqrt(distance / sum(float((one[name].astype(np.float64) ** 2).sum()) for name in one)))


@pytest.mark.parametrize(
    ("dp", "family", "is_shared", "more"),
    [
        (2, "qwen2-tiny", True, {"old": "previous", "has_reference": True}),
        pytest.param(2, "llama-tiny", False, {"activation_checkpointing": True}, marks=depth.deep),
        pytest.param(
            4, "qwen3-tiny", True, {"dtype": "bfloat16", "frozen_dtype": "bfloat16", "old": "step_start"}, marks=depth.deep
        ),
    ],
)
def test_data_parallel_ranks_have_the_bits_of_one_process(
    ranks: Processes, model_path: ModelPath, dp: int, family: str, is_shared: bool, more: dict[str, Any]
) -> None:
    """Clipped, 5 steps, with unequal and with no micro-batches; activations computed again, and frozen models, change nothing."""
    options = {**OPTIONS, "accumulate": "exact", **more}
    steps = on_ranks.make_steps(dp, is_shared=is_shared, staleness=int(options.get("old") == "previous"))
    assert all(on_ranks.shared_ways(rounds) == {is_shared} for rounds in steps)
    alone = on_ranks.train_alone(model_path(family), steps, options | {"activation_checkpointing": False})
    first, *others = ranks.run(on_ranks.train, model_path(family), steps, Layout(dp=dp), options, size=dp)
    assert all(update.grad_norm > 2 * OPTIONS["max_grad_norm"] for update in alone.updates)
    assert all(other.updates == first.updates for other in others)
    assert [replace(update, fill_tokens=0) for update in first.updates] == alone.updates
    rounds = [[len(batches) for batches in round_] for step in steps for round_ in step]
    missing = sum(max(counts) - count for counts in rounds for count in counts)
    assert missing > 3 * dp and sum(update.fill_tokens for update in first.updates) == missing * INERT_TOKENS
    assert first.fingerprint == alone.fingerprint and len(first.fingerprint) == 4 * len(first.weights)
    assert first.weights.keys() == alone.weights.keys()
    assert all(np.array_equal(first.weights[name], alone.weights[name]) for name in alone.weights)
    assert not any(other.weights or other.fingerprint for other in others)
    by_loss = sorted((result for made in (first, *others) for result in made.results), key=lambda result: result.loss_sum)
    assert by_loss == sorted(alone.results, key=lambda result: result.loss_sum)


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2), pytest.param(Layout(pp=2), marks=depth.deep)], ids=str)
def test_ranks_make_the_next_step_while_the_weights_that_they_have_gathered_are_hashed(
    ranks: Processes, model_path: ModelPath, tmp_path: Path, layout: Layout
) -> None:
    """Were they held meanwhile, none would come to an end; and what is published is what one process has published."""
    options = {**OPTIONS, "accumulate": "exact"}
    (rounds,) = on_ranks.make_steps(layout.dp, num_steps=1)
    made, *others = ranks.run(on_ranks.publish, model_path("qwen2-tiny"), rounds, layout, options, tmp_path / "many", size=2)
    assert made[0] == made[1] and made[0].sums and others == [None]
    if layout.dp == 2:
        joined = [[[batch for group in round_ for batch in group]] for round_ in rounds]
        alone = on_ranks.publish(model_path("qwen2-tiny"), joined, Layout(), options, tmp_path / "alone")
        assert alone == made


@pytest.mark.parametrize(
    ("layout", "family", "changes", "most"),
    [
        pytest.param(Layout(dp=2), "qwen2-tiny", {}, None, marks=depth.deep),
        (Layout(dp=2), "llama-tiny", {"dtype": "bfloat16", "activation_checkpointing": True}, 5),
        pytest.param(Layout(dp=2), "qwen2-tiny", {"accumulate": "fp32"}, None, marks=depth.deep),
        (Layout(pp=2), "qwen2-tiny", {"pipeline_micro_batches": 2}, None),
        pytest.param(Layout(dp=2), "qwen2-tiny", {"lora": LORA, "old": "step_start"}, None, marks=depth.deep),
        pytest.param(Layout(pp=2), "qwen2-tiny", {}, 5, marks=depth.deep),
        (Layout(tp=2), "qwen2-tiny", {"lora": LORA}, None),
        pytest.param(Layout(tp=2), "qwen2-tiny", {}, 5, marks=depth.deep),
        pytest.param(Layout(dp=2, tp=2), "qwen2-tiny", {}, None, marks=depth.deep),
        pytest.param(Layout(dp=2, pp=2), "deep", {}, None, marks=depth.deep),
    ],
    ids=str,
)
def test_helpers_of_ranks_take_pieces_with_the_same_bits(
    ranks: Processes, model_path: ModelPath, deep: Path, layout: Layout, family: str, changes: dict[str, Any], most: int | None
) -> None:
    """`most`: pieces after which a rank's helper leaves, in the middle of a pass. With plain sums only the update has pieces."""
    path = deep if family == "deep" else model_path(family)
    options = {**OPTIONS, "accumulate": "exact", "tokens_per_pass": 1000, **changes}
    steps = on_ranks.make_steps(layout.dp, num_steps=2)
    alone = ranks.run(on_ranks.train, path, steps, layout, options, size=layout.size)
    helped = ranks.run(on_ranks.train_helped, path, steps, layout, options, most, size=layout.size)
    for expected, (found, taken) in zip(alone, helped, strict=True):
        if expected is not None:
            assert (found.results, found.updates, found.fingerprint) == (expected.results, expected.updates, expected.fingerprint)
        if most is None:
            assert (taken["forward_backward"] > 0) == (options["accumulate"] == "exact") and taken["optim_step"] > 0
        else:
            assert taken == {"forward_backward": most, "optim_step": 0}
    assert alone[0].fingerprint


@pytest.mark.parametrize("is_shared", in_gate(True, of=[True, False]), ids=["shared", "rows"])
@pytest.mark.parametrize(
    ("layout", "family", "family_in_rows"),
    [
        pytest.param(Layout(dp=2), "qwen2-tiny", "llama-tiny", marks=depth.deep),
        pytest.param(Layout(tp=2), "qwen2-tiny", "qwen3-tiny", marks=depth.deep),
        pytest.param(Layout(pp=2), "qwen2-tiny", "deep", marks=depth.deep),
        pytest.param(Layout(dp=2, tp=2), "qwen3-tiny", "qwen2-tiny", marks=depth.deep),
        pytest.param(Layout(tp=2, pp=2), "llama-tiny", "qwen2-tiny", marks=depth.deep),
        (Layout(dp=2, pp=2), "qwen2-tiny", "qwen3-tiny"),
        pytest.param(Layout(dp=2, tp=2, pp=2), "qwen2-tiny", "qwen2-tiny", marks=depth.deep),
    ],
    ids=lambda value: f"{value.dp}x{value.tp}x{value.pp}" if isinstance(value, Layout) else str(value),
)
def test_losses_and_gradients_of_a_layout_are_those_of_one_process(
    ranks: Processes, model_path: ModelPath, deep: Path, layout: Layout, family: str, family_in_rows: str, is_shared: bool
) -> None:
    """Of micro-batches that share their prompt, and of such as have it in each row."""
    family = family if is_shared else family_in_rows
    path = deep if family == "deep" else model_path(family)
    options = {**OPTIONS, "has_reference": True, "check_shared_prompt": is_shared}
    (rounds,) = on_ranks.make_steps(layout.dp, num_steps=1, is_shared=is_shared)
    assert on_ranks.shared_ways(rounds) == {is_shared}
    alone = on_ranks.gradients_alone(path, rounds, options)
    for most_fill in (1.0, 0.0) if layout.pp > 1 else (0.0,):  # the micro-batches of a round at one length, and at their own
        own = {**options, "pipeline_fill": most_fill}
        answers = ranks.run(on_ranks.gradients, path, rounds, layout, own, size=layout.size)
        assert difference(alone.sums, answers[0].sums) < 1e-5
        assert len({answer.norm for answer in answers}) == 1 and answers[0].norm == pytest.approx(alone.norm, rel=1e-5)
        if layout.pp > 1 and family != "deep":  # both ends of the pipeline still have the same matrix, each rank its part
            first, last = ([answers[stage * layout.tp + i].tied for i in range(layout.tp)] for stage in (0, layout.pp - 1))
            assert first == last and None not in first
        each = layout.tp * layout.pp
        seen = [result for leader in range(0, layout.size, each) for result in answers[leader].results]
        for ours, theirs in zip(*(sorted(r, key=lambda result: result.loss_sum) for r in (seen, alone.results)), strict=True):
            assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-5)
            assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
            assert (ours.loss_tokens, ours.physical_tokens) == (theirs.loss_tokens, theirs.physical_tokens)
        for rank, answer in enumerate(answers):  # those that follow know what their leader does
            assert answer.results == answers[rank - rank % each].results


@pytest.mark.parametrize(
    ("layout", "family", "more"),
    [
        pytest.param(Layout(pp=3), "qwen2-small", {}, marks=depth.deep),
        pytest.param(Layout(pp=4), "deep", {"activation_checkpointing": True}, marks=depth.deep),
        pytest.param(Layout(tp=4), "wide", {}, marks=depth.deep),
        (Layout(tp=2, pp=2), "qwen3-tiny", {"activation_checkpointing": True}),
        pytest.param(Layout(tp=2), "qwen2-tiny", {"dtype": "bfloat16"}, marks=depth.deep),
        pytest.param(Layout(pp=2), "qwen2-tiny", {"dtype": "bfloat16"}, marks=depth.deep),
    ],
    ids=["pp3", "pp4-recomputed", "tp4", "tp2-pp2-recomputed", "tp2-bfloat16", "pp2-bfloat16"],
)
def test_steps_of_a_layout_are_those_of_one_process(
    ranks: Processes, model_path: ModelPath, deep: Path, wide: Path, layout: Layout, family: str, more: dict[str, Any]
) -> None:
    """Also through stages that are neither first nor last; of more micro-batches than there are stages, and of fewer."""
    path = {"deep": deep, "wide": wide}.get(family) or model_path(family)
    # Updates of which bfloat16 weights would lose most.
    options = {**OPTIONS, "learning_rate": 1e-5, "warmup_steps": 0, "weight_decay": 0.0, "old": "step_start", **more}
    batches = [on_ranks.make_batch(i, lengths, 20) for i, lengths in enumerate([(5, 3), (9, 14, 2), (4, 4), (3, 1), (7, 5), (2,)])]
    steps = [[[batches]], [[batches[3:5]], [batches[2:3]]]]
    alone = on_ranks.train_alone(path, steps, options | {"activation_checkpointing": False})
    first, *others = ranks.run(on_ranks.train, path, steps, layout, options, size=layout.size)
    assert others == [None] * (layout.size - 1)
    is_rounded = options.get("dtype") == "bfloat16"
    assert len(first.results) == len(alone.results) == 9
    for ours, theirs in zip(first.results, alone.results, strict=True):
        assert ours.loss_sum == pytest.approx(theirs.loss_sum, rel=1e-3 if is_rounded else 1e-5)
        assert ours.loss_tokens == theirs.loss_tokens
    for ours, theirs in zip(first.updates, alone.updates, strict=True):
        assert ours.grad_norm == pytest.approx(theirs.grad_norm, rel=1e-2 if is_rounded else 1e-5) and not ours.skipped
        assert ours.learning_rate == theirs.learning_rate == 1e-5
    of_ranks, of_one = ({name: torch.from_numpy(array) for name, array in made.weights.items()} for made in (first, alone))
    moved_less(of_ranks, of_one, load_file(path / "model.safetensors"), 0.3 if is_rounded else 1e-3)
    assert len(first.fingerprint) == 4 * len(of_one)


@pytest.mark.parametrize("layout", in_gate(Layout(pp=2), of=[Layout(tp=2), Layout(pp=2)]), ids=str)
def test_layers_are_passed_twice_where_activations_are_computed_again(
    ranks: Processes, model_path: ModelPath, layout: Layout
) -> None:
    for is_asked, times in ((True, 2), (False, 1)):
        options = {**OPTIONS, "activation_checkpointing": is_asked, "check_shared_prompt": False}
        assert ranks.run(on_ranks.layer_passes, model_path("qwen2-tiny"), layout, options, size=2) == [times] * 2


@pytest.mark.parametrize(
    ("layout", "family", "is_shared"),
    [
        pytest.param(Layout(pp=2), "qwen2-tiny", True, marks=depth.deep),
        pytest.param(Layout(tp=2, pp=2), "llama-tiny", False, marks=depth.deep),
        (Layout(dp=2, pp=2), "qwen3-tiny", True),
    ],
    ids=lambda value: f"{value.dp}x{value.tp}x{value.pp}" if isinstance(value, Layout) else str(value),
)
def test_a_pipeline_filled_to_one_length_computes_the_same_and_tells_the_fill(
    ranks: Processes, model_path: ModelPath, layout: Layout, family: str, is_shared: bool
) -> None:
    """Two micro-batches of unequal lengths for the first group; for the second, if there is one, then none."""
    num_prompt_tokens, lengths = (20, [(5, 3), (9, 14, 2), (4, 4), (3, 1)]) if is_shared else (1, [(7, 5), (9, 14, 2), (6, 6)])
    batches = [on_ranks.make_batch(seed, each, num_prompt_tokens) for seed, each in enumerate(lengths)]
    rounds = [[batches[:2], batches[2:]][: layout.dp], [batches[1:3], []][: layout.dp]]
    assert on_ranks.shared_ways(rounds) == {is_shared}
    options = {**OPTIONS, "has_reference": True, "old": "step_start", "check_shared_prompt": is_shared, "pipeline_fill": 1.0}
    alone = on_ranks.gradients_alone(model_path(family), rounds, options)
    answers = ranks.run(on_ranks.gradients, model_path(family), rounds, layout, options, size=layout.size)
    assert difference(alone.sums, answers[0].sums) < 1e-5 and answers[0].norm == pytest.approx(alone.norm, rel=1e-5)
    seen = [result for leader in range(0, layout.size, layout.tp * layout.pp) for result in answers[leader].results]
    for ours, theirs in zip(*(sorted(r, key=lambda result: result.loss_sum) for r in (seen, alone.results)), strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
        assert (ours.loss_tokens, ours.physical_tokens) == (theirs.loss_tokens, theirs.physical_tokens)
    tokens = [[[pack_thrifty(b.prompt_ids, b.response_ids).num_tokens for b in group] for group in round_] for round_ in rounds]
    fill = sum(max(group) - one for round_ in tokens for group in round_ for one in group)
    inert = INERT_TOKENS * sum(max(map(len, round_)) - len(group) for round_ in tokens for group in round_)
    assert fill and bool(inert) == (layout.dp > 1)
    assert [answer.fill_tokens for answer in answers] == [fill + inert] * layout.size


@pytest.mark.parametrize(
    "layout", in_gate(Layout(dp=2), of=[Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2, pp=2)]), ids=str
)
def test_passes_of_several_micro_batches_compute_the_same(ranks: Processes, model_path: ModelPath, layout: Layout) -> None:
    """The first group has a pass of three and one of a single micro-batch, the second one pass, then none."""
    batches = [on_ranks.make_batch(seed, lengths, 20) for seed, lengths in enumerate([(5, 3), (9, 14, 2), (4, 4), (3, 1), (6, 6)])]
    rounds = [[batches[:3], batches[3:]][: layout.dp], [batches[1:4], []][: layout.dp]]
    path, options = model_path("qwen2-tiny"), {**OPTIONS, "has_reference": True, "old": "step_start"}
    alone = on_ranks.gradients_alone(path, rounds, options)
    answers = ranks.run(on_ranks.gradients, path, rounds, layout, {**options, "tokens_per_pass": 110}, size=layout.size)
    assert difference(alone.sums, answers[0].sums) < 1e-5 and answers[0].norm == pytest.approx(alone.norm, rel=1e-5)
    seen = [result for leader in range(0, layout.size, layout.tp * layout.pp) for result in answers[leader].results]
    for ours, theirs in zip(*(sorted(r, key=lambda result: result.loss_sum) for r in (seen, alone.results)), strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5)
        assert (ours.loss_tokens, ours.physical_tokens) == (theirs.loss_tokens, theirs.physical_tokens)


@pytest.mark.parametrize("is_token_local", in_gate(True, of=[True, False]))
@pytest.mark.parametrize(
    ("layout", "family", "more"),
    [
        pytest.param(Layout(dp=2), "qwen2-tiny", {"old": "previous", "has_reference": True}, marks=depth.deep),
        pytest.param(Layout(dp=3), "llama-tiny", {"activation_checkpointing": True}, marks=depth.deep),
        pytest.param(Layout(dp=2), "untied", {"dtype": "bfloat16", "activation_checkpointing": True}, marks=depth.deep),
        pytest.param(Layout(dp=2), "qwen3-tiny", {"lora": LORA, "has_reference": True}, marks=depth.deep),
        pytest.param(Layout(pp=2), "untied", {}, marks=depth.deep),
        pytest.param(Layout(pp=2), "qwen3-tiny", {}, marks=depth.deep),
        (Layout(dp=2, pp=2), "qwen3-tiny", {"activation_checkpointing": True}),
        (Layout(tp=2), "qwen3-tiny", {"old": "previous", "has_reference": True}),
        pytest.param(Layout(tp=2), "biased", {"activation_checkpointing": True}, marks=depth.deep),
        pytest.param(Layout(tp=2), "untied", {"dtype": "bfloat16"}, marks=depth.deep),
        pytest.param(Layout(tp=2), "qwen3-tiny", {"lora": LORA, "has_reference": True}, marks=depth.deep),
        pytest.param(Layout(tp=4), "wide", {}, marks=depth.deep),
        pytest.param(Layout(dp=2, tp=2), "qwen3-tiny", {"lora": LORA}, marks=depth.deep),
        pytest.param(Layout(dp=2, tp=2), "qwen2-tiny", {"activation_checkpointing": True}, marks=depth.deep),
        pytest.param(Layout(tp=2, pp=2), "qwen2-tiny", {"has_reference": True}, marks=depth.deep),
        pytest.param(Layout(dp=2, tp=2, pp=2), "qwen2-tiny", {}, marks=depth.deep),
    ],
    ids=lambda value: f"{value.dp}x{value.tp}x{value.pp}" if isinstance(value, Layout) else None,
)
def test_with_exact_sums_no_bit_depends_on_who_is_in_the_pass(
    ranks: Processes,
    model_path: ModelPath,
    tmp_path: Path,
    wide: Path,
    layout: Layout,
    family: str,
    more: dict[str, Any],
    is_token_local: bool,
) -> None:
    """Also where it shares it with some in one order, with others in another, and with fill tokens; clipped, 3 steps, with ranks
    that have none."""
    if family == "untied":
        path = untied(model_path("qwen2-tiny"), tmp_path / "untied")
    elif family == "biased":
        path = save_llama(tmp_path / "biased", num_hidden_layers=2, num_attention_heads=4, attention_bias=True, mlp_bias=True)
    else:
        path = wide if family == "wide" else model_path(family)
    options, objective = {**OPTIONS, "accumulate": "exact", **more}, on_ranks.Clipped(is_token_local=is_token_local)
    steps = on_ranks.make_steps(layout.dp, num_steps=3, staleness=int(more.get("old") == "previous"))
    turned = [[[group[::-1] for group in round_] for round_ in rounds] for rounds in steps]
    together = [[[[batch for round_ in rounds for batch in round_[group]] for group in range(layout.dp)]] for rounds in turned]
    found = []
    for number, (each, tokens, most_fill) in enumerate(
        [(steps, None, 0.0), (steps, None, 1.0), (steps, 110, 1.0), (turned, 1000, 0.0), (together, 1000, 0.0)]
    ):
        own = {**options, "tokens_per_pass": tokens, "pipeline_fill": most_fill, "pipeline_micro_batches": 1 + number % 2}
        first, *_ = ranks.run(on_ranks.train, path, each, layout, own, objective, size=layout.size)
        assert all(update.grad_norm > 2 * OPTIONS["max_grad_norm"] for update in first.updates) and not first.remark, number
        results = sorted(first.results, key=lambda result: result.loss_sum)
        found.append((first.fingerprint, results, [replace(update, fill_tokens=0) for update in first.updates]))
    assert not [number for number, one in enumerate(found) if one != found[0]]
    if layout.pp == 1 and layout.dp > 1:
        own = options | {"activation_checkpointing": False}
        if layout.tp == 1:
            alone = on_ranks.train_alone(path, steps, own, objective)
        else:
            joined = [[[[batch for group in round_ for batch in group]] for round_ in rounds] for rounds in steps]
            alone = ranks.run(on_ranks.train, path, joined, Layout(tp=layout.tp), own, objective, size=layout.tp)[0]
        assert alone.fingerprint == found[0][0]


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(pp=2), Layout(tp=2)], ids=["dp", "pp", "tp"])
def test_with_exact_sums_a_micro_batch_that_is_not_finite_adds_nothing_and_the_others_of_its_pass_do(
    ranks: Processes, model_path: ModelPath, layout: Layout
) -> None:
    good, bad = [on_ranks.make_batch(seed, (5, 3), 20) for seed in (1, 2, 4)], on_ranks.make_batch(3, (6, 2), 20)
    objective = on_ranks.Broken("infinite", float(bad.advantages[0]))
    options = {**OPTIONS, "accumulate": "exact", "tokens_per_pass": 1000, "pipeline_micro_batches": 1}
    rounds = [[[good[0], bad, good[1]], [good[2]]]] if layout.dp > 1 else [[[good[0], bad, good[1]]], [[good[2]]]]
    one, other = ranks.run(on_ranks.gradients, model_path("qwen2-tiny"), rounds, layout, options, objective, size=2)
    assert [result.is_finite for result in one.results][:3] == [True, False, True] and other.results[-1].is_finite
    alone = on_ranks.gradients_alone(model_path("qwen2-tiny"), [[good]], {**OPTIONS, "accumulate": "exact"})
    if layout.dp > 1:
        assert one.norm == alone.norm and all(np.array_equal(alone.sums[name], one.sums[name]) for name in alone.sums)
    else:
        assert one.norm == pytest.approx(alone.norm, rel=1e-5) and difference(alone.sums, one.sums) < 1e-5


@pytest.mark.parametrize("layout", [Layout(dp=2), Layout(tp=2)], ids=["dp", "tp"])
def test_where_the_company_shows_in_the_bits_of_one_rank_none_makes_passes_of_several(
    ranks: Processes, model_path: ModelPath, layout: Layout
) -> None:
    options = {**OPTIONS, "accumulate": "exact", "tokens_per_pass": 1000}
    found = ranks.run(on_ranks.remark_where_rows_differ, model_path("qwen2-tiny"), layout, options, 1, size=2)
    assert [most for _, most in found] == [None] * 2
    assert all(remark.startswith("micro-batches are computed one by one") for remark, _ in found)


@pytest.mark.parametrize(
    ("layout", "layers"), in_gate((Layout(dp=2, pp=2), 1), of=[(Layout(dp=2), 2), (Layout(dp=2, pp=2), 1)]), ids=["dp", "dp-pp"]
)
@pytest.mark.parametrize("accumulate", in_gate("exact", of=["exact", "fp32"]))
def test_of_a_pass_of_several_micro_batches_parameters_are_gathered_and_gradients_scattered_once(
    ranks: Processes, model_path: ModelPath, accumulate: str, layout: Layout, layers: int
) -> None:
    """By a rank's layers, and the root. A layer is gathered forward and again backward; the root stays gathered between the two. In
    a pipeline there are passes for its stages, up to `pipeline_micro_batches` of them."""
    round_ = [[on_ranks.make_batch(seed, (5, 3), 20) for seed in range(4)] for _ in range(2)]
    options = {**OPTIONS, "check_shared_prompt": False, "accumulate": accumulate}
    for most, least, times in (
        (None, 1, 4),
        (1000, 1, 1),
        (1000, 2, 2 if layout.pp > 1 else 1),
        (1000, 4, 4 if layout.pp > 1 else 1),
    ):
        own, path = {**options, "tokens_per_pass": most, "pipeline_micro_batches": least}, model_path("qwen2-tiny")
        counts = ranks.run(on_ranks.collectives, path, [round_], layout, own, size=layout.size)
        assert counts == [(times * (2 * layers + 1), times * (layers + 1))] * layout.size


def test_of_a_pass_that_is_not_finite_no_micro_batch_is_added_and_all_are_told_of(ranks: Processes, model_path: ModelPath) -> None:
    path, options = model_path("qwen2-tiny"), {**OPTIONS, "tokens_per_pass": 1000}
    good, bad = on_ranks.make_batch(1, (5, 3), 20), on_ranks.make_batch(3, (6, 2), 20)
    objective = on_ranks.Broken("infinite", float(bad.advantages[0]))
    one, other = ranks.run(on_ranks.gradients, path, [[[good, bad], [good]]], Layout(dp=2), options, objective, size=2)
    assert [result.is_finite for result in one.results] == [False, False] and [result.is_finite for result in other.results] == [
        True
    ]
    expected = on_ranks.gradients_alone(path, [[[good]]], OPTIONS).sums
    assert difference(expected, one.sums) < 1e-5


def test_a_loss_that_is_not_finite_adds_nothing_on_any_rank_and_is_told_by_its_own(ranks: Processes, model_path: ModelPath) -> None:
    path, options = model_path("qwen2-tiny"), {**OPTIONS, "accumulate": "exact"}
    good = [[[on_ranks.make_batch(1, (5, 3), 20)], [on_ranks.make_batch(2, (4, 4), 20)]]]
    bad = on_ranks.make_batch(3, (6, 2), 20)
    rounds = [[[*good[0][0], bad], good[0][1]]]
    expected = on_ranks.gradients_alone(path, good, options).sums
    objective = on_ranks.Broken("infinite", float(bad.advantages[0]))
    one, other = ranks.run(on_ranks.gradients, path, rounds, Layout(dp=2), options, objective, size=2)
    assert [result.is_finite for result in one.results] == [True, False]
    assert [result.is_finite for result in other.results] == [True]
    assert all(np.array_equal(one.sums[name], expected[name]) for name in expected)
    for layout in (Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2, pp=2)):
        steps = [[[[bad]] * layout.dp], [round_[: layout.dp] for round_ in good]]  # nothing but that; then as if nothing had been
        made = ranks.run(on_ranks.train, path, steps, layout, options, objective, size=layout.size)[0]
        assert [update.skipped for update in made.updates] == [True, False]
        assert [result.is_finite for result in made.results] == [False, True]


def test_gradients_that_exact_sums_do_not_take_are_refused_on_all_ranks(ranks: Processes, model_path: ModelPath) -> None:
    batches = [on_ranks.make_batch(seed, (5, 3), 20) for seed in (1, 2)]
    rounds = [[[batch] for batch in batches]]
    objective = on_ranks.Broken("huge", float(batches[1].advantages[0]))
    options = {**OPTIONS, "accumulate": "exact"}
    answers = ranks.answers(on_ranks.gradients, model_path("qwen2-tiny"), rounds, Layout(dp=2), options, objective, size=2)
    assert [(has_returned, answer[0]) for has_returned, answer in answers] == [(False, "RangeError")] * 2
    assert answers[0][1][1] == answers[1][1][1] and "set train.accumulate to fp32" in answers[0][1][1]


def test_a_model_is_exported_and_saved_whole_and_goes_on_under_another_layout(
    ranks: Processes, model_path: ModelPath, tmp_path: Path
) -> None:
    path = model_path("qwen2-tiny")
    saved = {}
    for number, layout in enumerate((Layout(dp=2), Layout(tp=2, pp=2))):
        folder = tmp_path / str(number)
        saved[layout] = ranks.run(on_ranks.logprobs_after, path, layout, folder, "save", size=layout.size)[0]
        model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32)
        assert not model.state_dict()["model.norm.weight"].equal(AutoModelForCausalLM.from_pretrained(path).model.norm.weight)
    alone = OneRank(path, train_options(learning_rate=1e-2))
    batch = on_ranks.make_batch(0, (5, 1, 9), 20)
    for _ in range(2):
        alone.forward_backward([batch] * 2, on_ranks.Clipped())  # both groups have it
        alone.optim_step(10)
    np.testing.assert_allclose(saved[Layout(dp=2)], alone.log_probs(batch.prompt_ids, batch.response_ids).values, rtol=1e-4)
    for begun, continued, folder in (
        (Layout(dp=2), Layout(dp=2), "0"),
        (Layout(tp=2, pp=2), Layout(tp=2), "1"),
        (Layout(tp=2, pp=2), Layout(pp=2), "1"),
    ):
        values = ranks.run(on_ranks.logprobs_after, path, continued, tmp_path / folder, "load", size=continued.size)[0]
        np.testing.assert_allclose(values, saved[begun], rtol=1e-5)


@pytest.mark.parametrize(
    ("layout", "family", "options"),
    [
        pytest.param(Layout(dp=3), "qwen2-tiny", {}, marks=depth.deep),
        pytest.param(Layout(tp=2), "qwen3-tiny", {}, marks=depth.deep),
        pytest.param(Layout(pp=2), "qwen2-tiny", {"frozen_dtype": "bfloat16"}, marks=depth.deep),
        (Layout(dp=3, tp=2), "deep", {"offload": True}),
        pytest.param(Layout(pp=3), "qwen2-small", {}, marks=depth.deep),
        pytest.param(Layout(dp=2, tp=2, pp=2), "llama-tiny", {}, marks=depth.deep),
    ],
    ids=lambda value: f"{value.dp}x{value.tp}x{value.pp}" if isinstance(value, Layout) else "",
)
def test_each_rank_reads_its_part_of_the_files_to_the_bit(
    ranks: Processes, model_path: ModelPath, deep: Path, layout: Layout, family: str, options: dict[str, Any]
) -> None:
    path = deep if family == "deep" else model_path(family)
    tensors = load_file(path / "model.safetensors")
    found = ranks.run(on_ranks.loaded_weights, path, layout, options, size=layout.size)[0]
    for model, dtype in (("policy", "float32"), ("reference", options.get("frozen_dtype", "float32"))):
        assert found[model].keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert np.array_equal(found[model][name], tensor.to(getattr(torch, dtype)).float().numpy()), (model, name)


@depth.deep
def test_each_of_four_ranks_reads_a_quarter(ranks: Processes, deep: Path) -> None:
    whole = sum(tensor.nbytes for tensor in load_file(deep / "model.safetensors").values())
    for layout in (Layout(dp=4), Layout(tp=2, pp=2)):
        parts = ranks.run(on_ranks.loading_bytes, deep, layout, size=4)
        assert max(parts) < 0.35 * whole and sum(parts) >= whole


@pytest.mark.parametrize(
    "layout",
    in_gate(Layout(dp=2, pp=2), of=[Layout(dp=2), Layout(tp=2), Layout(pp=2), Layout(dp=2, pp=2)]),
    ids=str,
)
def test_a_fault_of_sharing_the_prompt_is_found_in_log_probs_and_gradients_and_ends_all_ranks(
    ranks: Processes, model_path: ModelPath, layout: Layout
) -> None:
    path, faulty = model_path("qwen2-tiny"), layout.dp - 1
    assert all(ranks.run(on_ranks.check_with_fault, path, layout, "gradient", -1, size=layout.size))
    answers = ranks.answers(on_ranks.check_with_fault, path, layout, "gradient", faulty, size=layout.size)
    assert [(has_returned, answer[0]) for has_returned, answer in answers] == [(False, "RunError")] * layout.size
    (message,) = {answer[1] for _, answer in answers}
    assert re.match(r"sharing the prompt gives a gradient [\d.]+ away from that of the rows alone, whose norm is [\d.]+: ", message)
    answers = ranks.answers(on_ranks.check_with_fault, path, layout, "log-prob", faulty, size=layout.size)
    assert [(has_returned, answer[0]) for has_returned, answer in answers] == [(False, "RunError")] * layout.size
    each = layout.tp * layout.pp
    for rank, (_, answer) in enumerate(answers):
        words = "for a token of row 2, where the row alone has" if rank // each == faulty else "on another rank, which says"
        assert words in answer[1]


@pytest.mark.parametrize("accumulate", in_gate("exact", of=["exact", "fp32"]))
@pytest.mark.parametrize("layout", in_gate(Layout(dp=2, pp=2), of=[Layout(dp=2), Layout(tp=2), Layout(dp=2, pp=2)]), ids=str)
def test_comparing_gradients_leaves_a_step_as_it_is(
    ranks: Processes, model_path: ModelPath, layout: Layout, accumulate: str
) -> None:
    """The first round has nothing to compare; in the second one group has not, either."""
    alone, shared = [on_ranks.make_batch(i, (4,), 9) for i in range(2)], on_ranks.make_batch(2, (5, 3), 20)
    rounds = [[[batch] for batch in alone][: layout.dp], [[shared], []][: layout.dp]]
    sums = []
    for is_checked in (True, False):
        options = {**OPTIONS, "accumulate": accumulate, "check_shared_prompt": is_checked}
        sums.append(ranks.run(on_ranks.gradients, model_path("qwen2-tiny"), rounds, layout, options, size=layout.size)[0])
    assert sums[0].norm == sums[1].norm and sums[0].results == sums[1].results
    assert all(np.array_equal(sums[0].sums[name], sums[1].sums[name]) for name in sums[1].sums)
    if accumulate == "exact" and layout.dp > 1:
        assert ranks.run(on_ranks.sums_of_a_check, model_path("qwen2-tiny"), layout, size=layout.size) == [0.0] * layout.size


@pytest.mark.parametrize("accumulate", in_gate("exact", of=["exact", "fp32"]))
def test_each_of_four_ranks_holds_a_quarter(ranks: Processes, deep: Path, accumulate: str) -> None:
    alone = OneRank(deep, train_options(accumulate=accumulate))
    for _ in range(2):
        alone.forward_backward([on_ranks.make_batch(0, (5, 3), 9)], on_ranks.Clipped())
        if not alone._optimizer.num_updates:
            alone.optim_step(10)
    whole = on_ranks.held_bytes([*alone.policy.parameters.values()], alone)
    parts = ranks.run(on_ranks.state_bytes, deep, Layout(dp=4), {"accumulate": accumulate}, size=4)
    assert max(parts) < 0.3 * whole and sum(parts) >= whole


def test_what_cannot_be_started_is_said_in_a_sentence(ranks: Processes, model_path: ModelPath) -> None:
    path = model_path("qwen2-tiny")
    for layout, size, sentence in (
        (Layout(dp=2), 4, "plan.train has 2 ranks, but 4 were started"),
        (Layout(pp=4), 4, "plan.train.pp is 4, but the model has"),
        (Layout(tp=3), 3, "plan.train.tp"),
    ):
        with pytest.raises(RankFailed, match="UserError\n.*" + re.escape(sentence)):
            ranks.run(on_ranks.train, path, [], layout, OPTIONS, size=size)


@pytest.mark.parametrize(
    ("how", "layout"),
    [
        pytest.param("dies", Layout(dp=2), id="dies-dp", marks=depth.deep),
        pytest.param("dies", Layout(dp=2, pp=2), id="dies-dp x pp"),
        pytest.param("dies", Layout(tp=2), id="dies-tp", marks=depth.deep),
        pytest.param("raises", Layout(dp=2), id="raises-dp", marks=depth.deep),
        pytest.param("raises", Layout(dp=2, pp=2), id="raises-dp x pp", marks=depth.deep),
        pytest.param("raises", Layout(tp=2), id="raises-tp", marks=depth.deep),
    ],
)
def test_a_rank_that_ends_ends_the_others_who_say_why(model_path: ModelPath, tmp_path: Path, how: str, layout: Layout) -> None:
    batches = [on_ranks.make_batch(seed, (5, 3), 20) for seed in (1, 2)]
    objective = on_ranks.Broken(how, float(batches[1].advantages[0]))
    steps = [[[[batches[0]], [batches[1]]] if layout.dp == 2 else [[batches[1]]]]]
    processes = Processes(layout.size)
    try:
        arguments = (tmp_path, model_path("qwen2-tiny"), steps, layout, OPTIONS, objective)
        answers = processes.answers(on_ranks.train_as_a_worker, *arguments, seconds=60)
    finally:
        processes.close()
    assert [answer[0] for _, answer in answers] == ["death"] * layout.size
    words = {int(path.name): path.read_text() for path in tmp_path.iterdir()}
    # The last stage of the last group computes the loss; under tp every rank does.
    ended = {layout.size - 1} if layout.tp == 1 else {0, 1}
    assert set(words) == set(range(layout.size)) - (ended if how == "dies" else set())
    for rank, text in words.items():
        if rank in ended:
            assert text == "UserError: this loss is not for these rows"
        else:
            assert text.startswith("RunError: ") and "\n" not in text
            assert "forward_backward" in text or "of the pipeline" in text or "next call" in text
