"""Every wait of the code is registered by name, with its deadline; a new one that is not fails here."""

from __future__ import annotations

import ast
import asyncio
import re
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from asyncflow import waits
from asyncflow.config import Config
from asyncflow.engines.base import EXCHANGE_SECONDS
from asyncflow.waits import WAITS, OpenWaits, Wait, waiting

PACKAGE = Path(waits.__file__).parent
CALLS = frozenset(
    (
        *("until", "wait", "wait_for", "timeout", "timeout_at", "waiting", "held", "acquire", "barrier"),
        *("readexactly", "readline", "recv", "communicate", "drain", "accept"),
    )
)
"""Calls that wait, by their last name: of asyncio, threading, processes, sockets, torch.distributed, and of this project's own."""
OF_THREADS = frozenset(("_inbox", "_calls"))
"""Queues that a thread, not an event loop, waits at."""
OF_MODULES = {
    "subprocess": {"run", "call", "check_call", "check_output"},
    "fcntl": {"flock", "lockf"},
    "os": {"waitpid", "wait"},
    "select": {"select"},
    "dist": {
        "broadcast",
        "all_reduce",
        "all_gather",
        "all_gather_object",
        "all_gather_into_tensor",
        "all_to_all_single",
        "broadcast_object_list",
        "gather",
    },
}
"""Functions of modules that wait for a process, a file's lock, or other ranks."""
AT_ONCE = frozenset(("LOCK_NB", "LOCK_UN", "WNOHANG"))
"""Flags with which these do not wait."""
LOCKS = frozenset(("Lock", "RLock", "Semaphore", "BoundedSemaphore", "Barrier", "Condition"))
"""What is waited for by `with`: the place that makes one is where the wait is registered."""
PACES = {
    "cli/join.py:RunPlace.send_heartbeats": "a heartbeat every two seconds",
    "engines/rollout/vllm/servers.py:ServerHandle._come_back": "a pause before a server is started again",
    "engines/rollout/vllm/servers.py:ServerHandle._watch": "a look at a server every two seconds, for as long as it serves",
    "environments/capture/endpoint.py:CaptureEndpoint.start": "a task of its own, in the same event loop",
    "run/health.py:Health.run": "a look at all workers, again and again",
    "run/watch.py:Watch.guard": "the watchdog itself",
    "run/watch.py:Watch.run": "a look at the run every second",
    "sandbox/pool.py:SandboxPool._replace": "a pause before a process is started again",
    "service/server.py:HttpServer.start": "a task of its own, in the same event loop",
    "service/tinker/sessions.py:Sessions._sweep": "a look at all sessions, again and again",
    "service/watching.py:WatchedRun.changes": "a look at the run's files every second",
    "service/watching.py:comparisons": "a look at several runs' files every second, or less often",
    "service/workers.py:OutsideWorkers._look_around": "a look at all workers, again and again",
    "telemetry/hub.py:Reporter.run": "a report several times a second",
    "transfer_queue/client_leases.py:ClientLeases._renew_held": "a renewal three times in a lease",
    "transfer_queue/unit_subscription.py:UnitSubscription._mark_dead": "a pause before a call is repeated, beside everything else",
}
"""Loops with pauses in which nobody is waited for, and why they have them."""
NONE_OF_THEM = frozenset(
    {
        "waits.py",  # this registry
        "cluster/clock.py",  # virtual time itself
        "control/signal.py",  # its callers are registered
        "engines/cores.py",  # arithmetic of a simulation: no `until` there waits
        "telemetry/spans.py",  # `waiting` of a lane, whose callers are registered
    }
)
NAMES = frozenset(name for name, value in vars(waits).items() if isinstance(value, Wait))


