"""A leader's calls as bytes: what arrives is what was sent, and what is none of them is refused."""

from dataclasses import fields, replace
from pathlib import Path

import msgspec
import numpy as np
import pytest

from asyncflow.engines.base import Hyperparameters
from asyncflow.engines.train.leader_engine import LeaderEngine
from asyncflow.engines.train.one_rank import OneRank
from asyncflow.engines.train.parallel.calls import ARGUMENTS, Call, decode, encode
from asyncflow.engines.train.parallel.many_ranks import ManyRanks
from asyncflow.types import Ragged, RunError
from tests.unit.engines.train.parallel.training_ranks import make_batch


def test_a_turn_arrives_as_it_was_sent() -> None:
    batch = make_batch(0, (5, 1, 9), 20)
    with_reference = replace(batch, ref_logprobs=Ragged(batch.rollout_logprobs.values[::-1], batch.rollout_logprobs.offsets))
    for column in (batch.prompt_ids, batch.response_ids.values):
        column.flags.writeable = False  # as they come out of a received frame
    sent = [batch, replace(with_reference, examined_rows=(0, 2), row_tokens=np.array([9, 1, 12]))]
    call = decode(encode(Call("forward_backward", (sent,))))
    assert call.method == "forward_backward"
    for theirs, ours in zip(sent, call.arguments[0], strict=True):
        for field in fields(theirs):
            one, other = getattr(theirs, field.name), getattr(ours, field.name)
            if isinstance(one, Ragged):
                np.testing.assert_array_equal(one.offsets, other.offsets)
                one, other = one.values, other.values
            if isinstance(one, np.ndarray):
                assert one.dtype == other.dtype and np.array_equal(one, other), field.name
            else:
                assert one == other, field.name


def test_the_other_calls_arrive_with_their_arguments() -> None:
    nothing = np.empty(0, np.int64)
    numbers = Call("optim_step", (7,)), Call("use_threads", (3,))
    for call in (Call("begin_step"), *numbers, Call("gather", ("a.weight",)), Call("save", (Path("/a/b"),))):
        assert decode(encode(call)) == call
    chosen = Hyperparameters(learning_rate=1e-3, betas=(0.9, 0.95), epsilon=1e-8, weight_decay=0.0, max_grad_norm=None)
    assert decode(encode(Call("set_hyperparameters", (chosen,)))).arguments == (chosen,)
    empty = Ragged(nothing, np.zeros(1, np.int64))
    method, (prompt_ids, *both, temperature, dtype) = decode(encode(Call("log_probs", (nothing, empty, empty, 0.7, "bfloat16"))))
    assert (method, temperature, dtype) == ("log_probs", 0.7, "bfloat16")
    assert len(prompt_ids) == 0 and [len(each) for each in both] == [0, 0]
    assert decode(encode(Call("log_probs", (nothing, empty, None, None, None)))).arguments[2:] == (None, None, None)


@pytest.mark.parametrize("training", [OneRank, ManyRanks])
def test_each_call_is_a_method(training: type) -> None:
    assert all(callable(getattr(training, method, None)) for method in ARGUMENTS.keys() - {"close"})
    assert callable(LeaderEngine.close)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xc1",
        msgspec.msgpack.encode(["evaluate", ["1"]]),
        msgspec.msgpack.encode(["optim_step", ["all"]]),
        msgspec.msgpack.encode(["optim_step", []]),
        msgspec.msgpack.encode(["log_probs", [["object", [1], b"12345678"], [], None, None]]),
        msgspec.msgpack.encode(["log_probs", [["int64", [2], b"12345678"], [["int64", [0], b""]] * 2, None, None]]),
    ],
    ids=["nothing", "no msgpack", "no call", "no number", "no argument", "no dtype", "too short"],
)
def test_what_is_no_call_is_refused(content: bytes) -> None:
    with pytest.raises(RunError, match="sent what is no call of a train engine"):
        decode(content)
