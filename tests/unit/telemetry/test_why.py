"""The chain of waits, from situations alone: what simulated runs cannot show (processes, Ray, vLLM, disks), and how it is told."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from asyncflow import waits
from asyncflow.cli.why import why
from asyncflow.telemetry.situation import SeenGroup, SeenStep, SeenWorker, Situation, read_situation, write_situation
from asyncflow.telemetry.why import Waiting, causes, chain, graph, paths, sentence, standing
from asyncflow.types import UserError
from asyncflow.waits import OpenWait, Wait

LIMITS = {"run.stall_timeout_seconds": 300.0, "queue.lease_seconds": 120.0, "weight_sync.deadline_seconds": 60.0}


def parked(wait: Wait, who: str = "", seconds: float = 41.0, **facts: int | str) -> OpenWait:
    return OpenWait(name=wait.name, worker=who, seconds=seconds, facts=facts)


def worker(name: str, task: str = "wait", cause: str = "rows", **seen: Any) -> SeenWorker:
    return SeenWorker(**{"name": name, "task": task, "cause": cause, "seconds": 41.0, "silence": 0.1, **seen})


def situation(
    *workers: SeenWorker, group: SeenGroup | None = None, parked_waits: list[OpenWait] | None = None, **seen: Any
) -> Situation:
    """A run that is at step 7; `group`: what the step lacks, which trainer/0 waits for."""
    steps = [SeenStep(topic="train", step=7, groups=[] if group is None else [group], lacking=int(group is not None))]
    asked = [parked(waits.ROUND, "trainer/0", step=7, number=1)] if parked_waits is None else parked_waits
    known = {"run": "r", "time": 0.0, "pid": 1, "host": "h", "committed": 7, "steps": 9, "idle": 41.0, "limits": LIMITS}
    return Situation(**{**known, "workers": list(workers), "open_steps": steps, "waits": asked, **seen})


def leased(holder: str, task: str = "rollout") -> SeenGroup:
    return SeenGroup(group=412, task=task, rows=4, state="leased", holder=holder, seconds=41.0, left=101.0, low=6, high=7)


READY = SeenGroup(group=412, task="rollout", rows=4, state="ready", low=7, high=7)
WAITS = "trainer/0 waits for group 412 of step 7, since 41 s"
HAS = "rollout/3 has it for task rollout, since 41 s"


def test_the_chain_of_the_page() -> None:
    pull = OpenWait(name=waits.PULL.name, seconds=11.0, still=9.0, moved=0, facts={"version": 7, "address": "tls:a:1"})
    fetch = OpenWait(name=waits.FETCH.name, seconds=11.5, facts={"version": 7})
    late = worker("rollout/3", cause="weights", serving=6, waits=[fetch, pull])
    found = chain(situation(worker("trainer/0"), late, group=READY, published=7, published_seconds=12.0))
    assert [link.text for link in found] == [
        WAITS,
        "group 412 lies ready for task rollout, for version 7, which no worker serves (rollout/3 serves 6)",
        "rollout/3 waits for bytes of version 7 from the trainer's sender at tls:a:1, since 11 s: 0 bytes have come, none for "
        "9.0 s; the trainer published them 12 s ago",
    ]
    assert [link.on for link in found] == ["group 412", "rollout/3", ""]
    assert found[-1].ends == "weight_sync.deadline_seconds (60 s)"


PROCESS = OpenWait(name=waits.PROCESS.name, seconds=41.0, left=19.0, facts={"process": "reward worker", "pid": 99})
FILES = parked(waits.CHECKPOINT, version=7, folder="here")
AT_FILES = "checkpoint: write_driver (driver_state.py:118) > open (pathlib.py:1044)"
CAUSES: dict[str, tuple[Situation, list[str], str]] = {
    "a process that SIGSTOP has stopped": (
        situation(worker("trainer/0"), worker("rollout/3", "generate", pid=17, process="stopped"), group=leased("rollout/3")),
        [WAITS, HAS, "rollout/3 does nothing: its process 17 is stopped (SIGSTOP) and goes on after SIGCONT"],
        "queue.lease_seconds (120 s)",
    ),
    "a process that is gone": (
        situation(worker("trainer/0"), worker("rollout/3", "generate", pid=17, process="gone"), group=leased("rollout/3")),
        [WAITS, HAS, "rollout/3 is not there: its process 17 has ended"],
        "its cluster, which starts it again or ends the run",
    ),
    "an event loop that computes": (
        situation(
            worker("trainer/0"), worker("rollout/3", "generate", pid=17, process="running", silence=30), group=leased("rollout/3")
        ),
        [WAITS, HAS, "rollout/3 has not reported for 30 s, its process 17 is running; last heard of in generate"],
        "queue.lease_seconds (120 s)",
    ),
    "a reward that sleeps": (
        situation(worker("trainer/0"), worker("rollout/3", cause="reward", waits=[PROCESS]), group=leased("rollout/3")),
        [WAITS, HAS, "rollout/3 waits for reward worker 99, since 41 s"],
        "its deadline, in 19 s",
    ),
    "a reward worker that is stopped": (
        situation(
            worker("trainer/0"),
            worker(
                "rollout/3",
                cause="reward",
                waits=[OpenWait(name=waits.PROCESS.name, seconds=41.0, left=19.0, facts={**PROCESS.facts, "state": "stopped"})],
            ),
            group=leased("rollout/3"),
        ),
        [WAITS, HAS, "rollout/3 waits for reward worker 99, since 41 s, which is stopped"],
        "its deadline, in 19 s",
    ),
    "a lock that a thread holds": (
        situation(worker("trainer/0", "forward_backward", threads=["trainer: loss (loss.py:12) > acquire (lock.py:3)"])),
        ["trainer/0 is in forward_backward, since 41 s, in thread trainer: loss (loss.py:12) > acquire (lock.py:3)"],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a rank that is missing in a collective": (
        situation(
            worker("trainer/0", "forward_backward", threads=["trainer: wait (pipeline.py:239)"]),
            worker("trainer/1", "forward_backward", pid=18, process="stopped"),
        ),
        [
            "trainer/0 is in forward_backward, since 41 s, in thread trainer: wait (pipeline.py:239); trainer/1, which computes it "
            "together with it, is not in it",
            "trainer/1 does nothing: its process 18 is stopped (SIGSTOP) and goes on after SIGCONT",
        ],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a rank that asks for no round": (
        situation(
            worker("trainer/0"),
            worker("trainer/2", "optim_step"),
            open_steps=[SeenStep(topic="train", step=7, asked=[2, 1], leaders=["trainer/0", "trainer/2"])],
        ),
        [
            "trainer/0 waits for round 1 of step 7, since 41 s, which trainer/2 has not asked for",
            "trainer/2 is in optim_step, since 41 s",
        ],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a follower": (
        situation(worker("trainer/0", "save"), worker("trainer/1", cause="leader")),
        ["trainer/0 is in save, since 41 s"],
        "run.stall_timeout_seconds (300 s)",
    ),
    "Ray without room": (
        situation(parked_waits=[parked(waits.WORKERS_START, workers=5), parked(waits.RAY_ROOM, workers="rollout/0, rollout/1")]),
        ["the driver waits for room in the Ray cluster for rollout/0, rollout/1, since 41 s"],
        "start_seconds of the cluster",
    ),
    "workers that the cluster is still starting": (
        situation(parked_waits=[parked(waits.WORKERS_START, workers=5)]),
        ["the driver waits for the cluster to start 5 workers, since 41 s"],
        "an interrupt, a loop that fails, or the cluster's own deadline (start_seconds on Ray)",
    ),
    "a storage unit that does not come": (
        situation(worker("storage/0", "serve", pid=19, process="stopped"), parked_waits=[parked(waits.UNITS, units=1)]),
        [
            "the driver waits for 1 storage units to come, since 41 s",
            "storage/0 does nothing: its process 19 is stopped (SIGSTOP) and goes on after SIGCONT",
        ],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a dead vLLM": (
        situation(
            worker("trainer/0"),
            worker("rollout/3", "generate", waits=[parked(waits.SERVER_START, servers="vLLM 0 was lost (it has ended)")]),
            group=leased("rollout/3"),
        ),
        [WAITS, HAS, "rollout/3 waits for a vLLM server that serves: vLLM 0 was lost (it has ended), since 41 s"],
        "start_seconds of rollout.engine",
    ),
    "a vLLM that does not answer": (
        situation(
            worker("trainer/0"),
            worker("rollout/3", "generate", waits=[parked(waits.SERVER, server="vLLM server 0")]),
            group=leased("rollout/3"),
        ),
        [WAITS, HAS, "rollout/3 waits for vLLM server 0, since 41 s"],
        "the look at the server's health, or generation_seconds of rollout.engine",
    ),
    "a storage unit that is stopped": (
        situation(
            worker("trainer/0"),
            worker("rollout/3", cause="reward", waits=[parked(waits.UNIT, unit=1, rows=4)]),
            worker("storage/1", "serve", pid=19, process="stopped"),
            group=leased("rollout/3"),
        ),
        [
            WAITS,
            HAS,
            "rollout/3 waits for storage unit 1 to store 4 rows, since 41 s",
            "storage/1 does nothing: its process 19 is stopped (SIGSTOP) and goes on after SIGCONT",
        ],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a disk that hangs under a checkpoint": (
        situation(worker("trainer/0", "checkpoint", waits=[FILES], threads=[AT_FILES, "trainer: loss (loss.py:12)"])),
        [f"trainer/0 waits for files of checkpoint 7 to be written, in here, since 41 s, in thread {AT_FILES}"],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a disk that hangs under the driver's part of a checkpoint": (
        situation(
            worker("trainer/0", cause="checkpoint", waits=[parked(waits.CHECKPOINT_WHOLE, **FILES.facts)]),
            parked_waits=[parked(waits.CHECKPOINT, version=6, folder="there"), FILES],
            threads=[AT_FILES],
        ),
        [
            "trainer/0 waits for the driver to make checkpoint 7 whole, in here, since 41 s",
            f"the driver waits for files of checkpoint 7 to be written, in here, since 41 s, in thread {AT_FILES}",
        ],
        "run.stall_timeout_seconds (300 s)",
    ),
    "receivers that do not take part in a publication": (
        situation(worker("trainer/0", cause="publish", waits=[parked(waits.PUBLISHING, version=7)]), parked_waits=[]),
        ["trainer/0 waits for version 7 to be published, since 41 s"],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a policy whose critic does not commit": (
        situation(
            worker("trainer/0"), worker("critic", "forward_backward"), parked_waits=[parked(waits.RELEASED, "trainer/0", step=6)]
        ),
        ["trainer/0 waits for critic to commit step 6, since 41 s", "critic is in forward_backward, since 41 s"],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a circle": (
        situation(worker("trainer/0"), worker("rollout/3", serving=6), group=READY, published=6),
        [
            WAITS,
            "group 412 lies ready for task rollout, for version 7, and the newest that is published is 6",
            "trainer/0 is waited for by those that it waits for: nothing inside the run ends that",
        ],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a worker that has not come": (
        situation(worker("trainer/0", silence=None, pid=17, process="sleeping"), parked_waits=[]),
        ["trainer/0 is not connected: it has not come yet, or has gone: its process 17 is sleeping"],
        "run.stall_timeout_seconds (300 s)",
    ),
    "a run without a trainer": (
        situation(worker("rollout/3", "generate"), group=leased("rollout/3"), parked_waits=[]),
        ["the run waits for group 412 of step 7", HAS, "rollout/3 is in generate, since 41 s"],
        "run.stall_timeout_seconds (300 s)",
    ),
}


@pytest.mark.parametrize("cause", CAUSES)
def test_a_cause_is_named_with_its_deadline(cause: str) -> None:
    seen, texts, ends = CAUSES[cause]
    found = chain(seen)
    assert [link.text for link in found] == texts
    assert found[-1].ends == ends and not found[-1].on
    stall = "run.stall_timeout_seconds (300 s)"  # it is the whole run's, and told once
    own = ["" if link.ends == stall else f" (ended by {link.ends})" for link in found[:-1]]
    assert sentence(seen) == "; ".join(map("".join, zip(texts, [*own, f" (ended by {ends})"], strict=True)))


def test_a_run_that_waits_for_somebody_outside_names_no_deadline_that_does_not_end_it() -> None:
    held = msgspec.structs.replace(CAUSES["a circle"][0], is_held=True)
    assert chain(held)[-1].ends == "a user or a process from outside, for whom this run waits without a deadline"
    lease = msgspec.structs.replace(CAUSES["a vLLM that does not answer"][0], is_held=True)
    assert "generation_seconds" in chain(lease)[-1].ends, "a deadline of its own stays"


def asked(left: float | None = None, **seen: Any) -> Situation:
    """A run in which rollout/3 asks a vLLM server for a response, for which it has so many seconds left."""
    wait = OpenWait(name=waits.SERVER.name, seconds=41.0, left=left, facts={"server": "vLLM 0"})
    return situation(worker("trainer/0"), worker("rollout/3", "generate", waits=[wait]), group=leased("rollout/3"), **seen)


def test_the_sooner_deadline_is_named() -> None:
    own = "the look at the server's health, or generation_seconds of rollout.engine, in"
    stall = "run.stall_timeout_seconds (300 s)"
    assert chain(asked(left=258.0))[-1].ends == f"{own} 258 s"
    assert chain(asked(left=1759.0))[-1].ends == stall, "nothing has moved for 41 of 300 s"
    assert chain(asked(left=1759.0, is_held=True))[-1].ends == f"{own} 1759 s"
    assert chain(asked(left=-30.0))[-1].ends == stall, "it is over, and has ended nothing"
    room = OpenWait(name=waits.RAY_ROOM.name, seconds=41.0, left=559.0)
    start = situation(parked_waits=[parked(waits.WORKERS_START, workers=5), room])
    assert chain(start)[-1].ends == "start_seconds of the cluster, in 559 s", "the watchdog begins when all are started"


def test_the_ranks_of_a_collective_are_ended_by_its_own_deadline_where_that_is_sooner() -> None:
    ranks = worker("trainer/0", "forward_backward"), worker("trainer/1", "forward_backward", pid=18, process="stopped")
    late = {**LIMITS, "run.stall_timeout_seconds": 900.0}
    assert [link.ends for link in chain(situation(*ranks))] == ["run.stall_timeout_seconds (300 s)"] * 2
    assert chain(situation(*ranks, limits=late))[0].ends == waits.COLLECTIVE.ends == "EXCHANGE_SECONDS (600 s)"


def test_a_lease_ends_the_wait_for_a_holder_that_does_not_renew_it() -> None:
    stopped = worker("rollout/3", "generate", pid=17, process="stopped", silence=30.0)
    held_by_one_that_is_off = situation(worker("trainer/0"), stopped, group=leased("rollout/3"))
    lease = "queue.lease_seconds (120 s), in 101 s"
    assert [link.ends for link in chain(held_by_one_that_is_off)][1:] == [lease, "queue.lease_seconds (120 s)"]
    assert f"{HAS} (ended by {lease}); rollout/3 does nothing" in sentence(held_by_one_that_is_off)
    gone = situation(worker("trainer/0"), group=leased("rollout/9"))
    assert chain(gone)[-1].ends == f"{lease}, unless it renews"
    alive = situation(worker("trainer/0"), worker("rollout/3", "generate"), group=leased("rollout/3"))
    assert {link.ends for link in chain(alive)} == {"run.stall_timeout_seconds (300 s)"}
    long_stopped = msgspec.structs.replace(stopped, silence=200.0)
    after = chain(situation(worker("trainer/0"), long_stopped, group=leased("rollout/3")))
    assert after[-1].ends == "run.stall_timeout_seconds (300 s)", "what it held is others' since 80 s"


def test_a_worker_that_stands_while_others_go_on_is_not_ended_by_the_watchdog() -> None:
    evaluator = worker("evaluator/0", "generate", waits=[parked(waits.UNIT, seconds=250.0, unit=0, rows=4)], seconds=250.0)
    goes_on = situation(worker("trainer/0"), worker("rollout/3", "generate"), evaluator, group=leased("rollout/3"), idle=0.2)
    first, *others = paths(goes_on)
    assert {link.ends for link in first} == {"run.stall_timeout_seconds (300 s)"}
    assert [[link.ends for link in path] for path in others] == [["run.stall_timeout_seconds (300 s), once nothing else moves"]]
    assert graph(goes_on)[-1] == others[-1][0]
    stands = msgspec.structs.replace(goes_on, idle=250.0)
    assert paths(stands)[-1][-1].ends == "run.stall_timeout_seconds (300 s)"


def test_a_worker_stands_that_is_silent_or_held_up_without_a_deadline_of_its_own() -> None:
    unit = parked(waits.UNIT, unit=1, rows=4)
    pull = OpenWait(name=waits.PULL.name, seconds=90.0, still=0.1, facts={"version": 7, "address": "a"})
    seen = situation(
        worker("trainer/0", "forward_backward"),
        worker("trainer/1", cause="leader"),
        worker("rollout/0", "generate", silence=31.0),
        worker("rollout/1", cause="reward", waits=[unit]),
        worker("rollout/2", cause="reward", waits=[PROCESS]),  # its own deadline ends it
        worker("rollout/3", cause="weights", waits=[pull]),  # bytes come
        worker("rollout/4", cause="weights", waits=[msgspec.structs.replace(pull, still=35.0)]),
        worker("rollout/5", silence=None),  # it has not come yet
        worker("rollout/6", "checkpoint", waits=[FILES]),
        worker("rollout/7", "generate", waits=[FILES]),  # beside its work
        idle=0.2,
    )
    assert standing(seen, 30.0) == {
        "rollout/0": "rollout/0 has not reported for 31 s; last heard of in generate (ended by queue.lease_seconds (120 s))",
        "rollout/1": "rollout/1 waits for storage unit 1 to store 4 rows, since 41 s (ended by queue.lease_seconds (120 s))",
        "rollout/4": "rollout/4 waits for bytes of version 7 from the trainer's sender at a, since 90 s: 0 bytes have come, "
        "none for 35 s (ended by weight_sync.deadline_seconds (60 s))",
        "rollout/6": "rollout/6 waits for files of checkpoint 7 to be written, in here, since 41 s (ended by "
        "run.stall_timeout_seconds (300 s), once nothing else moves)",
    }
    assert not standing(seen, 100.0)


def test_background_waits_are_not_what_holds_up_a_lane_that_works() -> None:
    publishes = worker("trainer/0", "forward_backward", waits=[parked(waits.PUBLISHING, version=7), FILES])
    assert sentence(situation(publishes)).startswith("trainer/0 is in forward_backward, since 41 s (")
    scoring = [OpenWait(name=waits.PROCESS.name, seconds=0.2, facts=PROCESS.facts)]
    seen = situation(worker("trainer/0"), worker("rollout/3", "generate", waits=scoring), group=leased("rollout/3"))
    assert chain(seen)[-1].text == "rollout/3 is in generate, since 41 s"


def test_the_graph_has_every_worker_once() -> None:
    seen = situation(
        worker("trainer/0"), worker("trainer/1", cause="leader"), worker("rollout/3", "generate"), group=leased("rollout/3")
    )
    assert [(link.subject, link.on) for link in graph(seen)] == [
        ("trainer/0", "group 412"),
        ("trainer/1", "trainer/0"),
        ("rollout/3", ""),
    ]


def told(waiting: Waiting) -> Any:
    """Subjects of a tree: the waiters, then what they wait for."""
    return *map(told, waiting.waiters), waiting.link.subject


def test_the_causes_are_trees_that_have_each_wait_once_with_its_deadline() -> None:
    follower, other = worker("trainer/1", cause="leader"), worker("rollout/4", "generate")
    fetch = OpenWait(name=waits.FETCH.name, seconds=11.5, facts={"version": 7})
    alone = worker("rollout/5", cause="weights", waits=[fetch])
    seen = situation(worker("trainer/0"), follower, worker("rollout/3", "generate"), other, alone, group=leased("rollout/3"))
    assert [[link.subject for link in path] for path in paths(seen)] == [
        ["trainer/0", "group 412", "rollout/3"],
        ["trainer/1", "trainer/0"],  # and on as above
        ["rollout/4"],
        ["rollout/5"],
    ]
    found = causes(seen)
    assert [told(each) for each in found] == [(((("trainer/1",), "trainer/0"), "group 412"), "rollout/3"), ("rollout/5",)]
    assert found[1].link.ends == "weight_sync.deadline_seconds (60 s)"
    assert all(link.ends for path in paths(seen) for link in path)
    (circle,) = causes(situation(worker("trainer/0"), follower, worker("rollout/3", serving=6), group=READY, published=6))[:1]
    assert circle.link.text.endswith("nothing inside the run ends that") and len(circle.waiters) == 1


def test_the_command_line_prints_the_graph_with_arrows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follower = worker("trainer/1", cause="leader")
    write_situation(tmp_path, situation(worker("trainer/0"), follower, worker("rollout/3", "generate"), group=leased("rollout/3")))
    why(tmp_path)
    until = "at the latest until: run.stall_timeout_seconds (300 s)"
    assert capsys.readouterr().out.splitlines()[1:] == [
        f"{WAITS} [{until}]",
        f"  -> {HAS} [{until}]",
        f"    -> rollout/3 is in generate, since 41 s [{until}]",
        "and the others:",
        f"  trainer/1 follows trainer/0, since 41 s [{until}]",
        f"    -> {WAITS} [as above]",
    ]


@pytest.mark.parametrize("cause", CAUSES)
def test_every_path_ends_at_a_cause_or_at_an_earlier_path(cause: str) -> None:
    before: set[str] = set()
    for path in paths(CAUSES[cause][0]):
        texts = [link.text for link in path]
        assert len(set(texts)) == len(texts) and not before.intersection(texts[:-1])
        before.update(texts)


def test_a_situation_is_whole_or_the_one_before(tmp_path: Path) -> None:
    seen = situation(worker("trainer/0"), group=READY)
    write_situation(tmp_path, seen)
    assert read_situation(tmp_path) == seen
    assert [path.name for path in tmp_path.iterdir()] == ["now.json"]
    (tmp_path / "now.json").write_text('{"run": "r"')
    with pytest.raises(UserError, match=r"now\.json cannot be read"):
        read_situation(tmp_path)
    with pytest.raises(UserError, match="no run has begun in it"):
        read_situation(tmp_path / "elsewhere")
