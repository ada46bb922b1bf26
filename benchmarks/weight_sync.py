"""How fast new weights reach a rollout worker: 200 MB of float32, by each weight sync, beside a memcpy and a loopback socket.

    OMP_NUM_THREADS=1 python benchmarks/weight_sync.py [--json FILE] [--repeats N] [--model PATH]

The sender is a process of its own, this one is the worker. A version is published, fetched and installed; publishing and fetching
include the hash; a fetch from shared memory is the hash alone. Then, in the same repeat and over the same number of bytes:

    memcpy      from one buffer to another
    socket      from the other process through a plain TCP connection over loopback into one buffer, nothing hashed or copied on
    TLS         the same by TLS, as `network` travels

A ratio is the median of the ratios within each repeat; the first repeat, which allocates, is dropped. `bfloat16` casts the same
weights on their way; its rates count the bytes of float32. `one by one` are tensors that would have to be gathered: each is copied
before the next one is there, and ranks would be held until the last one is; all are hashed then. The broadcast goes through gloo on
loopback.

With `--model`, that alone: the folder's model makes steps of AdamW at a learning rate of 1e-6 on sums (cross-entropy of prompt and
answer), and each version travels by `network` in bfloat16 to two receivers of one sender: one that has the version before, so that
differences come, and one that has none. Their bytes, their seconds, and the share of the numbers that changed.
"""

from __future__ import annotations

import asyncio
import math
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import msgspec
import numpy as np
import torch
from figures import Figure, finish, parser
from transformers import AutoModelForCausalLM

from asyncflow.data import sums
from asyncflow.data.tokenizer import CheckpointTokenizer
from asyncflow.engines.decoder_config import DecoderConfig
from asyncflow.engines.rollout.decoder import Decoder
from asyncflow.registry import build
from asyncflow.transport import Credentials
from asyncflow.types import HeldWeights
from asyncflow.weight_sync import WEIGHT_SYNCS
from asyncflow.weight_sync.base import Manifest, WeightSync, WeightSyncOptions
from asyncflow.weight_sync.network import NetworkReceiver

FIELDS = {
    "model_type": "qwen3",
    "vocab_size": 32000,
    "hidden_size": 512,
    "intermediate_size": 1536,
    "num_hidden_layers": 11,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}
VARIANTS = {
    "shared memory": ("shared_memory", None),
    "shared memory, bfloat16": ("shared_memory", "bfloat16"),
    "shared memory, one by one": ("shared_memory", None),
    "collective": ("collective", None),
    "network": ("network", None),
    "network, bfloat16": ("network", "bfloat16"),
}
CHUNK_BYTES = 1 << 20


class OneByOne(HeldWeights):
    """Weights as they come when they have to be gathered; that takes no time. `ended`: when the last one had been taken."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        super().__init__(tensors)
        self.are_lasting, self.are_gathered, self.ended = False, True, 0.0

    async def tensors(self) -> AsyncIterator[tuple[str, torch.Tensor]]:
        async for named in super().tensors():
            yield named
        self.ended = time.perf_counter()


def new_decoder() -> Decoder:
    config = DecoderConfig.from_fields(FIELDS)
    return Decoder(config, num_slots=4, max_context=64, dtype=torch.float32, device=torch.device("cpu"))


def weights(decoder: Decoder) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    return {name: torch.randn(shape) for name, shape in decoder.shapes.items()}


def sync(variant: str, folder: Path, key: Path | None = None) -> WeightSync:
    kind, dtype = VARIANTS[variant]
    options = WeightSyncOptions(directory=folder / variant.replace(" ", "-"), dtype=dtype, key=key or folder / "key.pem")
    made: WeightSync = build("weight sync", kind, {"options": options}, WEIGHT_SYNCS)
    return made


async def serve(variant: str, folder: Path) -> None:
    """The sender's process: publishes at each number that it reads, and writes the seconds and the manifest; or calls `send`."""
    tensors = weights(new_decoder())
    source = OneByOne(tensors) if variant.endswith("one by one") else HeldWeights(tensors)
    sender, num_bytes = sync(variant, folder).sender("benchmark"), sum(tensor.nbytes for tensor in tensors.values())
    payload, server = memoryview(bytearray(num_bytes)), socket.create_server(("127.0.0.1", 0))
    context = Credentials.load(folder / "key.pem").server_context
    print(server.getsockname()[1], flush=True)
    while line := await asyncio.to_thread(sys.stdin.readline):
        if line.strip() in ("socket", "TLS"):
            send(server, payload, context if line.strip() == "TLS" else None)
            continue
        start = time.perf_counter()
        manifest = await sender.publish(int(line), source)
        end = time.perf_counter()
        held = (source.ended if isinstance(source, OneByOne) else end) - start
        print(end - start, held, msgspec.json.encode(manifest).decode(), flush=True)