def waits_in(source: str) -> set[str]:
    """Functions (`Class.function`) that wait, or make a lock, in a module's source, and do not say in the call which wait it is;
    and those that look again and again, with pauses, outside of a block that says so."""
    found: set[str] = set()

    def visit(node: ast.AST, names: tuple[str, ...], is_awaited: bool, is_repeated: bool = False, is_named: bool = False) -> None:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            names, is_repeated, is_named = (*names, node.name), False, False
        is_repeated |= isinstance(node, ast.While | ast.For | ast.AsyncFor)
        is_named |= isinstance(node, ast.With) and any(_names_a_wait(item.context_expr) for item in node.items)
        if isinstance(node, ast.Call) and (_waits(node, is_awaited) or (is_repeated and not is_named and _pauses(node))):
            found.add(".".join(names) or "-")
        if isinstance(node, ast.Await) and isinstance(node.value, ast.Name | ast.Attribute | ast.Subscript):
            found.add(".".join(names) or "-")  # a future that somebody else settles
        for child in ast.iter_child_nodes(node):
            visit(child, names, isinstance(node, ast.Await), is_repeated, is_named)

    visit(ast.parse(source), (), False)
    return found


def _pauses(call: ast.Call) -> bool:
    return _last_name(call.func) == "sleep"


def _names_a_wait(node: ast.expr) -> bool:
    """Whether it is a call that says which wait it is."""
    return isinstance(node, ast.Call) and any(_last_name(each) in NAMES for each in node.args)


def _waits(call: ast.Call, is_awaited: bool) -> bool:
    function, name = call.func, _last_name(call.func)
    if _names_a_wait(call):
        return False
    if name == "poll":  # of descriptors, for so long; without an argument it is a look at a process
        return any(not isinstance(each, ast.Constant) or each.value != 0 for each in call.args)
    if name == "join":  # of a thread; text is joined of something, and what is awaited waits elsewhere
        return isinstance(function, ast.Attribute) and not call.args and not is_awaited
    if name == "get":  # of an asyncio.Queue, or of a thread's
        is_at_a_queue = is_awaited or _last_name(_owner(function)) in OF_THREADS
        return is_at_a_queue and not call.args and not call.keywords
    if name == "result":  # of another thread's future; one of asyncio's has a result, or raises
        of_call = _owner(function)
        is_new = isinstance(of_call, ast.Call) and _last_name(of_call.func) in ("run_coroutine_threadsafe", "submit")
        return is_new or bool(call.args or call.keywords)
    if name in OF_MODULES.get(_last_name(_owner(function)), ()):
        return not AT_ONCE & {
            _last_name(each) for argument in call.args for each in ast.walk(argument) if isinstance(each, ast.expr)
        }
    return name in CALLS or name in LOCKS


def _owner(function: ast.expr) -> ast.expr:
    """What a method is of, or the module of a function."""
    return function.value if isinstance(function, ast.Attribute) else function


def _last_name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""


@cache
def places() -> set[str]:
    """All places of the package that wait."""
    files = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    return {f"{name}:{each}" for name, path in files.items() if name not in NONE_OF_THEM for each in waits_in(path.read_text())}


def registered_places() -> list[str]:
    """All places of the registry, `file:class.function` each."""
    found: list[str] = []
    for place in (place for wait in WAITS.values() for place in wait.places.split()):
        found.append(place if ":" in place else f"{found[-1].partition(':')[0]}:{place}")
    return found


