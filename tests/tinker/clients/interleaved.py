"""Two sessions at once, steps and samples of both in turn, beside each of them alone. Prints a JSON object.

python interleaved.py MODEL_NAME
"""

import json
import sys
import threading
import warnings

import tinker
import torch
from tinker import types

warnings.filterwarnings("ignore")


def got(value):
    return value.result() if hasattr(value, "result") else value


class Learner:
    """A client that teaches its model one sentence, and looks now and then at what it says."""

    def __init__(self, name, text):
        self.service = tinker.ServiceClient()
        self.training = got(self.service.create_lora_training_client(base_model=name))
        self.tokenizer = self.training.get_tokenizer()
        self.prompt = self.tokenizer.encode("Say it:\n")
        tokens = self.prompt + self.tokenizer.encode(text)
        weights = [0.0] * (len(self.prompt) - 1) + [1.0] * (len(tokens) - len(self.prompt))
        inputs = {"target_tokens": torch.tensor(tokens[1:]), "weights": torch.tensor(weights)}
        self.batch = [types.Datum(model_input=types.ModelInput.from_ints(tokens[:-1]), loss_fn_inputs=inputs)]
        self.said = []

    def learn(self):
        for step in range(6):
            done = self.training.forward_backward(self.batch, "cross_entropy")
            self.training.optim_step(types.AdamParams(learning_rate=3e-3, eps=1e-8)).result()
            loss = done.result().metrics["loss:sum"]
            answer = ""
            if step % 2:
                client = got(self.training.save_weights_and_get_sampling_client())
                params = types.SamplingParams(max_tokens=12, temperature=1.0, seed=step)
                futures = [client.sample(types.ModelInput.from_ints(self.prompt), 2, params) for _ in range(3)]
                answer = [[sequence.tokens for sequence in future.result().sequences] for future in futures]
            self.said.append([loss, answer])
        return self.said


def main(name):
    texts = ["apples and plums", "never 17 again"]
    learners = [Learner(name, text) for text in texts]
    threads = [threading.Thread(target=learner.learn) for learner in learners]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    together = [learner.said for learner in learners]
    for learner in learners:
        learner.service.close("success").result() if hasattr(learner.service, "close") else None
    alone = []
    for text in texts:
        learner = Learner(name, text)
        alone.append(learner.learn())
        learner.service.close("success").result() if hasattr(learner.service, "close") else None
    print(json.dumps({"together": together, "alone": alone}))


if __name__ == "__main__":
    main(*sys.argv[1:])
