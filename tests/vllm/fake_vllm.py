"""A small stand-in for a vLLM server, run as `python -m vllm.entrypoints.openai.api_server`: the routes that AsyncFlow uses.

There is no model. A response's tokens and log-probs are functions of its prompt, its seed and two numbers: `weights`, which the
server computes from the tensors that it was started with or given, and `keys`: those weights under which the keys and values before
a token were computed. What is wrong with an update, a pause or a prefix cache therefore shows in the log-probs. All running
requests get a token at each step of `STEP_SECONDS`.

What vLLM would answer by rubbish or by dying is fatal here: to generate between start and finish, to update without a pause.

A file `deaf` in the model's folder has it do wrong what it says that it does (`FAULTS`).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import mmap
import os
import signal
import struct
import subprocess
import sys
import zlib
from array import array
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import h11

FAULTS = {
    "nothing": "updates load nothing",
    "half": "updates load every second tensor",
    "unbound": "adapters are loaded, and bound to no layer",
    "cannot tell": "a worker cannot tell what it computes with",
    "cannot tell of one": "it cannot tell of one layer",
}
STEP_SECONDS = 0.002
VOCABULARY = 373


def number_of(tensors: dict[str, bytes]) -> float:
    """A number between 0 and 1 that tells weights apart."""
    checksum = 0
    for name, data in sorted(tensors.items()):
        checksum = zlib.crc32(data, zlib.crc32(name.encode(), checksum))
    return checksum / 2**32


def tensors_of(file: Path) -> dict[str, bytes]:
    """The tensors of a file in the safetensors format: this process starts many times, and without numpy in a third of the time."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    header.pop("__metadata__", None)
    return {name: data[start + place[0] : start + place[1]] for name, place in ((n, h["data_offsets"]) for n, h in header.items())}


def sum_of_bits(data: bytes, size: int = 4, modulus: int = 1 << 32) -> int:
    """Sum of the bits of numbers of so many bytes each, as `asyncflow/bit_sums.py` has it."""
    return sum(array({4: "i", 2: "h"}[size], data)) % modulus


def scaled(data: bytes, scaling: float) -> bytes:
    """The same float32 numbers, multiplied."""
    return array("f", [number * scaling for number in array("f", data)]).tobytes()


def log_prob(weights: float, keys: float, position: int) -> float:
    """Of the token at `position`, under `weights`, when what lies before it was computed under `keys`."""
    return float(*struct.unpack("f", struct.pack("f", -0.1 - weights - 0.1 * keys - 0.001 * position)))


def token_id(weights: float, prompt: list[int], seed: int, position: int) -> int:
    """Of the token at `position`."""
    return (sum(prompt) + seed % 1009 + 31 * position + int(weights * 1000)) % VOCABULARY


@dataclass(eq=False)
class Sequence:
    """A request under way."""

    prompt: list[int]
    sampling: dict[str, Any]
    salt: str
    done: asyncio.Future[str]
    keys: float | None = None
    lora: float = 0.0  # of its adapter
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)


