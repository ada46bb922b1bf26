"""Every call of the SDK that the server answers, once, on arithmetic: run by the SDK's own environment. Prints a JSON object.

python basics.py MODEL_NAME CHECKPOINT_PREFIX
"""

import io
import json
import sys
import tarfile
import urllib.request
import warnings

import tinker
import torch
from tinker import types

warnings.filterwarnings("ignore")


def got(value):
    """What a call returns: older SDKs return the client itself, newer ones a future."""
    return value.result() if hasattr(value, "result") else value


def datum(prompt, answer):
    tokens = prompt + answer
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(answer)
    inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": torch.tensor(weights)}
    return types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)


def rl_datum(prompt, sequence, advantage):
    zeros = [0.0] * (len(prompt) - 1)
    inputs = {
        "target_tokens": torch.tensor([0] * (len(prompt) - 1) + list(sequence.tokens)),  # as the cookbook has it
        "logprobs": torch.tensor(zeros + list(sequence.logprobs)),
        "advantages": torch.tensor(zeros + [advantage] * len(sequence.tokens)),
    }
    model_input = types.ModelInput.from_ints(list(prompt) + list(sequence.tokens[:-1]))
    return types.Datum(model_input=model_input, loss_fn_inputs=inputs)


def main(name, prefix):
    seen = {"version": tinker.__version__}
    service = tinker.ServiceClient()
    rest = service.create_rest_client()
    seen["models"] = [model.model_name for model in service.get_server_capabilities().supported_models]
    training = got(service.create_lora_training_client(base_model=name, rank=8))
    info = training.get_info()
    seen["info"] = [info.model_data.model_name, info.is_lora, info.lora_rank]
    tokenizer = training.get_tokenizer()

    prompt = tokenizer.encode("Tom has 7 coins. Tom finds 5. How many coins does Tom have?\n")
    batch = [datum(prompt, tokenizer.encode("12 is it")), datum(prompt, tokenizer.encode("never 3"))]
    adam = types.AdamParams(learning_rate=4e-3, eps=1e-8)
    before = training.forward(batch, "cross_entropy").result()
    losses = []
    for _ in range(4):
        done = training.forward_backward(batch, "cross_entropy")
        step = training.optim_step(adam)
        losses.append(done.result().metrics["loss:sum"])
        assert step.result().metrics["grad_norm"] > 0
    seen["forward_loss"], seen["losses"] = before.metrics["loss:sum"], losses
    seen["logprobs"] = [output["logprobs"].tolist() for output in before.loss_fn_outputs]

    def custom(data, logprobs):
        weights = [one.loss_fn_inputs["weights"].to_torch() for one in data]
        loss = -sum((weight * logprob).sum() for weight, logprob in zip(weights, logprobs, strict=True))
        return loss, {"pieces": float(len(logprobs))}

    # A custom loss that is the cross entropy trains as the cross entropy does.
    customs = got(service.create_lora_training_client(base_model=name, rank=8))
    seen["custom"] = []
    for _ in range(4):
        done = customs.forward_backward_custom(batch, custom).result()
        customs.optim_step(adam).result()
        seen["custom"].append(done.metrics)
    seen["custom_losses"] = [customs.forward(batch, "cross_entropy").result().metrics["loss:sum"]]
    seen["custom_losses"] += [training.forward(batch, "cross_entropy").result().metrics["loss:sum"]]

    # In chunks: the SDK cuts requests of more than 128 (older) or 1024 datums, and sends the parts side by side.
    many = training.forward([batch[i % 2] for i in range(1100)], "cross_entropy").result()
    seen["many"] = len(many.loss_fn_outputs)

    state = training.save_state(f"{prefix}-state").result().path
    sampler_path = training.save_weights_for_sampler(f"{prefix}-sampler").result().path
    seen["paths"] = [state, sampler_path]
    saved = got(service.create_sampling_client(model_path=sampler_path))
    fresh = got(training.save_weights_and_get_sampling_client())
    of_base = got(service.create_sampling_client(base_model=name))
    greedy = types.SamplingParams(max_tokens=12, temperature=0.0)
    seen["same"] = [
        client.sample(types.ModelInput.from_ints(prompt), 1, greedy).result().sequences[0].tokens for client in (saved, fresh)
    ]
    seen["base"] = of_base.sample(types.ModelInput.from_ints(prompt), 1, greedy).result().sequences[0].tokens

    seeded = types.SamplingParams(max_tokens=20, seed=7, stop=["\n"])
    drawn = [fresh.sample(types.ModelInput.from_ints(prompt), 4, seeded).result() for _ in range(2)]
    seen["drawn"] = [[sequence.tokens for sequence in one.sequences] for one in drawn]
    seen["stops"] = [tokenizer.decode(sequence.tokens) for sequence in drawn[0].sequences]
    ends = types.SamplingParams(max_tokens=30, stop=[tokenizer.encode("1")[0]], temperature=1.0)
    seen["stop_ids"] = [
        [tokenizer.decode(s.tokens), s.stop_reason]
        for s in fresh.sample(types.ModelInput.from_ints(prompt), 8, ends).result().sequences
    ]
    scored = fresh.compute_logprobs(
        types.ModelInput.from_ints(prompt + batch[0].loss_fn_inputs["target_tokens"].tolist()[-3:])
    ).result()
    seen["scored"] = [scored[0], len(scored), sum(scored[1:])]

    # Log-probs of the sampler are those of the trainer.
    sequence = drawn[0].sequences[0]
    plain = rl_datum(prompt, sequence, 1.0)
    again = training.forward([plain], "importance_sampling").result().loss_fn_outputs[0]["logprobs"].tolist()
    seen["mismatch"] = max(abs(a - b) for a, b in zip(again[len(prompt) - 1 :], sequence.logprobs, strict=True))
    for loss, config in (
        ("importance_sampling", None),
        ("ppo", {"clip_low_threshold": 0.9, "clip_high_threshold": 1.1}),
        ("cispo", None),
    ):
        outcome = training.forward_backward([plain, rl_datum(prompt, drawn[0].sequences[1], -0.5)], loss, config).result()
        seen[loss] = outcome.metrics["loss:sum"]
    training.optim_step(adam).result()

    # A state that is loaded goes on as the model that saved it would have.
    goes_on = got(service.create_training_client_from_state_with_optimizer(state))
    fresh_optimizer = got(service.create_training_client_from_state(state))
    continued = []
    for client in (goes_on, fresh_optimizer):
        losses = []
        for _ in range(2):
            done, step = client.forward_backward(batch, "cross_entropy"), client.optim_step(adam)
            losses.append(done.result().metrics["loss:sum"])
            step.result()
        continued.append(losses)
    seen["continued"] = continued

    run = rest.get_training_run_by_tinker_path(state).result()
    seen["run"] = [run.base_model, run.is_lora, run.last_checkpoint.tinker_path]
    seen["checkpoints"] = sorted(one.checkpoint_id for one in rest.list_checkpoints(run.training_run_id).result().checkpoints)
    rest.delete_checkpoint_from_tinker_path(sampler_path).result()
    seen["left"] = [one.checkpoint_id for one in rest.list_checkpoints(run.training_run_id).result().checkpoints]
    if hasattr(training, "save_weights_external"):
        exported = training.save_weights_external(f"{prefix}-out").result().path
        urls = rest.get_external_weights_urls(exported).result().urls
        seen["files"] = {name: len(urllib.request.urlopen(url).read()) for name, url in urls.items()}
    else:
        url = rest.get_checkpoint_archive_url_from_tinker_path(state).result().url
        with tarfile.open(fileobj=io.BytesIO(urllib.request.urlopen(url).read())) as archive:
            seen["files"] = {member.name: member.size for member in archive.getmembers()}
    mistakes = {}
    for what, call in {
        "loss": lambda: training.forward([plain], "dro").result(),
        "missing": lambda: training.forward([plain], "cross_entropy").result(),
        "path": lambda: got(service.create_training_client_from_state(sampler_path)),
        "model": lambda: got(service.create_lora_training_client(base_model="nobody/nothing")),
        "long": lambda: fresh.sample(types.ModelInput.from_ints(prompt * 40), 1, greedy).result(),
    }.items():
        try:
            call()
            mistakes[what] = ""
        except Exception as error:
            mistakes[what] = f"{type(error).__name__}: {error}"
    seen["mistakes"] = mistakes
    print(json.dumps(seen))


if __name__ == "__main__":
    main(*sys.argv[1:])
