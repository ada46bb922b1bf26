"""Training passes of several micro-batches against one micro-batch a pass, and both against the machine's matrix products. CPU.

    OMP_NUM_THREADS=1 python benchmarks/passes.py [--models tiny smollm2] [--sums fp32 exact] [--layouts dp2 pp2 tp2] [--repeats N]
        [--parts passes fixed update] [--json FILE]

tiny       the quickstart's model (0.44M parameters), 32 groups of 8 responses
smollm2    a model of SmolLM2-135M's shape with random weights (its time does not depend on them), 8 groups of 8 responses of some
           ten tokens, 122 packed tokens a group, as in `recipes/smollm2.yaml`

A step is the forward and backward passes of all groups, with the sums of gradients, by the train engine itself (`OneRank`), in
float32. Both ways take turns within a repeat, with plain and with exact sums; so does a product of matrices of 512 x 512 by the
same number of threads, whose rate is the machine's: torch.mm's, and the better of this one's and oneDNN's, which the trainer takes
where torch.mm is MKL's and the processor is not Intel's (there the first share says more than there is). A way's share of a rate
counts six operations for each weight of a layer and packed token, six for each weight of the output layer and response token, and
those of attention (3.5 times the forward's), by the rate right before and after. Medians over the repeats.

The process has the environment of a trainer's, by which the allocator keeps freed memory.

After that the cost of exact sums alone: a step's time above that with plain sums, by parameters and micro-batches. `fixed`: exact
sums where the gradients of linear layers are taken of a pass as a whole, as they could be if it were fixed by number which groups
are in a pass together, over those taken of each micro-batch. Then the update
with SmolLM2-135M's shape and exact sums: their division, the norm, the clip and AdamW, over a plain pass over the bytes that it
cannot do without, in turns: 40 for each parameter (a sum read, its gradient written; gradient, weight and moments read, weight and
moments written), as copies. With
`--layouts`, the tiny model's step over two processes, data-parallel ranks (half of the groups each), stages of a pipeline, or
tensor-parallel ranks: both ways in turns.
"""

from __future__ import annotations

import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import patch

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
from figures import Figure, begin_again_as, finish, parser
from transformers import LlamaConfig, LlamaForCausalLM

from asyncflow.algorithms.grpo import GRPO
from asyncflow.config import load
from asyncflow.engines.base import RANKS_STORE, MicroBatch
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.parallel.many_ranks import ManyRanks
from asyncflow.engines.train.pass_gradients import PassGradients
from asyncflow.model_folder import read_json
from asyncflow.run.factories import tokens_per_pass, train_engine_options
from asyncflow.run.worker_start import training
from asyncflow.types import Layout, Ragged

T = TypeVar("T")
ROOT = Path(__file__).parents[1]
LAYOUTS = {"dp2": Layout(dp=2), "pp2": Layout(pp=2), "tp2": Layout(tp=2)}
PRODUCT = 512
MOST_NORM = 1e-6  # so that there is something to clip
WARM_UP = 3  # updates until no fresh pages are taken
THREADS = int(os.environ["OMP_NUM_THREADS"])


@dataclass(frozen=True)
class Case:
    """`groups` of 8 responses: lengths of the prompts, and of the responses, uniform between two numbers. `share`: to reach."""

    recipe: str
    groups: int
    prompt: int
    responses: tuple[int, int]
    share: float


CASES = {
    "tiny": Case("quickstart", 32, 24, (4, 20), 0.42),
    "smollm2": Case("smollm2", 8, 42, (8, 12), 0.68),
}


def smollm2(folder: Path) -> Path:
    """A model of SmolLM2-135M's shape, with random weights."""
    config = LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def micro_batches(case: Case, vocabulary: int) -> list[MicroBatch]:
    rng = np.random.default_rng(0)

    def group(number: int) -> MicroBatch:
        responses = Ragged.from_arrays([rng.integers(5, vocabulary, n) for n in rng.integers(*case.responses, 8)], "int64")
        ones = np.ones(len(responses.values), np.uint8)
        return MicroBatch(
            indices=np.arange(8 * number, 8 * number + 8),
            prompt_ids=rng.integers(5, vocabulary, case.prompt),
            response_ids=responses,
            loss_mask=Ragged(ones, responses.offsets),
            rollout_logprobs=Ragged(-ones.astype(np.float32), responses.offsets),
            advantages=rng.normal(size=8).astype(np.float32),
            staleness=np.zeros(8, np.int64),
        )

    return [group(number) for number in range(case.groups)]


