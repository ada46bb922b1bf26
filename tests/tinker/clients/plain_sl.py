"""The cookbook's sl_loop as a plain loop: the same batches in the same order, transformers and AdamW, no server.

python plain_sl.py MODEL BATCH_SIZE LEARNING_RATE [ADAPTER]        prints the mean NLL of each step

ADAPTER: first values of a low-rank adapter, which is trained then; without it all weights are.
"""

import json
import sys

import datasets
import torch
from adapter import add_adapter
from tinker_cookbook import model_info, renderers
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer
from transformers import AutoModelForCausalLM


def main(name, batch_size, learning_rate, adapter):
    torch.set_num_threads(1)
    tokenizer = get_tokenizer(name)
    renderer = renderers.get_renderer(model_info.get_recommended_renderer_name(name), tokenizer)
    rows = datasets.load_dataset("HuggingFaceH4/no_robots")["train"].shuffle(seed=0)
    steps = len(rows) // batch_size
    model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
    trained = add_adapter(model, adapter) if adapter else model.parameters()
    adamw = torch.optim.AdamW(trained, lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    curve = []
    for step in range(steps):
        for group in adamw.param_groups:
            group["lr"] = learning_rate * (1 - step / steps)
        total = weight = 0.0
        for row in rows.select(range(step * batch_size, (step + 1) * batch_size)):
            datum = conversation_to_datum(row["messages"], renderer, 32768, renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE)
            logits = model(torch.tensor(datum.model_input.to_ints())[None]).logits[0].log_softmax(-1)
            targets = datum.loss_fn_inputs["target_tokens"].to_torch()
            weights = datum.loss_fn_inputs["weights"].to_torch()
            loss = -(logits.gather(1, targets[:, None])[:, 0] * weights).sum()
            loss.backward()
            total, weight = total + loss.item(), weight + weights.sum().item()
        adamw.step()
        adamw.zero_grad()
        curve.append(total / weight)
    print(json.dumps(curve))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]), "".join(sys.argv[4:]))