def send(server: socket.socket, payload: memoryview, context: ssl.SSLContext | None) -> None:
    connection, _ = server.accept()
    with context.wrap_socket(connection, server_side=True) if context else connection as stream:
        stream.recv(1)
        for begin in range(0, len(payload), CHUNK_BYTES):
            stream.sendall(payload[begin : begin + CHUNK_BYTES])
        stream.recv(1)


def receive(port: int, target: memoryview, context: ssl.SSLContext | None) -> float:
    """Seconds."""
    connection = socket.create_connection(("127.0.0.1", port))
    with context.wrap_socket(connection, server_hostname="asyncflow") if context else connection as stream:
        start, filled = time.perf_counter(), 0
        stream.sendall(b"?")
        while filled < len(target):
            filled += stream.recv_into(target[filled : filled + CHUNK_BYTES])
        seconds = time.perf_counter() - start
        stream.sendall(b"!")
    return seconds


@contextmanager
def sender_process(variant: str, folder: Path) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, __file__, "--serve", variant, "--folder", str(folder)]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


async def measure(variant: str, folder: Path, decoder: Decoder, repeats: int) -> dict[str, list[float]]:
    """Seconds of each part in each repeat."""
    seconds: dict[str, list[float]] = {}
    context = Credentials.load(folder / "key.pem").client_context
    num_bytes = 4 * sum(map(math.prod, decoder.shapes.values()))
    source, target = torch.ones(num_bytes, dtype=torch.uint8), torch.ones(num_bytes, dtype=torch.uint8)
    receiver = sync(variant, folder).receiver("rollout/0")
    with sender_process(variant, folder) as process:
        assert process.stdin is not None and process.stdout is not None
        port = int(process.stdout.readline())

        def tell(line: str) -> None:
            print(line, file=process.stdin, flush=True)

        for version in range(repeats + 1):
            tell(str(version))
            published, held, manifest = process.stdout.readline().split(" ", 2)
            times = {"publish": float(published), "held": float(held)}
            start = time.perf_counter()
            tensors = await receiver.fetch(msgspec.json.decode(manifest, type=Manifest))
            times["fetch"] = time.perf_counter() - start
            start = time.perf_counter()
            prepared = decoder.prepare(tensors)
            times["prepare"] = time.perf_counter() - start
            start = time.perf_counter()
            decoder.install(tensors, prepared)
            times["install"] = time.perf_counter() - start
            del tensors, prepared
            await receiver.release()
            for way in ("socket", "TLS"):
                tell(way)
                times[way] = receive(port, target.numpy().data, context if way == "TLS" else None)
            start = time.perf_counter()
            target.copy_(source)
            times["memcpy"] = time.perf_counter() - start
            if version:
                for name, value in times.items():
                    seconds.setdefault(name, []).append(value)
    await receiver.close()
    return seconds


