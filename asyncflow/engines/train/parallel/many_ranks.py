"""One rank's half of training over a layout. All ranks make the same calls, each with the micro-batches of its data-parallel group.

    micro-batches, some inert ------> frozen models ----> log-probs --+
      (as many as the group that  +-> policy, stage by stage ---------+--> loss --> backward, sums over ranks (fsdp.py)
       has most of them)                                                                  |
    AdamW on this rank's parts <-- clip by the norm over all ranks <-- sums / normaliser <+

consumes: what the methods are given, as leader_engine.py calls them
waits for: the other ranks, as ranks.py says
is unblocked by: the same call there

What decides how many collectives there are (how many micro-batches, whether the old model is asked) is agreed on at the start of a
round. What a rank alone finds out later (a loss that is not finite) changes values, and never which rank calls what.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from asyncflow.engines.base import EXCHANGE_SECONDS, MicroBatch, MicroBatchResult, OptimResult, TrainEngineOptions
from asyncflow.engines.lora_files import write_lora
from asyncflow.engines.train.accumulate import largest_magnitude, norm_of, sum_of_squares
from asyncflow.engines.train.helpers import Helpers
from asyncflow.engines.train.model import micro_step
from asyncflow.engines.train.model.packing import (
    INERT_TOKENS,
    Packed,
    cut_into_passes,
    filled_alike,
    filled_up,
    joined,
    pack_inert,
    pack_thrifty,
)
from asyncflow.engines.train.model.tri_model import TriModel
from asyncflow.engines.train.model.weight_files import write_model
from asyncflow.engines.train.optimizer import MOMENTS, Optimizer
from asyncflow.engines.train.parallel.check_sharing_of_ranks import check_sharing
from asyncflow.engines.train.parallel.fsdp import make_sums
from asyncflow.engines.train.parallel.pipeline import Pipeline
from asyncflow.engines.train.parallel.ranks import Ranks
from asyncflow.engines.train.parallel.sharded_model import ShardedModel, SharedBaseShards
from asyncflow.engines.train.parallel.tensor import is_counted, whole
from asyncflow.engines.train.pass_gradients import PassGradients
from asyncflow.engines.train.pass_probe import LENGTHS, OTHER_BITS, ProbePass, one_by_one
from asyncflow.engines.train.pieces import AT_ONCE, Pieces
from asyncflow.engines.train.state import EngineState, fingerprint_of, placed_like
from asyncflow.engines.train.training import PolicyTraining
from asyncflow.types import Array, Objective, Ragged, TensorSpec

# P packed tokens, T response tokens, H hidden elements.

STATES: Final = ("step", *MOMENTS)


class ManyRanks(PolicyTraining):
    """`PolicyTraining` of one rank."""

    ranks: Ranks
    models: TriModel[ShardedModel | SharedBaseShards]

    def __init__(self, model_path: Path | str, options: TrainEngineOptions) -> None:
        """Join the other ranks, and load this one's part of the model; waits for all of them. Raises `UserError`, `RunError`."""
        self.ranks = Ranks(options.layout, options.device)
        try:
            self._load(Path(model_path), options)
        except BaseException:
            self.ranks.leave()
            raise

    def forward_backward(self, micro_batches: Sequence[MicroBatch], objective: Objective) -> list[MicroBatchResult]:
        """See `TrainEngine.forward_backward`: one round.

        Of a pass of several micro-batches, one of which is not finite, none is added with plain sums, and all are reported as not
        finite.
        """
        each_packed = [
            pack_thrifty(batch.prompt_ids, batch.response_ids, self.ranks.device, batch.target_ids) for batch in micro_batches
        ]
        passes = cut_into_passes(each_packed, self._tokens_per_pass, self._num_parts)
        packed = [filled_up(joined(each_packed[of_pass]), INERT_TOKENS) for of_pass in passes]
        asks_old, asks_reference = self.models.asked(micro_batches)
        checks = self._is_to_check and any(p.layout.has_prompt for p in packed)
        wishes = self.ranks.largest([len(packed), asks_old, asks_reference, checks], of="dp")
        num_passes, asks_old, asks_reference, checks = int(wishes[0]), *map(bool, wishes[1:])
        if checks:
            self._check_sharing(micro_batches, each_packed)
        # A rank that has none takes part with a micro-batch of nothing.
        packed += [pack_inert(INERT_TOKENS, self.ranks.device) for _ in range(num_passes - len(packed))]
        packed = filled_alike(packed, self._most_fill)
        self._fill_tokens += sum(one.fill_tokens for one in packed)
        refs = self._log_probs(self.models.reference, packed) if asks_reference else []
        olds = self._log_probs(self.models.old_model, packed) if asks_old else []
        results: list[MicroBatchResult] = []
        muted = set(range(len(passes), num_passes))

        def loss(i: int, hidden_PH: Tensor) -> Tensor:
            if i >= len(passes):
                return self._policy.nothing(hidden_PH)
            head = self._policy.head()
            old_T, ref_T = (frozen[i] if frozen else None for frozen in (olds, refs))
            known = micro_step.given_all_frozen(self.models, packed[i], micro_batches[passes[i]], old_T, ref_T)
            hidden_TH = self._policy.predicting(packed[i], hidden_PH)
            if self._gradients is not None:
                made = micro_step.losses(known, objective, hidden_TH, head.taken_by(self._gradients))
                results.extend(made.results)
                return self._gradients.loss_with(made.total, head.weight_VH)
            made = micro_step.losses(known, objective, hidden_TH, head)
            results.extend(replace(result, is_finite=made.is_finite) for result in made.results)
            # Stages before this one cannot know of it: in a pipeline, what is not finite stays so in all sums, and skips the step.
            if not made.is_finite and self.ranks.layout.pp == 1:
                muted.add(i)
            return made.total

        states = {} if self._gradients is None else {i: self._gradients.begin(packed[i]) for i in range(len(passes))}
        self._pipeline.forward_backward(
            self._policy,
            packed,
            loss,
            before_backward=lambda i: self._sums.before_backward(is_muted=i in muted, is_split=i in states),
            after_backward=lambda i: self._sums.add(),
            within=lambda i: self._gradients.within(states[i]) if self._gradients and i in states else nullcontext(),
        )
        received = self._pipeline.results_from_last(results)
        self._num_added += sum(result.is_finite for result in received)
        return received

    def _update(self, normaliser: int) -> OptimResult:
        """The norm is over all ranks' gradients, each counted once."""
        gradients = self._sums.gradients(normaliser)
        tied, has_stages = self._policy.stage.tied_name, self.ranks.layout.pp > 1
        if has_stages and self.ranks.largest([bool(gradients)], of="pp")[0] and tied is not None:
            part = self._policy.parts[tied]
            if part.grad is None:  # the last stage has left out every micro-batch, and the first one does not know
                part.grad = torch.zeros_like(part)
            self._pipeline.add_tied_(part.grad)
        counted = [part.grad for part in self._counted.values() if part.grad is not None]
        (largest,) = self.ranks.largest([largest_magnitude(counted, self._pieces)])
        own_fill_tokens = self._fill_tokens if self.ranks.is_leader else 0
        own_squares = sum_of_squares(counted, largest, self._pieces)
        squares, num_added, fill_tokens = self.ranks.total([own_squares, self._num_added, own_fill_tokens])
        # Where every micro-batch was refused, there is nothing to step by.
        result = self._optimizer.update(gradients if num_added else [], norm_of(squares, largest))
        self._clear()
        return replace(result, fill_tokens=fill_tokens)

    def _response_log_probs(
        self, prompt_ids: Array, response_ids: Ragged, target_ids: Ragged | None, temperature: float | None
    ) -> Ragged:
        """See `LogProbEngine.log_probs`. The layout is the one that training takes, so that the bits are the same."""
        packed = pack_thrifty(prompt_ids, response_ids, self.ranks.device, target_ids)
        packed = replace(filled_up(packed, INERT_TOKENS), temperature=temperature)
        made = self._log_probs(self._policy, [packed])
        log_probs_T = self._pipeline.log_probs_from_last(made[0] if made else None, len(response_ids.values))
        return Ragged(log_probs_T.numpy(), response_ids.offsets)

    def _trained(self) -> Iterable[Tensor]:
        return self._policy.parts.values()

    def _whole(self, name: str) -> Tensor | None:
        return self._to_first(name, self._policy.parameters.get(name), self.specs[name].shape, torch.float32)

    def fingerprint(self) -> Mapping[str, str]:
        return fingerprint_of((key, tensor) for key, tensor in self._everything() if tensor is not None)

    def save(self, path: Path) -> None:
        tensors = ((name, tensor) for name in self.specs if (tensor := self._whole(name)) is not None)
        if self.ranks.rank == 0 and self._lora is not None:
            write_lora(path, self._lora, self._model_path, {name: tensor.cpu().numpy() for name, tensor in tensors})
        elif self.ranks.rank == 0:
            write_model(path, self._model_path, tensors)
        else:
            for _ in tensors:
                pass

    def load_state(self, folder: Path) -> None:
        copy = self._policy.stage.copy_name
        if copy is None:
            super().load_state(folder)
            return
        # The last stage's copy comes from what the first stage has saved.
        original = next(name for name, index in self._stage_of.items() if index == 0 and name.endswith("embed_tokens.weight"))
        self._engine_state({name: original if name == copy else name for name in self._policy.parts}).load(folder)
        self._state.begin_step()

    def close(self) -> None:
        """Leave the other ranks."""
        self.ranks.leave()

    def _load(self, model_path: Path, options: TrainEngineOptions) -> None:
        self.data_parallel_rank = self.ranks.dp_rank if self.ranks.is_leader else None
        self._model_path = model_path
        self._is_to_check, self._tokens_per_pass = options.check_shared_prompt, options.tokens_per_pass
        self._num_parts = options.pipeline_micro_batches if options.layout.pp > 1 else 1
        is_exact = options.accumulate == "exact"
        reduce_dtype = torch.float64 if is_exact and options.layout.dp > 1 else torch.float32
        sharded_model = partial(ShardedModel, model_path, self.ranks, replace(options, device=str(self.ranks.device)))
        self._lora = options.lora
        self._policy = policy = sharded_model(reduce_dtype=reduce_dtype)
        if self._lora is None:
            self.models = TriModel(policy, options, sharded_model)
        else:
            shared = partial(SharedBaseShards, policy)
            self.models = TriModel(policy, options, partial(shared, has_adapter=True), partial(shared, has_adapter=False))
        stage = policy.stage
        self._pipeline = Pipeline(
            self.ranks.group("pp"),
            stage,
            hidden_size=policy.hidden_size,
            device=self.ranks.device,
            timeout_seconds=EXCHANGE_SECONDS,
        )
        self._sums = make_sums(options.accumulate, policy, self.ranks)
        self.remark = ""
        self._gradients: PassGradients | None = None
        self._most_fill, self._fill_tokens = options.pipeline_fill if options.layout.pp > 1 else 0.0, 0
        if is_exact and (self._tokens_per_pass is not None or self._most_fill):
            self._prepare_passes()
        self._optimizer = Optimizer(policy.parts, options)
        self._pieces: Pieces = AT_ONCE
        if options.helpers:
            self._leave_pieces_to(Helpers([None] * len(options.helpers), options.num_threads))
        self._counted = {
            name: part for name, part in policy.parts.items() if is_counted(policy.parameters[name]) and name != stage.copy_name
        }
        self._num_added = 0  # micro-batches of this data-parallel group whose gradients are in the sums
        own = [name for name in policy.parts if name != stage.copy_name]
        self._state = self._engine_state({name: name for name in own})
        self.specs: Mapping[str, TensorSpec] = dict(sorted(policy.specs.items()))
        stages = self.ranks.largest([stage.index if name in own else -1 for name in self.specs], of="pp")
        self._stage_of = {name: int(index) for name, index in zip(self.specs, stages, strict=True)}

    def _prepare_passes(self) -> None:
        """Have each micro-batch's gradients taken by themselves, so that no exact sum depends on what else is in a pass (others,
        fill tokens): on all ranks. Where it cannot be so on one, nothing else is in a pass."""
        why, gradients = PassGradients.why_not(self._policy), None
        (has_other,) = self.ranks.largest([bool(why)])
        if not has_other:
            gradients = PassGradients(self._policy, self._sums.of_passes(), gives_zeros=self.ranks.layout.dp > 1)
            if not self._probe(gradients):
                why = OTHER_BITS
        if not why and not has_other:
            self._gradients = gradients
        else:
            self._tokens_per_pass, self._most_fill = None, 0.0
            self.remark = one_by_one(why or "another stage has weights of another kind")

    def _leave_pieces_to(self, helpers: Helpers[None]) -> None:
        """Have helpers take pieces of passes and of the update. No whole pass: what ranks gather and add up has one order, the same
        on all of them; and no rows of a product: a weight is let go as soon as this rank has used it."""
        self.helpers = helpers
        self._pieces = self._optimizer.pieces = pieces = helpers.pieces(cuts_rows=False)
        self._sums.share(pieces)
        if self._gradients is not None:
            self._gradients.pieces = pieces

    def _probe(self, gradients: PassGradients) -> bool:
        """See `pass_probe.probe`: whether it is so on all ranks."""
        pack, vocabulary = partial(pack_thrifty, device=self.ranks.device), self._policy.module.config.vocab_size
        return all(self._is_right(ProbePass(pack, vocabulary, lengths), gradients) for lengths in LENGTHS)

    def _is_right(self, probes: ProbePass, gradients: PassGradients) -> bool:
        policy = self._policy

        def compute(packed: Packed, of_pass: PassGradients | None) -> None:
            state = None if of_pass is None else of_pass.begin(packed)

            def loss(_: int, hidden_PH: Tensor) -> Tensor:
                head = policy.head()
                hidden_TH = policy.predicting(packed, hidden_PH)
                total = probes.of_log_probs(packed, hidden_TH, head.taken_by(of_pass) if of_pass else head)
                return total if of_pass is None else of_pass.loss_with(total, head.weight_VH)

            self._pipeline.forward_backward(
                policy,
                [packed],
                loss,
                before_backward=lambda _: self._sums.before_backward(is_muted=False, is_split=of_pass is not None),
                after_backward=lambda _: self._sums.add(),
                within=lambda _: nullcontext() if of_pass is None or state is None else of_pass.within(state),
            )

        try:
            compute(probes.alone, None)
            compute(probes.together, gradients)
            return not self.ranks.largest([not self._sums.is_zero()])[0]
        finally:
            self._sums.clear()

    def _check_sharing(self, micro_batches: Sequence[MicroBatch], packed: Sequence[Packed]) -> None:
        self._is_to_check = False
        chosen = next((batch for batch, p in zip(micro_batches, packed, strict=True) if p.layout.has_prompt), None)
        check_sharing(self._policy, self._pipeline, self._sums, self.ranks, list(self._counted), chosen)

    def _log_probs(self, model: Any, packed: Sequence[Packed]) -> list[Tensor]:
        """A model's log-probs of each micro-batch, on the last stage; elsewhere nothing."""
        made = self._pipeline.forward(model, packed, lambda i, hidden_PH: model.log_probs(packed[i], hidden_PH))
        model.let_go()
        return made

    def _clear(self) -> None:
        self._sums.clear()
        self._num_added = self._fill_tokens = 0

    def _everything(self) -> Iterator[tuple[str, Tensor | None]]:
        """Tensors of the state by name, each gathered when the iteration comes to it."""
        states = {(name, kind): state for name, kind, state in self._optimizer.states()}
        for name, spec in self.specs.items():
            yield f"weights/{name}", self._whole(name)
            for kind in STATES if self._optimizer.num_updates else ():
                state, shape = states.get((name, kind)), () if kind == "step" else spec.shape
                if state is not None and kind != "step":
                    state = placed_like(state, self._policy.parameters[name])
                yield f"optimizer/{name}/{kind}", self._to_first(name, state, shape, torch.float32)

    def _to_first(self, name: str, tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
        """Whole tensor on rank 0, from the ranks of the stage that has it (`tensor` is their part of it); None elsewhere.

        It is on the device, or, from another stage, on the CPU.
        """
        owner, ranks = self._stage_of[name], self.ranks
        made = whole(tensor) if tensor is not None and ranks.pp_rank == owner else None
        if owner == 0 or ranks.dp_rank or ranks.tp_rank or ranks.pp_rank not in (0, owner):
            return made if ranks.rank == 0 else None
        with ranks.named(f"the weights of {name}"):
            if made is not None:
                dist.send(made.cpu().contiguous(), 0)
                return None
            arrived = torch.empty(shape, dtype=dtype)
            dist.recv(arrived, owner * ranks.layout.tp)
            return arrived

    def _engine_state(self, names: Mapping[str, str]) -> EngineState:
        """`names`: those of this rank's parameters that are saved, with their names in a checkpoint."""
        parameters, old_model = self._policy.parameters, self.models.old_model
        old: Mapping[str, Tensor] | None = None if old_model is None else old_model.parameters
        if isinstance(old_model, SharedBaseShards):  # which has this rank's parts alone
            old = {name: placed_like(part, parameters[name]) for name, part in old_model.parameters.items()}
        place = {"rank": self.ranks.rank, "num_ranks": self.ranks.size}
        return EngineState(parameters, self._optimizer, old, names=names, **place)
