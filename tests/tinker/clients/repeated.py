"""Steps whose requests are all sent three times, the later ones first, beside steps that are sent once. Prints a JSON object.

    python repeated.py MODEL_NAME

The SDK's own messages, sent by hand: what a client does whose answers were lost on the way.
"""

import json
import os
import sys
import urllib.error
import urllib.request
import warnings

import tinker
import torch
from tinker import types

warnings.filterwarnings("ignore")
NUM_STEPS = 3


def got(value):
    return value.result() if hasattr(value, "result") else value


def post(path, body):
    headers = {"X-API-Key": os.environ["TINKER_API_KEY"], "Content-Type": "application/json"}
    url = f"{os.environ['TINKER_BASE_URL']}/api/v1/{path}"
    with urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)) as answer:
        return json.loads(answer.read())


def result_of(future):
    while True:
        try:
            return post("retrieve_future", future)
        except urllib.error.HTTPError as error:
            if error.code != 408:
                raise


def main(name):
    service = tinker.ServiceClient()
    plain, other = (got(service.create_lora_training_client(base_model=name)) for _ in range(2))
    tokens = plain.get_tokenizer().encode("Tom has 7 coins. Ann has 3.")
    inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": torch.ones(len(tokens) - 1)}
    batch = [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
    losses = []
    for _ in range(NUM_STEPS):
        done = plain.forward_backward(batch, "cross_entropy")
        plain.optim_step(types.AdamParams(learning_rate=1e-3)).result()
        losses.append(done.result().metrics["loss:sum"])

    model = {"model_id": other.model_id}
    tensors = {
        "target_tokens": {"data": tokens[1:], "dtype": "int64", "shape": [len(tokens) - 1]},
        "weights": {"data": [1.0] * (len(tokens) - 1), "dtype": "float32", "shape": [len(tokens) - 1]},
    }
    data = [{"model_input": {"chunks": [{"type": "encoded_text", "tokens": tokens[:-1]}]}, "loss_fn_inputs": tensors}]
    passed = {"forward_backward_input": {"data": data, "loss_fn": "cross_entropy"}}
    requests = []
    for step in range(NUM_STEPS):
        requests.append(("forward_backward", {**passed, **model, "seq_id": 2 * step + 1}))
        requests.append(("optim_step", {"adam_params": {"learning_rate": 1e-3}, **model, "seq_id": 2 * step + 2}))
    sent = [post(path, body) for path, body in list(reversed(requests)) + requests]
    assert sent[: len(requests)] == list(reversed(sent[len(requests) :])), "the same request has the same id"
    futures = sent[len(requests) :]
    answers = [result_of(future) for future in futures]
    sent += [post(path, body) for path, body in requests]  # after their turn
    again = [result_of(future) for future in futures]
    assert again == answers
    after = other.forward(batch, "cross_entropy")  # its own counter begins at 1, too: a number that is taken
    try:
        after.result()
        refused = ""
    except Exception as error:
        refused = str(error)
    repeated = [answer["metrics"]["loss:sum"] for answer in answers[::2]]
    print(
        json.dumps(
            {"plain": losses, "repeated": repeated, "num_sent": len(sent), "num_requests": len(requests), "refused": refused}
        )
    )


if __name__ == "__main__":
    main(*sys.argv[1:])
