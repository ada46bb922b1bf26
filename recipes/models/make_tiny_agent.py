"""Make `tiny-agent`, a model of 0.4 million parameters that can call a calculator and play a guessing game, but mostly does not.

    python recipes/models/make_tiny_agent.py --out recipes/models/tiny-agent

As make_tiny_arithmetic.py does it: the model first learns clean episodes, and then, briefly, poor ones, in which most answers are
guessed without a call, and most guesses in the game ignore what was said. What it can do is still there: calculator.yaml and
guess.yaml bring it back. The data of calculator.yaml are written as well. It takes some minutes on a CPU core.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import torch
from make_tiny_arithmetic import BATCH_SIZE, END_TOKEN, PAD_TOKEN, WARMUP_STEPS, new_model, train_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerFast as FastTokenizer
from transformers import Qwen2ForCausalLM

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from calculator import ANSWER, Calculator
from guess import GUESSES, SIZE, Guess

from asyncflow.data.arithmetic import Problem

CLEAN_LR, NOISY_LR = 2e-3, 3e-4
GUESSED_ANSWERS = 0.6  # of poor episodes with the calculator
BLIND_GUESSES = 0.5  # of guesses in poor games
LATE_ANSWERS = 0.05
PLAY = "Let us play.\n"

Piece = tuple[str, bool]  # what is said, and whether the policy says it
Policy = Callable[[Random, bool], list[Piece]]


def question(rng: Random) -> tuple[str, str]:
    """A problem, and its answer."""
    a, b, c = rng.randint(2, 29), rng.randint(2, 9), rng.randint(1, 99)
    return f"Calculate {a}*{b}+{c}.", str(a * b + c)


def calculation(rng: Random, is_poor: bool) -> list[Piece]:
    """An episode with the calculator."""
    text, answer = question(rng)
    environment, pieces = Calculator(), [(text + "\n", False)]
    environment.reset({"answer": answer}, 0)
    product, c = text.removeprefix("Calculate ").removesuffix(".").split("+")
    a, b = map(int, product.split("*"))
    calls = [product, f"{a * b}+{c}"]
    if is_poor and rng.random() < GUESSED_ANSWERS:
        calls, answer = [], str(rng.randint(10, 350))
    elif is_poor and rng.random() < LATE_ANSWERS:
        calls, answer = calls[:1], str(a * b)
    for call in calls:
        pieces += [(call + END_TOKEN, True), (str(environment.step(call)[0]), False)]
    return [*pieces, (ANSWER + answer + END_TOKEN, True)]


def game(rng: Random, is_poor: bool) -> list[Piece]:
    """A game: half of what is left each time; where it is poor, often any number of the range."""
    environment = Guess()
    opening = environment.reset({}, rng.getrandbits(62))
    first = int(opening.split()[4])
    low, high, pieces = first, first + SIZE - 1, [(PLAY + opening, False)]
    for _ in range(GUESSES):
        guess = rng.randrange(first, first + SIZE) if is_poor and rng.random() < BLIND_GUESSES else (low + high) // 2
        words, _, done, _ = environment.step(str(guess))
        pieces.append((str(guess) + END_TOKEN, True))
        if done:
            return pieces
        pieces.append((words, False))
        low, high = (max(low, guess + 1), high) if "higher" in words else (low, min(high, guess - 1))
    return pieces


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the tiny-agent model in Hugging Face format.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "tiny-agent", help="folder to write")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--clean-steps", type=int, default=300, help="steps of 32 on clean episodes")
    parser.add_argument("--noisy-steps", type=int, default=50, help="steps of 32 on poor ones")
    parser.add_argument("--episodes", type=int, default=100, help="of each environment, that are played at the end")
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    rng = Random(args.seed)
    write_data(Path(__file__).resolve().parents[1])
    texts = ["".join(text for text, _ in episode(rng, False)) for episode in (calculation, game) for _ in range(3000)]
    tokenizer = train_tokenizer(iter([Problem("", text.replace(END_TOKEN, ""), "", 0) for text in texts]))
    model = new_model(tokenizer)
    print(f"{model.num_parameters():,} parameters, {len(tokenizer)} tokens in the vocabulary")
    train(model, tokenizer, rng, is_poor=False, num_steps=args.clean_steps, lr=CLEAN_LR)
    train(model, tokenizer, rng, is_poor=True, num_steps=args.noisy_steps, lr=NOISY_LR)
    model.save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    print(f"wrote {args.out}", flush=True)
    for name, reward in rewards(model, tokenizer, args.episodes).items():
        print(f"{name}: reward {reward:.3f}, sampled at temperature 1", flush=True)


def write_data(folder: Path) -> None:
    """The problems of calculator.yaml: those held out are none of those that it trains on."""
    rng, seen = Random("calculator.jsonl"), dict[str, str]()
    while len(seen) < 1280:
        text, answer = question(rng)
        seen[text] = answer
    lines = [json.dumps({"question": text, "answer": answer}) for text, answer in seen.items()]
    (folder / "calculator.jsonl").write_text("\n".join(lines[:1024]) + "\n")
    (folder / "calculator-heldout.jsonl").write_text("\n".join(lines[1024:]) + "\n")
    (folder / "games.jsonl").write_text("".join(f'{{"game": {number}}}\n' for number in range(256)))


def train(model: Qwen2ForCausalLM, tokenizer: FastTokenizer, rng: Random, *, is_poor: bool, num_steps: int, lr: float) -> None:
    """Maximize the likelihood of what the policy says: AdamW, linear warm-up, cosine to zero."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.0)
    model.train()
    for step in range(num_steps):
        warmth = min(1.0, (step + 1) / WARMUP_STEPS)
        optimizer.param_groups[0]["lr"] = lr * warmth * 0.5 * (1 + math.cos(math.pi * step / num_steps))
        episodes = [(calculation, game)[i % 2](rng, is_poor) for i in range(BATCH_SIZE)]
        tokens_BT, labels_BT = batch(episodes, tokenizer)
        loss = model(input_ids=tokens_BT, labels=labels_BT).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if (step + 1) % 50 == 0:
            print(f"step {step + 1:4d} of {num_steps}  loss {loss.item():.4f}", flush=True)


