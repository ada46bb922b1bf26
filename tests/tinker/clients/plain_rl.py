"""The cookbook's rl_loop as a plain loop: the same prompts, groups, rewards and loss, transformers and AdamW, no server.

python plain_rl.py MODEL NAME BATCH_SIZE GROUP_SIZE LEARNING_RATE MAX_TOKENS ADAPTER        prints the mean reward of each step

ADAPTER: first values of a low-rank adapter, which is trained.
"""

import json
import sys

import datasets
import torch
from adapter import add_adapter
from tinker_cookbook import model_info, renderers
from tinker_cookbook.recipes import rl_loop
from tinker_cookbook.tokenizer_utils import get_tokenizer
from transformers import AutoModelForCausalLM

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."
EXAMPLE = [
    {"role": "user", "content": "How many r's are in strawberry?" + SUFFIX},
    {
        "role": "assistant",
        "content": "Let's spell the word out and number all the letters: 1) s 2) t 3) r 4) a 5) w 6) b 7) e 8) r 9) r 10) y. "
        "We have r's at positions 3, 8, and 9. \\boxed{3}",
    },
]


def main(folder, name, batch_size, group_size, learning_rate, max_tokens, adapter):
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = get_tokenizer(name)
    renderer = renderers.get_renderer(model_info.get_recommended_renderer_name(name), tokenizer)
    rows = datasets.load_dataset("openai/gsm8k", "main")["train"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    adamw = torch.optim.AdamW(add_adapter(model, adapter), lr=learning_rate, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0)
    stop, curve = renderer.get_stop_sequences()[0], []
    for step in range(len(rows) // batch_size):
        total = 0.0
        for row in rows.select(range(step * batch_size, (step + 1) * batch_size)):
            turns = [*EXAMPLE, {"role": "user", "content": row["question"] + SUFFIX}]
            prompt = torch.tensor(renderer.build_generation_prompt(turns).to_ints())
            tokens = prompt.repeat(group_size, 1)
            with torch.no_grad():
                for _ in range(max_tokens):
                    logits = model(tokens).logits[:, -1]
                    tokens = torch.cat([tokens, torch.multinomial(logits.softmax(-1), 1)], 1)
            responses = []
            for sampled in tokens[:, len(prompt) :].tolist():
                ends = [n for n in range(1, max_tokens + 1) if stop in tokenizer.decode(sampled[:n])]
                end = sampled.index(tokenizer.eos_token_id) + 1 if tokenizer.eos_token_id in sampled else max_tokens
                responses.append(sampled[: min([end, *ends[:1]])])
            rewards = []
            for response in responses:
                message, _ = renderer.parse_response(response)
                rewards.append(rl_loop.get_reward(renderers.get_text_content(message), row["answer"]))
            mean = sum(rewards) / group_size
            total += mean
            for response, reward in zip(responses, rewards):  # noqa: B905
                if reward != mean:
                    ids = torch.cat([prompt, torch.tensor(response)])
                    logits = model(ids[None, :-1]).logits[0, len(prompt) - 1 :].log_softmax(-1)
                    logprobs = logits.gather(1, ids[len(prompt) :, None])[:, 0]
                    # On policy: the ratio is 1, and its gradient that of the log-prob.
                    (-(reward - mean) * logprobs.sum()).backward()
        adamw.step()
        adamw.zero_grad()
        curve.append(total / batch_size)
    print(json.dumps(curve))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), float(sys.argv[5]), int(sys.argv[6]), sys.argv[7])