def operations(engine: OneRank, batches: list[MicroBatch]) -> float:
    config = engine.policy.module.config
    hidden, layers = config.hidden_size, config.num_hidden_layers
    wide = config.num_attention_heads * (getattr(config, "head_dim", None) or hidden // config.num_attention_heads)
    of_layers = sum(p.numel() for name, p in engine.policy.parameters.items() if p.ndim == 2 and ".layers." in name)
    total = 0.0
    for batch in batches:
        lengths = batch.response_ids.lengths
        prompt, response = len(batch.prompt_ids), int(lengths.sum())
        pairs = prompt * prompt / 2 + float((lengths * lengths / 2 + lengths * prompt).sum())
        total += 6.0 * of_layers * (prompt + response) + 6.0 * hidden * config.vocab_size * response
        total += 3.5 * 4.0 * wide * layers * pairs
    return total


def product_rates(seconds: float = 0.2) -> np.ndarray:
    """Operations a second of products of matrices of 512 x 512: torch.mm's, and the better of these and of oneDNN's."""
    left, right = torch.randn(PRODUCT, PRODUCT), torch.randn(PRODUCT, PRODUCT)
    out = torch.empty(PRODUCT, PRODUCT)
    products: list[Callable[[], object]] = [lambda: torch.mm(left, right, out=out)]
    if torch._C._has_mkldnn:
        products.append(lambda: torch.ops.mkldnn._linear_pointwise(left, right, None, "none", [], ""))
    rates = []
    for product in products:
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            product()
            count += 1
        rates.append(count * 2.0 * PRODUCT**3 / (time.perf_counter() - began))
    return np.array([rates[0], max(rates)])


def measure(name: str, folder: Path, kinds: list[Literal["exact", "fp32"]], repeats: int) -> list[Figure]:
    """Figures of a model, with these kinds of sums."""
    case = CASES[name]
    config = load(ROOT / f"recipes/{case.recipe}.yaml")
    path = ROOT / config.model.path if name == "tiny" else smollm2(folder)
    fields = read_json(path / "config.json")
    tokens = tokens_per_pass(config, fields)
    ways = {"one a pass": None, "passes": tokens}
    engines = {
        (sums, way): OneRank(path, replace(
            train_engine_options(config), accumulate=sums, tokens_per_pass=most, num_threads=THREADS, check_shared_prompt=False
        ))
        for sums in kinds for way, most in ways.items()
    }  # fmt: skip
    for engine in engines.values():
        if engine.remark:
            print(f"{name}: {engine.remark}")
    batches = micro_batches(case, fields["vocab_size"])
    work = operations(next(iter(engines.values())), batches)
    rates: list[np.ndarray] = []
    seconds: dict[tuple[str, str], list[float]] = {key: [] for key in engines}
    shares: dict[tuple[str, str], list[np.ndarray]] = {key: [] for key in engines}
    for number in range(repeats + 1):
        for key, engine in engines.items():
            before = product_rates()
            began = time.perf_counter()
            engine.forward_backward(batches, GRPO())
            took = time.perf_counter() - began
            engine.discard()
            if number:  # the first one warms up
                rates.append((before + product_rates()) / 2)
                seconds[key].append(took)
                shares[key].append(work / took / rates[-1])
    packed = sum(len(batch.prompt_ids) + len(batch.response_ids.values) for batch in batches)
    of_mm, of_better = (np.median(rates, 0) / 1e9).tolist()
    told = f"products by torch.mm at {of_mm:.1f} G operations a second, by the better of this and oneDNN at {of_better:.1f}"
    print(f"{name}: {packed} packed tokens, passes of up to {tokens}; {told}")
    figures = []
    for sums in kinds:
        alone, full = (sums, "one a pass"), (sums, "passes")
        ratios = [a / b for a, b in zip(seconds[alone], seconds[full], strict=True)]
        for way, key, target in (("one micro-batch a pass", alone, None), ("passes", full, f">= {case.share}")):
            of_mm, of_better = np.median(shares[key], 0).tolist()
            figures += [
                Figure(f"{name}, {sums}: {way}, share of torch.mm's rate", of_mm, "", target),
                Figure(f"{name}, {sums}: {way}, share of the better rate", of_better, ""),
            ]
        figures += [
            Figure(f"{name}, {sums}: one micro-batch a pass / passes, time", statistics.median(ratios), "x"),
        ]
    parameters = sum(parameter.numel() for parameter in next(iter(engines.values())).policy.parameters.values())
    for way in ways if len(kinds) > 1 else ():
        more = [a - b for a, b in zip(seconds["exact", way], seconds["fp32", way], strict=True)]
        cost = statistics.median(more) / len(batches) / parameters * 1e9
        limit = "<= 3" if (name, way) == ("smollm2", "passes") else None
        figures.append(Figure(f"{name}: exact sums above plain ones, {way}", cost, "ns a parameter and micro-batch", limit))
    return figures


def fixed(name: str, folder: Path, repeats: int) -> list[Figure]:
    """Time of passes whose composition is fixed, over those that may have any, with exact sums, in turns."""
    case = CASES[name]
    config = load(ROOT / f"recipes/{case.recipe}.yaml")
    path = ROOT / config.model.path if name == "tiny" else smollm2(folder)
    fields = read_json(path / "config.json")
    options = replace(train_engine_options(config), accumulate="exact", num_threads=THREADS, check_shared_prompt=False)
    engine = OneRank(path, replace(options, tokens_per_pass=tokens_per_pass(config, fields)))
    batches, of_each = micro_batches(case, fields["vocab_size"]), PassGradients._add_products

    def of_all(self: PassGradients, layer: str, left: Any, right: Any, parts: list[slice], change: Any = None) -> None:
        is_head = change is not None  # whose rows of each micro-batch wait for the embedding's
        of_each(self, layer, left, right, parts if is_head or not parts else [slice(parts[0].start, parts[-1].stop)], change)

    ratios = []
    for number in range(repeats + 1):
        took = []
        for way in (of_each, of_all):
            with patch.object(PassGradients, "_add_products", way):
                began = time.process_time()
                engine.forward_backward(batches, GRPO())
                took.append(time.process_time() - began)
                engine.discard()
        if number:  # the first one warms up
            ratios.append(took[1] / took[0])
    return [Figure(f"{name}, exact: passes fixed by number / of any groups, CPU time", statistics.median(ratios), "")]


def update(folder: Path, sums: Literal["exact", "fp32"], repeats: int) -> list[Figure]:
    """Figures of the update of SmolLM2-135M's shape."""
    config = load(ROOT / f"recipes/{CASES['smollm2'].recipe}.yaml")
    path = smollm2(folder)
    options = train_engine_options(config)
    engine = OneRank(
        path, replace(options, accumulate=sums, num_threads=THREADS, check_shared_prompt=False, max_grad_norm=MOST_NORM)
    )
    batches = micro_batches(CASES["smollm2"], read_json(path / "config.json")["vocab_size"])[:1]
    count = sum(parameter.numel() for parameter in engine.policy.parameters.values())
    source, target = torch.randn(count), torch.zeros(count)
    seconds: dict[str, list[float]] = {"division": [], "norm": [], "clip and AdamW": [], "update": [], "plain pass": []}

    def timed(name: str, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        made = call()
        seconds[name].append(time.perf_counter() - began)
        return made

    for _ in range(repeats + WARM_UP):
        engine.forward_backward(batches, GRPO())
        timed("plain pass", lambda: [target.copy_(source) for _ in range(5)])  # 4 bytes read and 4 written, each
        gradients = timed("division", lambda: engine._sums.gradients(100))
        norm = timed("norm", partial(engine._sums.norm, gradients))
        result = timed("clip and AdamW", partial(engine._optimizer.update, gradients, norm))
        assert not result.skipped and norm > MOST_NORM, "the clip is measured, too"
        engine._sums.clear()
        seconds["update"].append(sum(seconds[part][-1] for part in ("division", "norm", "clip and AdamW")))
    ratios = {name: np.array(each[WARM_UP:]) / seconds["plain pass"][WARM_UP:] for name, each in seconds.items()}
    rate = 40 * count / statistics.median(seconds["plain pass"]) / 1e9
    took = statistics.median(seconds["update"])
    print(f"update, {sums}: {count:,} parameters, {took:.2f} s; a plain pass at {rate:.1f} GB a second")
    return [
        *(Figure(f"update, {sums}, {part} / plain pass", float(np.median(ratios[part])), "") for part in list(seconds)[:3]),
        Figure(f"update, {sums} / plain pass over its bytes", float(np.median(ratios["update"])), "", "<= 2"),
    ]


def on_two_ranks(name: str, kinds: list[Literal["exact", "fp32"]], repeats: int) -> list[Figure]:
    """Figures of the tiny model's step over a layout of two processes."""
    context = multiprocessing.get_context("spawn")
    figures = []
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as folder:
        for sums in kinds:
            answers = context.Queue()
            own = (name, sums, repeats, f"file://{folder}/{sums}", answers)
            processes = [context.Process(target=one_of_two, args=(rank, *own)) for rank in range(2)]
            for process in processes:
                process.start()
            ratio = max(answers.get(timeout=600) for _ in processes)
            for process in processes:
                process.join()
            figures.append(Figure(f"tiny, {sums}, {name}: one micro-batch a pass / passes, time", ratio, "x"))
    return figures


def one_of_two(rank: int, name: str, sums: Literal["exact", "fp32"], repeats: int, store: str, answers: Any) -> None:
    """A rank's own process: the median ratio of its times."""
    torch.set_num_threads(THREADS)
    numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2}
    os.environ.update({key: str(value) for key, value in numbers.items()} | {RANKS_STORE: store})
    config = load(ROOT / f"recipes/{CASES['tiny'].recipe}.yaml")
    path = ROOT / config.model.path
    fields = read_json(path / "config.json")
    tokens = tokens_per_pass(config, fields)
    options = replace(
        train_engine_options(config), accumulate=sums, tokens_per_pass=tokens, check_shared_prompt=False, layout=LAYOUTS[name]
    )
    batches = micro_batches(CASES["tiny"], fields["vocab_size"])
    many = ManyRanks(path, options)
    ratios = []
    for number in range(repeats + 1):
        took = []
        for most in (None, tokens):
            many._tokens_per_pass = most
            began = time.perf_counter()
            many.forward_backward(batches[many.ranks.dp_rank :: LAYOUTS[name].dp], GRPO())
            took.append(time.perf_counter() - began)
            many.discard()
        if number:  # the first one warms up
            ratios.append(took[0] / took[1])
    many.close()
    answers.put(statistics.median(ratios))


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--models", nargs="*", choices=CASES, default=list(CASES))
    arguments.add_argument("--sums", nargs="+", choices=("fp32", "exact"), default=["fp32", "exact"])
    arguments.add_argument("--layouts", nargs="*", choices=LAYOUTS, default=[])
    arguments.add_argument("--repeats", type=int, default=5)
    arguments.add_argument("--parts", nargs="+", choices=("passes", "fixed", "update"), default=["passes", "fixed", "update"])
    given = arguments.parse_args()
    begin_again_as(training(load(ROOT / "recipes/quickstart.yaml")))
    torch.set_num_threads(THREADS)
    print(f"threads: {THREADS}")
    figures = []
    with tempfile.TemporaryDirectory(prefix="asyncflow-") as folder:
        for name in given.models if "passes" in given.parts else ():
            figures += measure(name, Path(folder), given.sums, given.repeats)
        for name in given.models if "fixed" in given.parts else ():
            figures += fixed(name, Path(folder), given.repeats)
        for sums in given.sums if "update" in given.parts else ():
            figures += update(Path(folder), sums, given.repeats)
    for name in given.layouts:
        figures += on_two_ranks(name, given.sums, given.repeats)
    return finish(figures, given.json)


if __name__ == "__main__":
    sys.exit(main())