def versions(model: Path, steps: int) -> Iterator[dict[str, torch.Tensor]]:
    """Weights of a model, float32, before and after each step."""
    tokenizer, policy = CheckpointTokenizer(model), AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-6, betas=(0.9, 0.95), weight_decay=0.0)
    rows = sums.as_examples(0, "train", 4 * steps)
    names = dict(policy.named_parameters())
    yield {name: parameter.detach() for name, parameter in names.items()}
    for step in range(steps):
        for row in rows[4 * step : 4 * step + 4]:
            ids = torch.from_numpy(np.concatenate([tokenizer.encode_chat(row["prompt"]), tokenizer.encode(row["answer"])]))[None]
            policy(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        yield {name: parameter.detach() for name, parameter in names.items()}


def network(folder: Path, name: str) -> NetworkReceiver:
    """Receiver of another machine."""
    receiver = sync("network, bfloat16", folder / name, folder / "key.pem").receiver("rollout/0")
    assert isinstance(receiver, NetworkReceiver)
    return receiver


async def compare_differences(model: Path, folder: Path, steps: int) -> list[Figure]:
    """Bytes of each step's version to a receiver that has the one before, over those to a receiver that has none."""
    figures, before = list[Figure](), dict[str, torch.Tensor]()
    sender = sync("network, bfloat16", folder).sender("benchmark")
    follows = network(folder, "follows")
    for version, tensors in enumerate(versions(model, steps), 1):
        manifest = await sender.publish(version, HeldWeights(tensors))
        begins = network(folder, f"begins-{version}")
        came, seconds = [], []
        for receiver in (follows, begins):
            so_far, start = receiver.num_received, time.perf_counter()
            await receiver.fetch(manifest)
            seconds.append(time.perf_counter() - start)
            came.append(receiver.num_received - so_far)
            await receiver.release()
        await begins.close()
        now = {name: tensor.bfloat16() for name, tensor in tensors.items()}
        if before:
            changed = np.mean(np.concatenate([(now[name] != before[name]).numpy().ravel() for name in now]))
            figures += [
                Figure(f"step {version - 1}: bfloat16 weights that changed", float(changed), ""),
                Figure(f"step {version - 1}: bytes, differences / whole", came[0] / came[1], ""),
                Figure(f"step {version - 1}: seconds, differences / whole", seconds[0] / seconds[1], ""),
            ]
        before = now
    print(f"whole: {came[1]:,} bytes")
    await follows.close()
    await sender.close()
    return figures


def main() -> int:
    arguments = parser(__doc__)
    arguments.add_argument("--model", type=Path, metavar="PATH")
    arguments.add_argument("--repeats", type=int, default=10)
    arguments.add_argument("--serve", choices=VARIANTS)
    arguments.add_argument("--folder", type=Path)
    given = arguments.parse_args()
    torch.set_num_threads(1)
    if given.serve:
        asyncio.run(serve(given.serve, given.folder))
        return 0
    if given.model:
        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="asyncflow-benchmark-") as folder:
            Credentials.create(Path(folder, "key.pem"))
            return finish(asyncio.run(compare_differences(given.model, Path(folder), min(given.repeats, 4))), given.json)
    decoder = new_decoder()
    megabytes = sum(tensor.nbytes for tensor in weights(decoder).values()) / 1e6
    figures = []
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="asyncflow-benchmark-") as folder:
        Credentials.create(Path(folder, "key.pem"))
        for variant in VARIANTS:
            seconds = asyncio.run(measure(variant, Path(folder), decoder, given.repeats))
            shown = {name: f"{megabytes / 1e3 / statistics.median(values):.2f}" for name, values in seconds.items()}
            print(f"{variant}, GB/s: {', '.join(f'{name} {rate}' for name, rate in shown.items())}", flush=True)
            figures += of_variant(variant, seconds)
    print(f"{megabytes:.0f} MB of float32 in {len(decoder.shapes)} tensors, {given.repeats} repeats")
    return finish(figures, given.json)


def of_variant(variant: str, seconds: dict[str, list[float]]) -> list[Figure]:
    def rate(name: str, beside: str) -> float:
        return statistics.median(b / a for a, b in zip(seconds[name], seconds[beside], strict=True))

    if variant.startswith("shared memory"):
        target = ">= 0.5" if variant == "shared memory" else None
        times = zip(seconds["publish"], seconds["fetch"], seconds["memcpy"], strict=True)
        both = statistics.median(memcpy / (publish + fetch) for publish, fetch, memcpy in times)
        install = statistics.median(a / b for a, b in zip(seconds["install"], seconds["memcpy"], strict=True))
        gathered = [Figure(f"{variant}: rate of the copy that holds ranks / memcpy", rate("held", "memcpy"), "")]
        return [
            *(gathered if variant.endswith("one by one") else ()),
            Figure(f"{variant}: rate of publish / memcpy", rate("publish", "memcpy"), "", target),
            Figure(f"{variant}: rate of fetch / memcpy", rate("fetch", "memcpy"), "", target),
            Figure(f"{variant}: rate of both, one after the other / memcpy", both, "", target),
            Figure(f"{variant}: time of install / memcpy", install, ""),
        ]
    return [
        Figure(f"{variant}: rate of fetch / loopback TCP", rate("fetch", "socket"), ""),
        Figure(f"{variant}: rate of fetch / loopback TLS", rate("fetch", "TLS"), ""),
    ]


if __name__ == "__main__":
    sys.exit(main())
