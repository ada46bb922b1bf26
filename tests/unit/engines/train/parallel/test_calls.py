"""A leader's calls as bytes: what arrives is what was sent, and what is none of them is refused."""

from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncflow.engines.train.parallel import calls
from asyncflow.types import Ragged, RunError
from tests.unit.engines.train.parallel.training_ranks import make_batch


def test_a_turn_arrives_as_it_was_sent() -> None:
    batch = make_batch(0, (5, 1, 9), 20)
    with_reference = replace(batch, ref_logprobs=Ragged(batch.rollout_logprobs.values[::-1], batch.rollout_logprobs.offsets))
    for column in (batch.prompt_ids, batch.response_ids.values):
        column.flags.writeable = False  # as they come out of a received frame
    sent = calls.ForwardBackward([batch, with_reference])
    call = calls.decode(calls.encode(sent))
    assert isinstance(call, calls.ForwardBackward) and calls.name_of(call) == "forward_backward"
    for theirs, ours in zip(sent.micro_batches, call.micro_batches, strict=True):
        for field in fields(theirs):
            one, other = getattr(theirs, field.name), getattr(ours, field.name)
            if isinstance(one, Ragged):
                np.testing.assert_array_equal(one.offsets, other.offsets)
                one, other = one.values, other.values
            assert (one is None and other is None) or (one.dtype == other.dtype and np.array_equal(one, other)), field.name


def test_the_other_calls_arrive_with_their_arguments() -> None:
    nothing = np.empty(0, np.int64)
    for call in (calls.BeginStep(), calls.OptimStep(7), calls.Gather("a.weight"), calls.Save(Path("/a/b")), calls.Close()):
        assert calls.decode(calls.encode(call)) == call
    log_probs = calls.decode(calls.encode(calls.LogProbs(nothing, Ragged(nothing, np.zeros(1, np.int64)))))
    assert isinstance(log_probs, calls.LogProbs) and len(log_probs.prompt_ids) == 0 and len(log_probs.response_ids) == 0


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "evaluate", "code": "1"}),
        msgspec.msgpack.encode({"type": "optim_step", "normaliser": "all"}),
        msgspec.msgpack.encode({"type": "log_probs", "prompt_ids": ["object", [1], b"12345678"], "response_ids": []}),
        msgspec.msgpack.encode(
            {"type": "log_probs", "prompt_ids": ["int64", [2], b"12345678"], "response_ids": [["int64", [0], b""]] * 2}
        ),
    ],
    ids=["nothing", "no msgpack", "no call", "no number", "no dtype", "too short"],
)
def test_what_is_no_call_is_refused(content: bytes) -> None:
    with pytest.raises(RunError, match="sent what is no call of a train engine"):
        calls.decode(content)