class FakeVllm:
    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments = arguments
        self.tensors, self.size = tensors_of(Path(arguments.model) / "model.safetensors"), 4
        self.weights = number_of(self.tensors)
        self.version = "default"
        self.paused = ""  # or by which mode
        self.is_updating = False
        self.sequences: list[Sequence] = []
        self.cache: dict[tuple[str, tuple[int, ...]], float] = {}
        self.counts = dict.fromkeys(("served", "dropped", "updates", "refused", "cleared"), 0)
        self.loras: dict[str, tuple[float, Path]] = {}  # by name, a number of each adapter's tensors, and where they lie
        self.woken = asyncio.Event()
        self.engine: subprocess.Popen[bytes] | None = None

    # -- generation ---------------------------------------------------------------------------------------------------------

    async def run(self) -> None:
        while True:
            self.woken.clear()
            running = self.sequences[: int(self.arguments.max_num_seqs)]
            if self.paused in ("keep", "abort") or not running:
                await self.woken.wait()
                continue
            await asyncio.sleep(STEP_SECONDS)
            if self.paused in ("keep", "abort"):
                continue
            if self.is_updating:
                os._exit(70)
            for sequence in running:
                if sequence in self.sequences:
                    self.step(sequence)

    def step(self, sequence: Sequence) -> None:
        weights = self.weights + sequence.lora
        if sequence.keys is None:
            sequence.keys = self.cache.setdefault((sequence.salt, tuple(sequence.prompt)), weights)
        position = len(sequence.token_ids)
        token = token_id(weights, sequence.prompt, sequence.sampling.get("seed", 0), position)
        sequence.token_ids.append(token)
        sequence.logprobs.append(log_prob(weights, sequence.keys, position))
        if not sequence.spans or sequence.spans[-1]["version"] != self.version:
            sequence.spans.append({"version": self.version, "start": position, "end": position})
        sequence.spans[-1]["end"] = position + 1
        if token in sequence.sampling.get("stop_token_ids", ()):
            self.end(sequence, "stop")
        elif position + 1 == sequence.sampling["max_tokens"]:
            self.end(sequence, "length")

    def end(self, sequence: Sequence, reason: str) -> None:
        self.sequences.remove(sequence)
        self.counts["served"] += reason != "abort"
        if not sequence.done.done():
            sequence.done.set_result(reason)

    async def generate(self, body: dict[str, Any]) -> dict[str, Any]:
        sequence = Sequence(
            body["token_ids"], body["sampling_params"], body["cache_salt"], asyncio.get_running_loop().create_future()
        )
        if "model" in body:
            sequence.lora = self.loras[body["model"]][0]
        self.sequences.append(sequence)
        self.woken.set()
        try:
            reason = await sequence.done
        except asyncio.CancelledError:
            self.counts["dropped"] += 1
            if sequence in self.sequences:
                self.sequences.remove(sequence)
            raise
        pairs = zip(sequence.token_ids, sequence.logprobs, strict=True)
        content = [{"token_id": t, "logprob": p, "rank": 1, "top_logprobs": []} for t, p in pairs]
        choice = {"index": 0, "finish_reason": reason, "token_ids": sequence.token_ids, "logprobs": {"content": content}}
        answer = {"request_id": "x", "choices": [{**choice, "weight_versions": sequence.spans}]}
        if "prompt_logprobs" in sequence.sampling and (Path(self.arguments.model) / "scores").exists():  # a test's
            weights = self.weights + sequence.lora
            scores = [{str(t): {"logprob": log_prob(weights, weights, n)}} for n, t in enumerate(sequence.prompt[1:])]
            answer["prompt_logprobs"] = [None, *scores]
        return answer

    # -- everything else ----------------------------------------------------------------------------------------------------

    async def pause(self, mode: str, clear_cache: str) -> None:
        if mode == "abort":
            for sequence in list(self.sequences):
                self.end(sequence, "abort")
        self.paused = mode
        while mode == "wait" and self.sequences:
            await asyncio.sleep(STEP_SECONDS)
        self.paused = "keep"
        if clear_cache == "true":
            self.counts["cleared"] += 1
            self.cache.clear()
            for sequence in self.sequences:
                sequence.keys = None

    def resume(self) -> None:
        self.paused = ""
        self.woken.set()

    def start(self) -> tuple[int, Any]:
        if not self.paused:
            os._exit(71)
        if self.is_updating:
            return 500, {"error": "start_weight_update called while a weight update is already active."}
        self.is_updating = True
        return 200, {}

    def update(self, info: dict[str, Any]) -> None:
        with open(info["path"], "rb") as file, mmap.mmap(file.fileno(), info["num_bytes"], access=mmap.ACCESS_READ) as mapped:
            data, size = bytes(mapped), {"float32": 4, "bfloat16": 2}[info["dtype_name"]]
        if any(begin + size * math.prod(shape) > len(data) for _, shape, begin in info["tensors"]):
            raise ValueError("a tensor lies beyond the end of the file")
        new = {name: data[begin : begin + size * math.prod(shape)] for name, shape, begin in info["tensors"]}
        if (fault := self.fault()) in ("nothing", "half"):
            new = self.tensors | {name: new[name] for name in [*new][:: 2 if fault == "half" else len(new) + 1][1:]}
        self.tensors, self.size, self.weights = new, size, number_of(new)

    def finish(self, version: str) -> None:
        if not self.is_updating:
            os._exit(72)
        self.is_updating, self.version = False, version
        self.counts["updates"] += 1

    def fault(self) -> str:
        """The one that a test wants."""
        told = Path(self.arguments.model) / "deaf"
        return told.read_text() if told.exists() else ""

    def sums(self, lora: str | None, *, has_weights: bool) -> dict[str, Any]:
        """As AsyncFlow's modules for vLLM answer."""
        if self.fault() == "cannot tell":
            return {"why": "model.norm.weight is applied by SomeMethod"}
        told: dict[str, Any] = {"weights": [], "lora": [], "lora_rank": 0}
        if has_weights:
            for name, data in self.tensors.items():
                told["weights"].append([[name], len(data) // self.size, sum_of_bits(data, self.size), 0, []])
            if self.fault() == "cannot tell of one":
                told["weights"] = [each for each in told["weights"] if each[0] != ["model.norm.weight"]]
                told["unseen"] = {"model.norm": "model.norm.weight is applied by SomeMethod"}
        if lora in self.loras and self.fault() != "unbound":
            folder = self.loras[lora][1]
            fields = json.loads((folder / "adapter_config.json").read_text())
            told["lora_rank"], scaling = fields["r"], fields["lora_alpha"] / fields["r"]
            for name, data in tensors_of(folder / "adapter_model.safetensors").items():
                found = sum_of_bits(scaled(data, scaling) if ".lora_B." in name else data, modulus=1 << 64)
                told["lora"].append([[name.removeprefix("base_model.model.")], len(data) // 4, found, 0, []])
        return told

    async def answer(self, path: str, query: dict[str, str], body: Any) -> tuple[int, Any]:
        fault = Path(self.arguments.model) / "fault"  # a test's: the route that fails
        if fault.exists() and fault.read_text().strip() == path:
            return 500, {"error": "as the test wants it"}
        if self.engine is not None and self.engine.poll() is not None:
            if path == "/health":
                return 503, {"error": "the engine is dead"}
            await asyncio.Event().wait()  # as vLLM's front end may, with what it has asked the engine for
        match path:
            case "/health":
                return 200, {}
            case "/inference/v1/generate":
                if len(body["token_ids"]) + body["sampling_params"]["max_tokens"] > int(self.arguments.max_model_len):
                    return 400, {"error": "too long"}
                if body.get("model", "") not in {"", *self.loras}:
                    return 404, {"error": "no such adapter"}
                return 200, await self.generate(body)
            case "/v1/load_lora_adapter":
                if body["lora_name"] in self.loras:
                    return 400, {"error": "it is loaded already"}
                folder = Path(body["lora_path"])
                self.loras[body["lora_name"]] = number_of(tensors_of(folder / "adapter_model.safetensors")), folder
            case "/v1/unload_lora_adapter":
                if body["lora_name"] not in self.loras:
                    return 404, {"error": "no such adapter"}
                del self.loras[body["lora_name"]]
            case "/pause":
                await self.pause(query["mode"], query["clear_cache"])
            case "/resume":
                self.resume()
            case "/init_weight_transfer_engine":
                pass
            case "/start_weight_update":
                return self.start()
            case "/update_weights":
                try:
                    self.update(body["update_info"])
                except (OSError, ValueError) as error:
                    self.is_updating = False
                    return 500, {"error": str(error)}
            case "/finish_weight_update":
                self.finish(body["weight_version"])
            case "/update_weight_version":
                self.version = body["new_version"]
            case "/asyncflow/settings":  # of AsyncFlow's middleware
                said = Path(self.arguments.model) / "settings"  # a test's: what a server says that was started otherwise
                own = {
                    "max_model_len": int(self.arguments.max_model_len),
                    "logprobs_mode": self.arguments.logprobs_mode,
                    "enable_chunked_prefill": not self.arguments.no_enable_chunked_prefill,
                    "device_type": "cpu",
                }
                return 200, {**own, **(json.loads(said.read_text()) if said.exists() else {})}
            case "/asyncflow/sums":
                return 200, {"workers": [self.sums(query.get("lora"), has_weights=query["weights"] == "1")]}
            case "/weight_info":
                return 200, {"weight_version": self.version}
            case "/state":  # a test's
                tokens = min((len(sequence.token_ids) for sequence in self.sequences), default=0)
                return 200, {**self.counts, "running": len(self.sequences), "least_tokens": tokens, "loras": [*self.loras]}
            case _:
                return 404, {"error": path}
        return 200, {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection: requests, one after another. One that hangs up has its request dropped."""
        http = h11.Connection(h11.SERVER)
        try:
            while (request := await self.received(http, reader)) is not None:
                head, body = request
                parts = urlsplit(head.target.decode())
                keys = [value for name, value in head.headers if name == b"authorization"]
                is_open = (Path(self.arguments.model) / "open").exists()  # a test's: started without AsyncFlow's middleware
                if not is_open and keys != [f"Bearer {os.environ['VLLM_API_KEY']}".encode()]:
                    self.counts["refused"] += 1
                    status, said = 401, {"error": "Unauthorized"}
                else:
                    query = {name: values[0] for name, values in parse_qs(parts.query).items()}
                    work = asyncio.create_task(self.answer(parts.path, query, json.loads(body or b"null")))
                    hung_up = asyncio.create_task(reader.read(1))
                    await asyncio.wait([work, hung_up], return_when=asyncio.FIRST_COMPLETED)
                    if not work.done():
                        work.cancel()
                        return
                    hung_up.cancel()
                    status, said = work.result()
                content = json.dumps(said).encode()
                head = [("content-length", str(len(content))), ("connection", "close")]
                for event in (h11.Response(status_code=status, headers=head), h11.Data(data=content), h11.EndOfMessage()):
                    writer.write(http.send(event) or b"")
                await writer.drain()
                return
        finally:
            writer.close()

    async def received(self, http: h11.Connection, reader: asyncio.StreamReader) -> tuple[h11.Request, bytes] | None:
        head, body = None, b""
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                data = await reader.read(1 << 16)
                if not data and head is None:
                    return None
                http.receive_data(data)
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                return head, body


async def main(arguments: argparse.Namespace) -> None:
    fake = FakeVllm(arguments)
    print(f"INFO fake vLLM with weights {fake.weights}", flush=True)
    # As vLLM's engine core: it would outlive its front end, if nobody ended it.
    engine = subprocess.Popen(["sleep", "600"])
    fake.engine = engine
    print(f"ENGINE {engine.pid}", flush=True)
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, lambda: None)
    async with await asyncio.start_unix_server(fake.serve, arguments.uds):
        await fake.run()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    for name in ("model", "uds", "max-model-len", "max-num-seqs", "weight-transfer-config", "logprobs-mode"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--no-enable-chunked-prefill", action="store_true")
    return parser.parse_known_args(arguments)[0]


if __name__ == "__main__":
    assert sys.argv[1:3] == ["-m", "vllm.entrypoints.openai.api_server"], sys.argv
    chosen = parse(sys.argv[3:])
    if (Path(chosen.model) / "refuse").exists():
        said = (Path(chosen.model) / "refuse").read_text() or "ValueError: the model's heads do not divide by 3"
        print(f"(EngineCore pid=1) ERROR 11-20 23:07:09 [core.py:1] {said}")
        print("RuntimeError: Engine core initialization failed. See root cause above.", flush=True)
        sys.exit(1)
    asyncio.run(main(chosen))
