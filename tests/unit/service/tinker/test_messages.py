"""Requests as bytes of the public SDK, answers as bytes that it reads, and what is refused."""

import json

import numpy as np
import pytest
from pydantic import ValidationError

from asyncflow.engines.base import Response
from asyncflow.service.tinker import messages, protobuf
from asyncflow.service.tinker.answers import Failure, PassOutput, SampleOutput
from asyncflow.types import Ragged

# What tinker 0.38.0 sends for a pass of one datum: two chunks of tokens, targets, weights, a number and a text for options.
SENT = bytes.fromhex(
    "0a09733a747261696e3a3010031a7a0a100a0e0a0c0500000006000000070000000a080a060a040800000012380a0d7461726765745f746f6b656e7312270a20"
    "0600000000000000070000000000000008000000000000002c01000000000000180222010412220a077765696768747312170a10000000000000003f0000803f"
    "000000c01801220104220370706f2a1d0a12636c69705f6c6f775f7468726573686f6c6411cdccccccccccec3f30013a1f0a12636c69705f6c6f775f74687265"
    "73686f6c64120909cdccccccccccec3f3a0b0a046d6f64651203120178"
)


def test_a_pass_of_the_sdk_is_read_from_its_bytes() -> None:
    made = messages.pass_of_protobuf(SENT)
    assert (made.model_id, made.seq_id, made.loss, made.is_forward_only) == ("s:train:0", 3, "ppo", True)
    assert made.loss_options == {"clip_low_threshold": 0.9, "mode": "x"}
    (example,) = made.examples
    assert example.token_ids.dtype == np.int64 and example.token_ids.tolist() == [5, 6, 7, 8]
    assert example.inputs["target_tokens"].tolist() == [6, 7, 8, 300] and example.inputs["target_tokens"].dtype == np.int64
    assert example.inputs["weights"].tolist() == [0.0, 0.5, 1.0, -2.0] and example.inputs["weights"].dtype == np.float32


def test_json_and_protobuf_say_the_same() -> None:
    datum = {
        "model_input": {"chunks": [{"tokens": [5, 6, 7], "type": "encoded_text"}, {"tokens": [8]}]},
        "loss_fn_inputs": {
            "weights": {"data": [0.0, 0.5, 1.0, -2.0], "dtype": "float32", "shape": [4]},
            "target_tokens": {"data": [6, 7, 8, 300], "dtype": "int64"},
        },
    }
    given = {"data": [datum], "loss_fn": "ppo", "loss_fn_config": {"clip_low_threshold": 0.9, "mode": "x"}}
    for name in ("forward_backward_input", "forward_input"):
        request = messages.JsonPass.model_validate_json(json.dumps({name: given, "model_id": "s:train:0", "seq_id": 3}))
        made = messages.pass_of_json(request, is_forward_only=True)
        assert made.content() == messages.pass_of_protobuf(SENT).content()
    other = messages.pass_of_json(request, is_forward_only=False)
    assert other.content() != made.content()
    datum["loss_fn_inputs"]["weights"]["data"][3] = -2.5
    request = messages.JsonPass.model_validate_json(json.dumps({"forward_input": given, "model_id": "s:train:0", "seq_id": 3}))
    assert messages.pass_of_json(request, is_forward_only=True).content() != made.content()


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda m: None, "no protobuf message"),
        (lambda m: m.data[0].model_input.add().image.SetInParent(), "tokens alone"),
        (lambda m: m.data[0].loss_fn_inputs["weights"].sparse_csr.SetInParent(), "weights is sparse"),
        (lambda m: setattr(m.data[0].loss_fn_inputs["weights"], "dtype", 4), "neither float32 nor int64"),
        (lambda m: setattr(m.data[0].loss_fn_inputs["weights"], "dense", b"123"), "3 bytes are no array"),
        (lambda m: m.data[0].loss_fn_inputs["weights"].shape.append(2), "reshape"),
    ],
)
def test_a_pass_that_is_none_is_refused(spoil, sentence: str) -> None:
    made = protobuf.message("ForwardBackwardRequest")
    made.ParseFromString(SENT)
    spoil(made)
    body = b"\x0a\xff" if sentence == "no protobuf message" else made.SerializeToString()
    with pytest.raises(ValueError, match=sentence):
        messages.pass_of_protobuf(body)