def test_every_wait_of_the_code_is_registered() -> None:
    registered = set(registered_places())
    new, gone = places() - registered - set(PACES), (registered | set(PACES)) - places()
    assert not new, (
        f"these wait: register each in asyncflow/waits.py, with a name and a deadline, or in PACES if nobody is waited for: "
        f"{sorted(new)}"
    )
    assert not gone, f"nothing waits there any more: {sorted(gone)}"
    assert not registered & set(PACES)
    assert not NONE_OF_THEM - {path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py")}


@pytest.mark.parametrize(
    "source",
    [
        "async def f(self):\n    await self.changed.wait()",
        "async def f(future):\n    return await future",
        "def f(thread):\n    thread.join()",
        "async def f(queue):\n    return await queue.get()",
        "class A:\n    def __init__(self):\n        self.lock = asyncio.Lock()",
        "def f(reader):\n    with waiting(wait):\n        pass",
        "def f(loop):\n    return asyncio.run_coroutine_threadsafe(g(), loop).result()",
        "def f(command):\n    subprocess.run(command)",
        "def f(file):\n    fcntl.flock(file, fcntl.LOCK_EX)",
        "def f(pid):\n    os.waitpid(pid, 0)",
        "def f(tensor):\n    dist.all_reduce(tensor)",
        "def f(self):\n    call = self._inbox.get()",
        "async def f(self):\n    with waiting(FETCH):\n        await self.changed.wait()",
        "def f(path):\n    while not path.exists():\n        time.sleep(0.1)",
        "async def f(paths):\n    for path in paths:\n        if not path.exists():\n            await asyncio.sleep(0.1)",
        "async def f():\n    with waiting(FETCH):\n        pass\n    while not g():\n        await asyncio.sleep(0.1)",
        "def f(self, seconds):\n    self._poll.poll(seconds)",
    ],
)
def test_a_wait_is_found(source: str) -> None:
    assert waits_in(source) == {"A.__init__" if "class A" in source else "f"}


def test_what_is_no_wait_is_not_found() -> None:
    assert waits_in("async def f():\n    with waiting(FETCH):\n        while not g():\n            await asyncio.sleep(1)") == set()
    assert waits_in("def f():\n    while g():\n        def h():\n            time.sleep(1)") == set()
    assert waits_in("def f(process, poll):\n    process.poll()\n    poll.poll(0)") == set()
    assert waits_in("async def f(self):\n    await self.signal.until(lambda: True, FETCH)") == set()
    assert (
        waits_in("async def f(names, own):\n    await asyncio.sleep(1)\n    ', '.join(names)\n    own.get()\n    await own.call()")
        == set()
    )


def test_no_place_has_two_names_but_a_lane_that_waits_for_room_of_its_own() -> None:
    counted = Counter(registered_places())
    assert {place for place, count in counted.items() if count > 1} == {"loops/tasks.py:serve"}


def test_every_wait_has_words_and_a_deadline() -> None:
    for name, wait in WAITS.items():
        assert wait.name == name and wait.ends and wait.words({}), name
        for key in re.findall(r"\b([a-z_]+)\.([a-z_]+)\b", wait.ends):
            is_a_file = key[1] == "py"
            section = Config.model_fields[key[0]].annotation if key[0] in Config.model_fields else None
            assert is_a_file or key[1] in getattr(section, "model_fields", {}), f"{name}: {'.'.join(key)} is no configuration key"


def constants() -> dict[str, set[float]]:
    """Numbers that constants of the package's modules have, by name."""
    found: dict[str, set[float]] = {}
    for path in PACKAGE.rglob("*.py"):
        for line in path.read_text().splitlines():
            if assigned := re.match(r"([A-Z_]+)(?:: Final)? = ([\d.]+)\b", line):
                found.setdefault(assigned[1], set()).add(float(assigned[2]))
    return found


def test_the_figures_of_deadlines_are_those_of_the_constants() -> None:
    known, num_figures = constants(), 0
    for name, wait in WAITS.items():
        named = re.findall(r"([A-Z_]+) \(([\d.]+) s\)", wait.ends)
        assert all(float(seconds) in known[constant] for constant, seconds in named), name
        assert len(re.findall(r"\d+ s\b", wait.ends)) == len(named), f"{name}: what can be configured has no figure here"
        num_figures += len(named)
    assert num_figures > 10
    assert waits.COLLECTIVE.seconds == EXCHANGE_SECONDS and waits.SERVER_START.seconds is None


async def test_open_waits_are_those_of_the_tasks_begun_there() -> None:
    mine, other = OpenWaits(), OpenWaits()

    async def fetch(of: OpenWaits, version: int) -> None:
        of.begin()
        with waiting(waits.FETCH, seconds=60.0, version=version) as fetching:
            fetching.moved(5)
            await asyncio.sleep(60)

    tasks = [asyncio.create_task(fetch(mine, 7)), asyncio.create_task(fetch(other, 8))]
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    now = asyncio.get_running_loop().time()
    (wait,) = mine.now(now + 9.0)
    assert wait.words == "the weights of version 7" and wait.moved == 5
    assert 9.0 <= wait.seconds < 20.0 and wait.still is not None and wait.left is not None
    assert wait.still == pytest.approx(wait.seconds, abs=0.5) and wait.left == pytest.approx(60.0 - wait.seconds)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert mine.now(now) == [] == other.now(now)


async def test_a_wait_outside_of_a_worker_is_recorded_nowhere() -> None:
    with waiting(waits.FETCH, version=1) as fetching:
        fetching.moved(3)
    assert fetching.bytes == 3 and fetching.moved_at is None
