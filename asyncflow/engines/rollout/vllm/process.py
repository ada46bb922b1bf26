"""A vLLM server that this process starts, and that ends with it.

    this process --control pipe--> guard (in_vllm/guard.py) --> python -m vllm... (front end) --> its engine and workers

consumes: what the server prints, which is printed here too
waits for: the server's first answer, at most `start_seconds`
is unblocked by: that answer, or the server's end

The server listens on a unix socket in a folder of its own (mode 0700) and wants a key that is made for it, which travels in its
environment: nobody else on the machine reaches its development endpoints. What it loads of AsyncFlow is `in_vllm`.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2

from asyncflow.devices import SHOWN_BY, kind_of
from asyncflow.engines.families import head_dim, with_usual_names
from asyncflow.engines.rollout.vllm.options import VllmOptions, by_option, check_environment, is_cpu
from asyncflow.types import RunError, UserError

IN_VLLM = Path(__file__).parent.parent / "in_vllm"
POLL_SECONDS = 0.2
KILL_SECONDS = 5.0  # SIGKILL to the end of the guard; longer only if the kernel is stuck
LAST_LINES = 400
_LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM takes for the largest one
_KV_BLOCK = 128  # tokens, the largest that vLLM's CPU backend takes
_ERROR = re.compile(r"\b\w*(Error|Exception)\b: |\berror: ")
_USERS_ERROR = re.compile(r"\b(ValueError|ValidationError|NotImplementedError): |\.py: error: ")  # vLLM refuses what it was given
_MEMORY = re.compile(r"memory", re.IGNORECASE)  # which may be there the next time
_NO_CAUSE = re.compile(r"(Engine core|WorkerProc) initialization failed")
_VALIDATION = re.compile(r"\d+ validation errors? for ")  # pydantic says in the next lines what it is, and of which kind
_KIND = re.compile(r" \[type=.*")
_PREFIX = re.compile(r"^(\(\w+ pid=\d+\) )?((INFO|WARNING|ERROR|DEBUG) [\d-]+ [\d:]+ \[[^\]]*\] ?)?")


@dataclass(frozen=True)
class ServerOptions:
    """Options of a server to start: those of its `engine`, the name of its `transfer` in vLLM's factory, and its own `devices`;
    None: any.

    An argument of the engine's that is None is left out, also where one is made here; one that is false becomes `--no-NAME`.
    """

    engine: VllmOptions
    transfer: str
    devices: Sequence[int] | None = None

    def command(self, socket: str) -> list[str]:
        """The command line of a server that listens on `socket`."""
        engine = self.engine
        arguments: dict[str, Any] = {
            "model": str(engine.model_path),
            "uds": socket,
            "dtype": engine.dtype,
            "max_model_len": engine.max_context,
            "max_num_seqs": engine.slots_each,
            "tensor_parallel_size": engine.tensor_parallel,
            "logprobs_mode": "processed_logprobs",  # of the distribution sampled from
            "generation_config": "vllm",  # no sampling parameters out of the model's files
            "enable_scale_out": True,
            "disable_uvicorn_access_log": True,
            "worker_extension_cls": "asyncflow_vllm.Extension",
            "middleware": "asyncflow_vllm.RequireKey",
            "weight_transfer_config": json.dumps({"backend": self.transfer}),
        }
        if is_cpu(engine.device):
            # Prompts are computed whole: vLLM 0.32.0 dies of cutting one that has a seed, for a CPU's generators have no offset.
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": self._kv_bytes(), "enable_chunked_prefill": False}
        if engine.lora is not None:  # two in a batch: responses of the version before may be under way
            least = engine.lora.rank
            rank = next((rank for rank in _LORA_RANKS if rank >= least), least)
            arguments |= {"enable_lora": True, "max_lora_rank": rank, "max_loras": 2, "max_cpu_loras": 4}
        if engine.tensor_parallel == 1:  # its worker in the engine's own process: one process less to start and to talk to
            arguments["distributed_executor_backend"] = "uni"
        command = [engine.python or sys.executable, "-m", "vllm.entrypoints.openai.api_server"]
        for name, value in (by_option(arguments) | by_option(engine.arguments or {})).items():
            if isinstance(value, bool) and "." not in name:
                command.append(f"--{name}" if value else f"--no-{name}")
            elif value is not None:
                command += [f"--{name}", value if isinstance(value, str) else json.dumps(value)]
        return command

    def environment(self, key: str) -> dict[str, str]:
        """Environment of a server's processes. Raises `UserError` if this process does not see the devices."""
        engine = self.engine
        path = os.pathsep.join(filter(None, (str(IN_VLLM), os.environ.get("PYTHONPATH"))))
        own = {
            "PYTHONPATH": path,
            "VLLM_API_KEY": key,
            "VLLM_SERVER_DEV_MODE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
            # On AMD's devices: the sums of experts that are fused with shared ones cannot be told apart.
            "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS": "0",
            "VLLM_ROCM_AITER_MEGA_MOE_FUSE_SHARED_EXPERTS": "0",
        }
        if engine.lora is not None:
            own["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
        if is_cpu(engine.device):
            own |= {"OMP_NUM_THREADS": str(engine.num_threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        elif self.devices is not None:
            variable = SHOWN_BY[kind_of(engine.device)]
            own[variable] = self._visible(variable, self.devices)
        return {**os.environ, **own}

    def _visible(self, variable: str, devices: Sequence[int]) -> str:
        """Devices are counted among those that this process sees, whatever their names: Ray, or a scheduler, may have chosen."""
        seen = os.environ.get(variable)
        if seen is None:
            return ",".join(map(str, devices))
        names = [name.strip() for name in seen.split(",") if name.strip()]
        if not all(0 <= number < len(names) for number in devices):
            raise UserError(
                f"rollout.engine: an instance is to have the devices {list(devices)}, counted from 0 among the {len(names)} of "
                f"{variable}={seen!r}: take fewer instances, less tensor_parallel, or other devices"
            )
        return ",".join(names[number] for number in devices)

    def _kv_bytes(self) -> int:
        """Keys and values of all slots, each filled to the end: of a CPU's memory, which is the machine's, no share is taken."""
        engine = self.engine
        fields = with_usual_names(json.loads((engine.model_path / "config.json").read_text()))
        heads = fields.get("num_key_value_heads") or fields.get("num_attention_heads")
        width = heads * head_dim(fields) if heads else fields["hidden_size"]  # of states alone: as if it were keys
        token = 2 * fields["num_hidden_layers"] * width * 4
        blocks = -(-engine.max_context // _KV_BLOCK) * engine.slots_each + 1
        return max(blocks * _KV_BLOCK * token, 64 << 20)


class ServerProcess:
    """Server process, with the processes that it has started. `start` it, from any thread; `stop` it from any other."""

    def __init__(self, options: ServerOptions, name: str) -> None:
        self._options, self._name = options, name
        self.key = secrets.token_urlsafe(32)
        self._folder = tempfile.mkdtemp(prefix="asyncflow-vllm-")  # short: a unix socket's path has at most 107 bytes
        self.socket = f"{self._folder}/socket"
        self.address = f"unix:{self.socket}"
        self._guard: subprocess.Popen[str] | None = None
        self._printing: threading.Thread | None = None
        self._lines: deque[str] = deque(maxlen=LAST_LINES)
        self._is_stopped = False

    @property
    def pid(self) -> int | None:
        """Process id of the guard, whose process group the server's processes are in."""
        return self._guard.pid if self._guard is not None else None

    @property
    def is_alive(self) -> bool:
        """Whether the guard, and so the server's front end, runs."""
        if self._guard is None or self._guard.returncode is not None:
            return False
        # Not reaped here: until `stop` has killed the group, its id must stay taken.
        return os.waitid(os.P_PID, self._guard.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None

    def spawn(self) -> None:
        """Start the process. Raises `UserError` when there is no such interpreter, or vLLM is not in its environment."""
        check_environment(python=self._options.engine.python)
        command = [sys.executable, "-I", "-S", str(IN_VLLM / "guard.py"), self._folder, *self._options.command(self.socket)]
        self._guard = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,  # the control pipe
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            env=self._options.environment(self.key),
            start_new_session=True,
        )
        self._printing = threading.Thread(target=self._print, name=self._name, daemon=True)
        self._printing.start()

    def wait_until_ready(self) -> None:
        """Raises `RunError` with its last words when it ends instead, or takes longer than it may.

        `UserError` where they say that vLLM does not take the model or an argument: starting it again would not help.
        """
        deadline = time.monotonic() + self._options.engine.start_seconds
        headers = {"Authorization": f"Bearer {self.key}"}
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=self.socket), headers=headers, timeout=5.0) as client:
            while time.monotonic() < deadline:
                if not self.is_alive or self._is_stopped:
                    words = self.last_words()
                    is_users = not self._is_stopped and _USERS_ERROR.search(words) and not _MEMORY.search(words)
                    raise (UserError if is_users else RunError)(f"{self._name} did not start: {words}")
                with contextlib.suppress(httpx2.HTTPError):
                    if client.get("http://vllm/health").status_code == 200:
                        return
                time.sleep(POLL_SECONDS)
        self.stop()
        raise RunError(
            f"{self._name} did not answer within {self._options.engine.start_seconds:g} s: raise start_seconds, or see its output"
        )

    def last_words(self) -> str:
        """Words that say most about why it ended: the last error that is not merely about another's."""
        if self._printing is not None:
            self._printing.join(KILL_SECONDS)
        lines = [_PREFIX.sub("", line) for line in self._lines]
        errors = [number for number, line in enumerate(lines) if _ERROR.search(line) and not _NO_CAUSE.search(line)]
        if not errors:
            return ([line.strip() for line in lines if line.strip()] or ["it said nothing"])[-1]
        words, after = lines[errors[-1]], lines[errors[-1] + 1 : errors[-1] + 3]  # a field's name, maybe, and what is wrong
        if _VALIDATION.search(words):
            last = next((number for number, line in enumerate(after, 1) if _KIND.search(line)), 0)
            words = " ".join([words, *(_KIND.sub("", line).strip() for line in after[:last])])
        return words.strip()

    def stop(self) -> None:
        """Kill the server's processes and wait for their end. Raises `RunError` if the kernel does not deliver."""
        self._is_stopped = True
        if (guard := self._guard) is not None:
            if guard.returncode is None:  # not reaped, so its id, which is its group's, is no stranger's
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.killpg(guard.pid, signal.SIGKILL)
            try:
                guard.wait(KILL_SECONDS)
            except subprocess.TimeoutExpired as error:
                raise RunError(f"{self._name} (process {guard.pid}) is still there {KILL_SECONDS:g} s after SIGKILL") from error
            if guard.stdin is not None:
                guard.stdin.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    def _print(self) -> None:
        assert self._guard is not None and self._guard.stdout is not None
        for line in self._guard.stdout:
            self._lines.append(line.rstrip("\n"))
            print(f"[{self._name}] {line}", end="", file=sys.stderr, flush=True)
