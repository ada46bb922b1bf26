"""Options of vLLM's rollout workers, without vLLM or torch: their devices, and which options exclude others."""

from __future__ import annotations

import ipaddress
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal
from urllib.parse import urlsplit

from asyncflow.devices import CPU, CUDA, kind_of
from asyncflow.engines.base import RolloutEngineOptions
from asyncflow.types import LoraSpec, RunError, UserError

PauseMode = Literal["keep", "wait", "abort"]
TransferName = Literal["shared_memory", "nccl"]
_SOCKET: Final = "a server listens on a socket of AsyncFlow's own"
_SAMPLING: Final = "the run says how it samples, and training needs the log-probs of what was sampled from"
_DEVICES: Final = "the devices of an instance are rollout.engine.tensor_parallel and rollout.engine.devices"
_SECRET: Final = "a secret is on no command line: AsyncFlow makes the server's key, and what else there is goes by the environment"
_CONTROL: Final = "AsyncFlow controls the server by it"
NO_VLLM: Final = 9
"""Exit status of an interpreter that has no vLLM: not one of those with which Python fails."""
MOVES_EXPERTS: Final = "it moves experts while it generates, and vLLM loads a version's to where they were at first"
_FIXED: Final[Mapping[str, str]] = {
    "model": "it is model.path",
    "load-format": "a server's first weights are those of model.path",
    "dtype": "it is rollout.dtype",
    "max-model-len": "it is what the longest prompt and rollout.max_new_tokens take",
    "weight-transfer-config": "it is rollout.engine.transfer",
    "config": "a file might set what AsyncFlow does; give its options here",
    **dict.fromkeys(("logprobs-mode", "generation-config", "override-generation-config"), _SAMPLING),
    **dict.fromkeys(("tensor-parallel-size", "pipeline-parallel-size", "prefill-context-parallel-size"), _DEVICES),
    **dict.fromkeys(("data-parallel-size", "nnodes", "device-ids"), _DEVICES),
    **dict.fromkeys(("enable-eplb", "eplb-config", "enable-elastic-ep"), MOVES_EXPERTS),
    **dict.fromkeys(("api-key", "hf-token"), _SECRET),
    **dict.fromkeys(("worker-extension-cls", "enable-scale-out", "middleware", "headless"), _CONTROL),
    **dict.fromkeys(("uds", "host", "port", "grpc", "grpc-port", "ssl-keyfile", "ssl-certfile"), _SOCKET),
}
"""vLLM's options that are not the user's to give: what AsyncFlow relies on, and what would undo it. Why."""
_FIXED_ON_CPU: Final = {"enable-chunked-prefill": "vLLM dies there of a prompt that is cut and has a seed"}
_DEVICE = re.compile(r"[a-z]+(:\d+)?")
_ARGUMENT = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmOptions(RolloutEngineOptions):
    """Options of `VllmEngine`. vLLM keeps what it has memory for, whatever `num_parked` is.

    `instances` servers are started, each over `tensor_parallel` devices (`devices`: which ones, a list for each instance), by
    the interpreter `python` of an environment that has vLLM; `arguments`: vLLM's own, by name. Or they are there already, at
    `addresses` (`http://HOST:PORT`, or `unix:PATH`), with the key in the environment variable `key_variable`.

    `transfer`: how they get weights (transfer.py), with `nccl` from this process's `sender_device`, which no server uses; None:
    the first after those of the servers that are started. `pause_mode`: what becomes of responses under way while weights are
    installed: they are kept and go on, are waited for, or begin anew. `seeded`: each request has a seed from its sample's key. A
    server may be lost `max_restarts` times, and takes at most `start_seconds` to come, `generation_seconds` for a response and
    `deadline_seconds` for anything else. `lora`: versions are low-rank adapters, which the servers load beside the model
    (lora_versions.py).
    """

    instances: int = 1
    tensor_parallel: int = 1
    devices: Sequence[Sequence[int]] | None = None
    python: str | None = None
    addresses: Sequence[str] = ()
    key_variable: str = "VLLM_API_KEY"
    transfer: TransferName = "shared_memory"
    sender_device: str | None = None
    pause_mode: PauseMode = "keep"
    seeded: bool = True
    arguments: Mapping[str, Any] | None = None
    max_restarts: int = 3
    start_seconds: float = 600.0
    generation_seconds: float = 1800.0
    deadline_seconds: float = 120.0
    lora: LoraSpec | None = None

    def check(self) -> None:
        """Check what can be said without the run. Raises `UserError`."""
        check_numbers(self.instances, self.tensor_parallel, self.devices)
        check_addresses(self.addresses)
        check_arguments(self.arguments or {}, self.device)

    @property
    def slots_each(self) -> int:
        """Responses that each server generates at once."""
        return -(-self.num_slots // (len(self.addresses) or self.instances))

    @property
    def sends_from(self) -> str:
        """Device that weights are sent from by NCCL, see `sender`."""
        return sender(self.device, self.instances, self.tensor_parallel, self.devices, self.addresses, self.sender_device)


def why_not_deterministic(**_options: object) -> str:
    """Reason why the engine is not deterministic, whatever the options are."""
    return "vLLM's sums depend on what else is in its batch, so a response that is made again may be another"


def num_devices(*, instances: int = 1, tensor_parallel: int = 1, addresses: Sequence[str] = (), **_others: object) -> int:
    """Number of devices that generate, of all servers of an engine together. The arguments are of `VllmOptions`."""
    return (len(addresses) or instances) * tensor_parallel


def num_own_devices(
    *,
    instances: int = 1,
    tensor_parallel: int = 1,
    addresses: Sequence[str] = (),
    transfer: str = "shared_memory",
    **_others: object,
) -> int:
    """Number of devices of the servers that the engine starts itself, and of what sends weights to all, if that is on a device
    (`sender`)."""
    servers = 0 if addresses else num_devices(instances=instances, tensor_parallel=tensor_parallel)
    return servers + (transfer == "nccl")


def devices_of(device: str, instances: int, tensor_parallel: int, devices: Sequence[Sequence[int]] | None) -> list[list[int]]:
    """Devices of each server that is started: as given, else one after another."""
    if devices is not None:
        return [list(these) for these in devices]
    first = int(device.partition(":")[2] or 0)
    return [[first + i * tensor_parallel + k for k in range(tensor_parallel)] for i in range(instances)]


def sender(
    device: str,
    instances: int,
    tensor_parallel: int,
    devices: Sequence[Sequence[int]] | None,
    addresses: Sequence[str],
    sender_device: str | None,
) -> str:
    """The device that weights are sent from by NCCL: as given, else the first after those of the servers that are started.

    Raises `UserError` if it is a server's: NCCL takes a device once.
    """
    kind = CUDA if is_cpu(device) else kind_of(device)
    started = [] if addresses or is_cpu(device) else devices_of(device, instances, tensor_parallel, devices)
    taken = {number for these in started for number in these}
    after = f"{kind}:{max(taken, default=-1) + 1}"
    if sender_device is None:
        return after
    if not _DEVICE.fullmatch(sender_device):
        raise UserError(f"rollout.engine.sender_device is {sender_device!r}, which is no device: write it as {after}")
    own_kind, _, number = sender_device.partition(":")
    if own_kind == kind and int(number or 0) in taken:
        raise UserError(
            f"rollout.engine.sender_device={sender_device} is a device of the servers' ({sorted(taken)}), and NCCL wants one of "
            f"its own to send from: leave it out, which takes {after}, or give the servers others by rollout.engine.devices"
        )
    return sender_device


def check(
    *,
    num_workers: int,
    cluster: str,
    device: str,
    installs_in_flight: bool,
    num_evaluators: int = 0,
    evaluators_device: str = "cpu",
    instances: int = 1,
    tensor_parallel: int = 1,
    devices: Sequence[Sequence[int]] | None = None,
    addresses: Sequence[str] = (),
    arguments: Mapping[str, Any] | None = None,
    transfer: str = "shared_memory",
    sender_device: str | None = None,
    pause_mode: str = "keep",
    has_lora: bool = False,
    **_others: object,
) -> None:
    """Check that so many workers can have such engines: the first six arguments are the run's, the others of `VllmOptions`. Raises
    `UserError`."""
    if has_lora and addresses:
        raise UserError(
            "rollout.engine.addresses are servers that were started for whole weights, and model.lora has them load adapters: "
            "leave addresses out, so that the run starts servers of its own"
        )
    check_numbers(instances, tensor_parallel, devices)
    check_addresses(addresses)
    check_arguments(arguments or {}, device)
    if transfer == "nccl":
        sender(device, instances, tensor_parallel, devices, addresses, sender_device)
    if addresses and num_workers > 1:
        raise UserError(
            f"rollout.engine.addresses: {num_workers} rollout workers would install their weights in the same servers, each "
            f"under the other's responses; take one worker with all the addresses"
        )
    if addresses and num_evaluators:
        raise UserError(
            f"rollout.engine.addresses: eval.num_workers={num_evaluators} would install their weights in the rollout worker's own "
            f"servers; leave addresses out, or take eval.num_workers=0"
        )
    if num_evaluators:
        check_arguments(arguments or {}, evaluators_device)
    is_shared = num_evaluators > 1 or not is_cpu(device)
    if cluster != "ray" and num_evaluators and not is_cpu(evaluators_device) and is_shared:
        raise UserError(
            f"eval.num_workers={num_evaluators} under cluster={cluster} would start their servers on the rollout worker's devices, "
            f"or on the same ones: take cluster=ray, which gives each worker its own, eval.device=cpu, or eval.num_workers=0"
        )
    if cluster != "ray" and num_workers > 1 and not is_cpu(device):
        raise UserError(
            f"{num_workers} rollout workers of vLLM's under cluster={cluster} would start their servers on the same devices: "
            f"take one worker with rollout.engine.instances={num_workers}, or cluster=ray, which gives each worker its own"
        )
    if installs_in_flight and pause_mode == "wait":
        raise UserError(
            "rollout.engine.pause_mode=wait ends all responses before weights are installed, and this schedule is there to install "
            "them in the middle of responses: take pause_mode=keep, or schedule=delayed"
        )


def check_environment(*, python: str | None = None, addresses: Sequence[str] = (), **_others: object) -> None:
    """Check that the interpreter which is to start servers has vLLM. The arguments are of `VllmOptions`. Raises `UserError`, and
    `RunError` where the interpreter does not answer."""
    if addresses:
        return
    python = python or sys.executable
    code = f"import importlib.util, sys; sys.exit({NO_VLLM} * (importlib.util.find_spec('vllm') is None))"
    try:
        found = subprocess.run([python, "-c", code], capture_output=True, timeout=60, check=False)
    except OSError as error:
        raise UserError(f"rollout.engine.python is {python!r}, which cannot be started: {error.strerror}") from error
    except subprocess.TimeoutExpired as error:
        raise RunError(
            f"rollout.engine.python is {python!r}, which did not start within 60 s: is the machine overloaded?"
        ) from error
    if found.returncode not in (0, NO_VLLM):
        last = (found.stderr.decode(errors="replace").strip().splitlines() or ["nothing was said"])[-1]
        raise RunError(f"rollout.engine.python is {python!r}, which ended with status {found.returncode}: {last}")
    if found.returncode:
        raise UserError(
            f"vLLM is not installed for {python}: install it there, or set rollout.engine.python to the interpreter of an "
            f"environment that has it"
        )


def check_numbers(instances: int, tensor_parallel: int, devices: Sequence[Sequence[int]] | None) -> None:
    """Check that these numbers go together. Raises `UserError`."""
    lengths = [tensor_parallel] * instances if devices is None else [len(these) for these in devices]
    if instances < 1 or tensor_parallel < 1 or lengths != [tensor_parallel] * instances:
        raise UserError(
            f"rollout.engine: instances={instances}, tensor_parallel={tensor_parallel} and devices={devices} do not go "
            f"together: both numbers are at least 1, and devices has a list of {tensor_parallel} for each instance"
        )


def check_arguments(arguments: Mapping[str, Any], device: str) -> None:
    """Check that vLLM's options given by name have none that AsyncFlow sets, however it is written. Raises `UserError`."""
    if not isinstance(arguments, Mapping):
        raise UserError(f"rollout.engine.arguments is {arguments!r}; it takes vLLM's options by name: {{max_num_seqs: 64}}")
    fixed = {**_FIXED, **(_FIXED_ON_CPU if is_cpu(device) else {})}
    for name, value in arguments.items():
        if not isinstance(name, str) or not _ARGUMENT.fullmatch(name):
            raise UserError(
                f"rollout.engine.arguments: {name!r} is no option of vLLM's: write its name without --, as max_num_seqs"
            )
        # vLLM takes underscores for dashes, `no-` for a negation, a dot for a part, and an option's first letters for the option.
        stem = name.replace("_", "-").partition(".")[0].removeprefix("no-")
        for option, why in fixed.items():
            if option.startswith(stem):
                meant = "" if option == stem else f" (vLLM may take it for {option})"
                raise UserError(f"rollout.engine.arguments: {name}{meant} is not to be given there: {why}")
        if isinstance(value, str) and value.startswith("-"):
            raise UserError(f"rollout.engine.arguments: {name} has the value {value!r}, which vLLM would take for another option")
    if len(by_option(arguments)) < len(arguments):
        raise UserError(f"rollout.engine.arguments gives one option in two spellings: {', '.join(arguments)}; leave one out")


def by_option(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Each under vLLM's own name of the option, with dashes, and `no-` before none that is true or false.

    What comes after a dot is a name in a configuration of vLLM's, and stays as it is.
    """
    found = {}
    for name, value in arguments.items():
        option, dot, part = name.partition(".")
        option = option.replace("_", "-")
        if not dot and isinstance(value, bool) and option.startswith("no-"):
            option, value = option.removeprefix("no-"), not value
        found[option + dot + part] = value
    return found


def is_cpu(device: str) -> bool:
    """Whether a device is a CPU, written with a number or without."""
    return kind_of(device) == CPU


def check_addresses(addresses: Sequence[str]) -> None:
    """Check that servers are on this machine, and each is named once. Raises `UserError`."""
    for address in addresses:
        if not _is_here(address):
            raise UserError(
                f"rollout.engine.addresses: {address!r} is neither http://127.0.0.1:PORT nor unix:PATH; a server is on its "
                f"worker's machine, for its key travels in the clear and the weights are read from the worker's memory"
            )
    if len({address.rstrip("/") for address in addresses}) < len(addresses):
        raise UserError(f"rollout.engine.addresses names a server twice: {', '.join(addresses)}")


def _is_here(address: str) -> bool:
    if address.startswith("unix:"):
        return len(address) > len("unix:")
    try:
        parts = urlsplit(address)
        if parts.scheme != "http" or parts.port is None or parts.username is not None or parts.path not in ("", "/"):
            return False
        return parts.hostname == "localhost" or ipaddress.ip_address(parts.hostname or "").is_loopback
    except ValueError:
        return False