def test_an_answer_to_a_pass_is_one_tensor_cut_by_offsets_in_bytes() -> None:
    answer = PassOutput(Ragged.from_arrays([np.array([-1.0, -2.5]), np.array([-0.5])], "float32"), {"loss:sum": 4.0})
    made = protobuf.message("ForwardBackwardOutput")
    made.ParseFromString(answer.protobuf())
    (record,) = made.loss_fn_outputs
    batched = record.fields["logprobs"]
    assert made.loss_fn_output_type == "ArrayRecord" and dict(made.metrics) == {"loss:sum": 4.0} and record.num_datums == 2
    assert np.frombuffer(batched.data, "<f4").tolist() == [-1.0, -2.5, -0.5] and batched.dtype == protobuf.FLOAT32
    assert np.frombuffer(batched.offsets, "<i8").tolist() == [0, 8, 12] and not batched.trailing_shape
    outputs = answer.json()["loss_fn_outputs"]
    assert [output["logprobs"] for output in outputs] == [
        {"data": [-1.0, -2.5], "dtype": "float32", "shape": [2]},
        {"data": [-0.5], "dtype": "float32", "shape": [1]},
    ]


def test_an_answer_with_samples_has_tokens_of_four_bytes() -> None:
    spans = np.array([[0, 0]])
    one = Response(0, np.array([7, 300]), np.array([-1.0, -0.25], np.float32), spans, "stop")
    answer = SampleOutput(
        [one, Response(1, np.array([9]), np.array([-3.0], np.float32), spans, "length")], np.array([np.nan, -2.0], np.float32)
    )
    made = protobuf.message("SampleResponse")
    made.ParseFromString(answer.protobuf())
    assert [np.frombuffer(each.tokens, "<i4").tolist() for each in made.sequences] == [[7, 300], [9]]
    assert [np.frombuffer(each.logprobs, "<f4").tolist() for each in made.sequences] == [[-1.0, -0.25], [-3.0]]
    assert [each.stop_reason for each in made.sequences] == [protobuf.STOP, protobuf.LENGTH]
    assert np.isnan(np.frombuffer(made.prompt_logprobs, "<f4")).tolist() == [True, False]
    assert answer.json()["prompt_logprobs"] == [None, -2.0]
    assert answer.json()["sequences"][1] == {"tokens": [9], "logprobs": [-3.0], "stop_reason": "length"}
    assert Failure("no").json() == {"error": "no", "category": "user"} and Failure("no").protobuf() is None


def test_a_field_that_is_not_known_may_be_empty_and_no_more() -> None:
    given = {"session_id": "s", "model_seq_id": 0, "base_model": "m", "novelty": 0, "lora_config": {"rank": 8, "more": None}}
    assert messages.CreateModel.model_validate(given).lora_config == messages.LoraConfig.model_validate({"rank": 8, "more": None})
    with pytest.raises(ValidationError, match="does not know 'novelty'"):
        messages.CreateModel.model_validate({**given, "novelty": 3})
    with pytest.raises(ValidationError, match="adamw"):
        messages.CreateModel.model_validate({**given, "optimizer_config": {"type": "dimuon"}})
    with pytest.raises(ValidationError, match="65536 bytes"):
        messages.CreateSession(user_metadata={"a": "b" * 70_000})
    with pytest.raises(ValidationError, match="one of the two"):
        messages.LoadWeights.model_validate({"path": "tinker://a/weights/b", "optimizer": True})


@pytest.mark.parametrize(
    ("stop", "texts", "stop_ids"),
    [(None, (), None), ([], (), ()), ("x", ("x",), None), (["x", "y"], ("x", "y"), None), ([5, 6], (), (5, 6, 1))],
)
def test_stops_come_in_addition_to_the_end_tokens_unless_there_is_an_empty_list(stop, texts, stop_ids) -> None:
    params = messages.SamplingParams.model_validate({"stop": stop, "max_tokens": 9, "temperature": 0.5, "top_p": 0.9, "top_k": -1})
    sampling = params.sampling([1], 100)
    assert (sampling.stop, sampling.stop_ids) == (texts, stop_ids)
    assert (sampling.temperature, sampling.max_new_tokens, sampling.top_p, sampling.top_k) == (0.5, 9, 0.9, 0)
    assert messages.SamplingParams().sampling([1], 100).max_new_tokens == 100


def test_no_clip_is_a_norm_of_0() -> None:
    assert messages.AdamParams().hyperparameters.max_grad_norm is None
    chosen = messages.AdamParams(learning_rate=2e-3, beta1=0.8, eps=1e-8, grad_clip_norm=0.5).hyperparameters
    assert (chosen.learning_rate, chosen.betas, chosen.epsilon, chosen.max_grad_norm) == (2e-3, (0.8, 0.95), 1e-8, 0.5)