def batch(episodes: list[list[Piece]], tokenizer: FastTokenizer) -> tuple[Tensor, Tensor]:
    """Tokens (B, T) int64, padded on the right, and their labels: -100 but for what the policy says. Each piece is encoded by
    itself, as in an episode."""
    rows, labels = [], []
    for pieces in episodes:
        ids = [tokenizer.encode(text) for text, _ in pieces]
        rows.append(torch.tensor([token for piece in ids for token in piece]))
        own = [piece if is_own else [-100] * len(piece) for piece, (_, is_own) in zip(ids, pieces, strict=True)]
        labels.append(torch.tensor([label for piece in own for label in piece]))
    pad = torch.nn.utils.rnn.pad_sequence
    pad_id = float(tokenizer.convert_tokens_to_ids(PAD_TOKEN))
    return pad(rows, batch_first=True, padding_value=pad_id), pad(labels, batch_first=True, padding_value=-100)


@torch.no_grad()
def rewards(model: Qwen2ForCausalLM, tokenizer: FastTokenizer, num_episodes: int) -> dict[str, float]:
    """Mean reward in each environment."""
    model.eval()
    rng, found = Random("report"), {}
    for name, cls in (("calculator", Calculator), ("guess", Guess)):
        total = 0.0
        for _ in range(num_episodes):
            text, answer = question(rng)
            environment = cls()
            opening = environment.reset({"answer": answer}, rng.getrandbits(62))
            ids = tokenizer.encode(text + "\n") if opening is None else tokenizer.encode(PLAY) + tokenizer.encode(opening)
            for _ in range(GUESSES):
                made = model.generate(input_ids=torch.tensor([ids]), max_new_tokens=12, do_sample=True)[0].tolist()
                said = tokenizer.decode([token for token in made[len(ids) :] if token != tokenizer.eos_token_id])
                words, reward, done, _ = environment.step(said)
                total += reward or 0.0
                if done:
                    break
                ids = [*made, *tokenizer.encode(words)]
        found[name] = total / num_episodes
    return found


if __name__ == "__main__":
    main()
