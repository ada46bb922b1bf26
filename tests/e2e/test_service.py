"""A run over HTTP: driven, generated for and trained from outside."""

from __future__ import annotations

import asyncio
import math
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file

from asyncflow.attestation import Attestation
from asyncflow.client import AsyncClient, Client, GroupData, ResponseData
from asyncflow.types import RunError, UserError
from tests.depth import deep, few
from tests.e2e.commands import kill_trainer, processes_of, rows, wait_for
from tests.e2e.service import Served
from tests.forked import Command
from tests.patience import patience
from tests.processes import kill

PROMPTS = [{"question": f"Quintus has {n} coins. How many?", "answer": str(n)} for n in range(8)]
Background = Callable[..., Command]


def test_a_run_is_driven_over_http(background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    served = Served(background, tmp_path, small(run={"steps": 3}, telemetry={"samples_per_step": 4}))
    with served.client() as client:
        with pytest.raises(RunError, match="has not begun: call init_engines first"):
            client.step()
        assert {name: client.status()[name] for name in ("is_live", "has_begun")} == {"is_live": False, "has_begun": False}
        assert client.init_engines(rollout="own") is None
        assert client.init_engines(train="own") == 0 and client.init_engines() == 0
        with pytest.raises(UserError, match="begun with the train engine own"):
            client.init_engines(train="outside")
        first = client.step()
        assert first is not None and first["rows/trained"] == 16
        assert client.weight_sync_notify() == 1
        client.put_prompts_data(PROMPTS[:4])
        with pytest.raises(UserError, match="none of the columns prompt, question, problem, but answer"):
            client.put_prompts_data([{"answer": "1"}])
        status = client.status()
        assert status["committed"] == 1 and status["is_live"] and "rollout" in status["queue"]
        assert 'asyncflow_queue_rows{state="done",task="rollout"}' in client.metrics()
        key = client.make_key("guest", "read", expires_seconds=600.0)
        with httpx2.Client(transport=httpx2.HTTPTransport(uds=served.address.removeprefix("unix:")), base_url="http://run") as page:
            assert "<title>" in page.get("/watch/").text and page.get("/watch/api/runs").status_code == 401
            shown = page.get("/watch/api/runs", headers={"Authorization": f"Bearer {key}"}).json()
            assert shown == [served.run_dir.name], "the live page is the service's, too"
        with Client.connect(served.url, key=key) as guest:
            assert guest.status()["committed"] == 1
            with pytest.raises(UserError, match="'guest' may read and nothing else"):
                guest.step()
            client.remove_key("guest")
            with pytest.raises(UserError, match="key"):
                guest.status()
        assert client.checkpoint() == 2
        assert [client.step() is not None for _ in range(2)] == [True] * 2
        assert client.step() is None
        assert sorted(client.steps()) == [0, 1, 2] and list(client.steps(2)) == [2]
        client.stop()
    assert served.command.wait(patience(60)) == 0
    assert (served.run_dir / "model" / "config.json").is_file()
    assert {path.name for path in (served.run_dir / "checkpoints").iterdir() if path.is_dir()} == {"step-000002", "step-000003"}
    audit = rows(served.key_file.with_name("audit.jsonl"))
    assert {line["path"] for line in audit} >= {"/v1/step", "/v1/stop"} and all(line["key"] == "admin" for line in audit)


def test_a_trainers_death_does_not_end_a_served_run(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Its clients make requests as before: those that come while the run is resumed wait. The bits are those of a run without a
    death, with prompts that were put before and after it, whether there is a checkpoint by then or not."""
    expected: dict[str, np.ndarray] = {}
    for name in few(("whole", "killed"), ("whole", "killed", "begun-again")):
        kept = {"in_memory": False} if name == "begun-again" else {}
        tree = small(run={"steps": 5, "name": name}, schedule="synchronous", train={"accumulate": "exact"}, checkpoint=kept)
        served = Served(background, tmp_path, tree)
        with served.client() as client:
            client.init_engines()
            assert [client.step() is not None for _ in range(3)] == [True] * 3
            if name == "begun-again":  # what is put while steps are made again enters none of them
                kill_trainer(served.run_dir)
                served.read_until("; the run is resumed from")
            client.put_prompts_data(PROMPTS[:4])
            if name == "killed":
                kill_trainer(served.run_dir)
                served.read_until("; the run is resumed from")
                wait_for(lambda: client.status()["committed"] == 3)  # it waits for the attempt that follows
            client.put_prompts_data(PROMPTS[4:])
            steps = [client.step() for _ in range(3)]
            assert [step is not None for step in steps] == [True, True, False] and sorted(client.steps()) == [*range(5)]
            client.stop()
        assert served.command.wait(patience(60)) == 0
        found = load_file(served.run_dir / "model" / "model.safetensors")
        expected = expected or found
        assert all(np.array_equal(found[key], expected[key]) for key in expected)


def test_a_mistake_in_the_configuration_is_told_to_who_starts_the_run(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    served = Served(background, tmp_path, small(model={"path": "nowhere"}))
    with served.client() as client:
        with pytest.raises(UserError, match="'nowhere' is no folder with a model"):
            client.init_engines()
        client.stop()
    assert served.command.wait(patience(60)) == 0


def answers(prompts: list[Any], token: int = 7) -> list[ResponseData]:
    """A response of one token for each row."""
    return [
        ResponseData(row=row, token_ids=[token], logprobs=[-1.0], finish_reason="stop") for prompt in prompts for row in prompt.rows
    ]


def test_a_client_generates_under_the_laws_of_any_worker(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Its weights travel by the schedule; what is not its to answer, or was answered already, is told so."""
    served = Served(background, tmp_path, small(run={"steps": 2}, rollout={"num_workers": 0}, queue={"lease_seconds": 20.0}))
    with served.client() as client:
        client.init_engines()
        client.allow(2)
        worker = client.join_generators(num_slots=64)
        work = worker.get_prompts_data(3)
        assert work.version == 0 and len(work.prompts) == 3 and all(len(prompt.rows) == 4 for prompt in work.prompts)
        row, good = work.prompts[0].rows[0], answers(work.prompts)
        for wrong, why in (
            ({"token_ids": [7] * 49, "logprobs": [-1.0] * 49}, "has 49 tokens: 1 to 48"),
            ({"token_ids": [10**6]}, "token id that is not in 0 to"),
            ({"logprobs": [-1.0, -1.0]}, "1 tokens and 2 log-probs"),
            ({"logprobs": [0.5]}, "finite, and 0 at most"),
            ({"versions": [(0, 1)]}, r"says versions \[1\]"),
            ({"versions": [(1, 0)]}, "not ascending from token 0"),
        ):
            given = {"row": row, "token_ids": [7], "logprobs": [-1.0], "finish_reason": "stop"} | wrong
            with pytest.raises(UserError, match=why):
                worker.put_experience_data([ResponseData(**given)])
        assert worker.put_experience_data(good) == ["stored"] * 12
        assert all("another response was first" in outcome for outcome in worker.put_experience_data(good))
        other = client.join_generators()
        last = wait_for(lambda: other.get_prompts_data(4, timeout_seconds=0.2).prompts or worker.get_prompts_data(4, 0.2).prompts)
        for each in (worker, other):
            each.put_experience_data(answers(last))
        for each in (worker, other):  # the weights of step 0
            work = wait_for(lambda each=each: (found := each.get_prompts_data(4, 5.0)).install is not None and found)
            assert work.install == 1 and not work.prompts
            with pytest.raises(RunError, match="version 0 is not the one"):
                each.installed(0)
            path = each.fetch_weights(1, tmp_path / "weights.safetensors")
            assert path.stat().st_size > 1_000_000
            assert work.probe is not None and len(work.probe.token_ids) == 16
            name, unseen = "model.norm.weight", [*load_file(path).keys() - {"model.norm.weight"}]
            wrongs = (
                Attestation([([name], 7)]),
                Attestation([([name], 7)], unseen=unseen),
                Attestation(None, None, [-99.0] * 15),
            )
            for wrong in wrongs if each is other else ():
                each.installed(1, wrong)  # it generates with anything else, and is to load the version again
                work = wait_for(lambda each=each: (found := each.get_prompts_data(4, 5.0)).install is not None and found)
                assert work.install == 1 and not work.prompts
            each.installed(1)
        deadline = time.monotonic() + patience(60)
        while client.status()["committed"] < 2 and time.monotonic() < deadline:
            for each in (worker, other):
                if prompts := each.get_prompts_data(4, 0.2).prompts:
                    assert each.put_experience_data(answers(prompts)) == ["stored"] * sum(len(p.rows) for p in prompts)
        worker.leave()
        with pytest.raises(RunError, match="no worker 'outside-0-"):
            worker.get_prompts_data()
        client.stop()
    assert served.command.wait(patience(60)) == 0
    assert all(row["staleness/max"] == 0 for row in rows(served.run_dir / "metrics.jsonl"))


def rows_of_a_step(client: Client, worker: Any) -> set[int]:
    """Generate until a run's only step is committed. Returns the rows that there were to generate."""
    taken: set[int] = set()

    def is_done() -> bool:
        prompts = worker.get_prompts_data(4, 0.5).prompts
        taken.update(row for prompt in prompts for row in prompt.rows)
        if prompts:
            worker.put_experience_data(answers(prompts))
        return bool(client.status()["committed"] == 1)

    wait_for(is_done)
    return taken


def test_a_client_that_dies_loses_its_leases_alone(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    served = Served(background, tmp_path, small(run={"steps": 1}, rollout={"num_workers": 0}, queue={"lease_seconds": 2.0}))
    with served.client() as client:
        client.init_engines()
        client.allow(1)
        silent, lively = client.join_generators(), client.join_generators()
        held = silent.get_prompts_data(4).prompts
        assert held
        taken = rows_of_a_step(client, lively)
        assert len(taken) == 16 and {row for prompt in held for row in prompt.rows} <= taken
        with pytest.raises(RunError, match="silent for too long"):
            silent.put_experience_data(answers(held))
        client.stop()
    assert served.command.wait(patience(60)) == 0


@deep
def test_a_client_that_dies_while_its_heartbeat_is_held_loses_its_leases_at_once(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """Nobody waits for an hour until the leases are over."""
    served = Served(background, tmp_path, small(run={"steps": 1}, rollout={"num_workers": 0}, queue={"lease_seconds": 3600.0}))

    async def hold_and_die() -> set[int]:
        async with AsyncClient.connect(served.url, key_file=served.key_file) as client:
            worker = await client.join_generators()
            rows = {row for prompt in (await worker.get_prompts_data(4)).prompts for row in prompt.rows}
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(1.0):
                    await worker.alive(timeout_seconds=60.0)
            return rows

    with served.client() as client:
        client.init_engines()
        client.allow(1)
        held, lively = asyncio.run(hold_and_die()), client.join_generators()
        assert len(held) == 16 and rows_of_a_step(client, lively) == held
        client.stop()
    assert served.command.wait(patience(60)) == 0


def zero_step(client: Client, worker: Any, weights: dict[str, Any]) -> tuple[int, list[GroupData]]:
    """Take all of a step, acknowledge it, and publish the same weights."""
    groups: list[GroupData] = []
    while True:
        experience = worker.get_experience_data(groups=2)
        groups += experience.groups
        worker.acknowledge(experience.groups)
        if experience.is_complete:
            return worker.publish(experience.step, weights, grad_norm=0.5, learning_rate=0.25), groups


def test_a_second_signal_ends_a_server_at_once(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """The first one gives the trainer its time, which waits for weights that nobody publishes any more."""
    served = Served(background, tmp_path, small(run={"stop_grace_seconds": 3600}, train={"engine": "outside"}))
    with served.client() as client:
        client.init_engines()
        worker = client.join_trainers()
        wait_for(lambda: worker.get_experience_data(timeout_seconds=1.0).is_complete)
    served.command.terminate()
    time.sleep(1.0)
    assert served.command.poll() is None
    served.command.terminate()
    said = served.command.communicate(patience(60))
    assert served.command.returncode == 130, said
    assert said[1].endswith("asyncflow: a second signal has ended it at once\n") and "Traceback" not in said[1]
    wait_for(lambda: not processes_of(served.run_dir))


def test_a_client_trains(background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """It gets experience with advantages, and rollout serves what it publishes; mistakes are told, and change nothing."""
    tree = small(run={"steps": 3}, train={"engine": "outside"}, checkpoint={"every_steps": 1})
    served = Served(background, tmp_path, tree)
    with served.client() as client:
        client.init_engines()
        model = client.model(tmp_path / "model")
        weights = load_file(model / "model.safetensors")
        worker = client.join_trainers()
        experience = worker.get_experience_data(tokens=1)
        assert len(experience.groups) == 1 and experience.step == 0 and not experience.is_complete
        group = experience.groups[0]
        assert [len(ids) for ids in group.response_ids] == [len(each) for each in group.advantages]
        assert len(group.rewards) == 4 and math.isclose(sum(float(each[0]) for each in group.advantages), 0.0, abs_tol=1e-4)
        with pytest.raises(RunError, match=r"not all of its groups are there yet|are not acknowledged"):
            worker.publish(0, weights)
        dead, worker = worker, client.join_trainers(is_fresh=True)  # what the one before had is handed out again
        with pytest.raises(RunError, match=f"group {group.number} is not this trainer's"):
            dead.acknowledge(experience.groups)
        changed = {name: values + np.float32(0.25) for name, values in weights.items()}
        version, groups = zero_step(client, worker, changed)
        assert version == 1 and sorted(int(each.indices[0]) >> 2 for each in groups) == [0, 1, 2, 3]
        assert client.steps()[0]["policy/grad_norm"] == 0.5
        taken: list[GroupData] = []

        def has_all() -> bool:
            found = worker.get_experience_data(timeout_seconds=1.0)
            taken.extend(found.groups)
            return found.is_complete

        wait_for(has_all)
        worker.acknowledge(taken)
        bad = {**weights, "model.norm.weight": weights["model.norm.weight"] * np.float32("nan")}
        with pytest.raises(RunError, match=r"'model\.norm\.weight' holds what is no finite number"):
            worker.publish(1, bad)
        with pytest.raises(RunError, match="'extra' is in one of the two models"):
            worker.publish(1, {**weights, "extra": np.zeros(1, np.float32)})
        with pytest.raises(UserError, match="weights are read from below"):
            worker.publish_folder(1, model)
        assert worker.publish_folder(1, "") == 2 and worker.publish(0, weights) == 1  # skipped; said twice
        client.stop()
    assert served.command.wait(patience(60)) == 0
    published = load_file(served.run_dir / "model" / "model.safetensors")
    assert all(np.array_equal(published[name], changed[name]) for name in published)


def test_prompts_come_over_the_wire_alone(background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    """Without data.path a run waits for prompts as long as it lives, and trains each once."""
    tree = small(run={"steps": 2}, model={"max_context_tokens": 128}, telemetry={"samples_per_step": 4})
    del tree["data"]
    served = Served(background, tmp_path, tree)
    with served.client() as client:
        client.init_engines()
        client.allow(2)
        client.put_prompts_data(PROMPTS[:3])
        time.sleep(0.5)
        assert client.status()["committed"] == 0
        client.put_prompts_data(PROMPTS[3:])
        wait_for(lambda: client.status()["committed"] == 2)
        client.stop()
    assert served.command.wait(patience(60)) == 0
    prompts = {sample["group"]: sample["prompt"] for sample in rows(served.run_dir / "samples.jsonl")}
    assert sorted(prompt.strip() for prompt in prompts.values()) == sorted(row["question"] for row in PROMPTS)


def test_a_process_that_joins_generates_until_it_is_told_to_leave_or_the_run_is_over(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    served = Served(background, tmp_path, small(rollout={"num_workers": 0}))
    with served.client() as client:
        client.init_engines()
        with pytest.raises(UserError, match="generators of this run come from outside"):
            client.scale_rollout(2)
        for slots in (8, 64):  # half of a step's responses at once, and all
            joined = background("join", served.url, "--key-file", served.key_file, "--num-slots", str(slots))
            assert joined.stdout.readline().startswith(f"generating for the run at {served.url} as outside-0-")
            step = client.step()
            assert step is not None and step["rows/trained"] == 16 and step["staleness/max"] == 0
            if slots == 8:
                joined.send_signal(signal.SIGINT)
                assert joined.wait(patience(60)) == 0
        client.stop()
    assert served.command.wait(patience(60)) == 0
    assert joined.wait(patience(60)) == 0, joined.communicate()
    assert rows(served.run_dir / "metrics.jsonl")[1]["weights/attested"] == 1.0  # the second one has said what it generates with


@pytest.mark.deep
def test_a_process_that_joins_ends_with_an_error_when_its_service_is_killed(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """And stays away: a script that starts it again is to know that the run is not over."""
    served = Served(background, tmp_path, small(rollout={"num_workers": 0}))
    with served.client() as client:
        client.init_engines()
        joined = background("join", served.url, "--key-file", served.key_file, "--patience", "2")
        assert client.step() is not None
    served.command.kill()
    assert joined.wait(patience(120)) == 1
    (line,) = joined.communicate()[1].strip().splitlines()
    assert line.startswith(f"asyncflow: the service at {served.url} ")


@pytest.mark.deep
@pytest.mark.parametrize("killed", ["server", "trainer"])
def test_a_process_that_joins_goes_on_when_its_service_or_the_trainer_is_started_again(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path, killed: str
) -> None:
    """Its engine is kept, and begins with the weights of the run as it was resumed: the bits are those of an undisturbed run."""
    of_runs = []
    for name, is_killed in (("undisturbed", False), ("killed", True)):
        (folder := tmp_path / name).mkdir()
        tree = small(
            run={"name": name, "steps": 4}, rollout={"num_workers": 0}, train={"accumulate": "exact"}, checkpoint={"keep": 0}
        )
        served, steps = Served(background, folder, tree), []
        with served.client() as client:
            client.init_engines()
            joined = background("join", served.url, "--key-file", served.key_file, "--patience", str(patience(120)))
            steps += [client.step() for _ in range(2 if is_killed else 4)]
            if is_killed and killed == "trainer":
                kill_trainer(served.run_dir)
                steps += [client.step() for _ in range(2)]
            if not is_killed or killed == "trainer":
                client.stop()
        if is_killed and killed == "server":
            kill(psutil.Process(served.command.pid))
            served.start("--resume")
            with served.client() as client:
                assert client.init_engines() == 0  # there is no checkpoint
                steps = [client.step() for _ in range(4)]
                client.stop()
        assert joined.wait(patience(60)) == 0, joined.communicate()
        assert joined.communicate()[0].count("it has joined again") == is_killed
        of_runs.append([(step["reward/mean"], step["policy/grad_norm"]) for step in steps if step is not None])
    assert len(of_runs[0]) == 4 and of_runs[0] == of_runs[1]


@pytest.mark.deep
def test_a_process_that_joins_makes_what_the_runs_own_worker_would_have_made(
    background: Background, small: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    """By TLS, with a key and the trusted certificate; the same bits, from the same seed."""
    fingerprints = []
    for name, workers in (("own", 1), ("joined", 0)):
        folder = tmp_path / name
        folder.mkdir()
        tree = small(
            run={"name": name, "steps": 2},
            rollout={"num_workers": workers},
            train={"accumulate": "exact"},
            telemetry={"fingerprints": True},
        )
        served = Served(background, folder, tree, "--self-signed", listen="127.0.0.1:0")
        certificate = served.key_file.with_name("tls.crt")
        with served.client(certificate=certificate) as client:
            client.init_engines()
            if not workers:
                joined = background("join", served.url, "--key-file", served.key_file, "--certificate", certificate)
            for _ in range(2):
                assert client.step() is not None
            client.stop()
        if not workers:
            assert joined.wait(patience(60)) == 0, joined.communicate()
        fingerprints.append(rows(served.run_dir / "fingerprints.jsonl"))
        for line in fingerprints[-1]:
            line.get("groups", []).sort(key=lambda group: group["group"])
    assert fingerprints[0] == fingerprints[1] and len(fingerprints[0]) > 1
    (attested,) = {row["weights/attested"] for row in rows(served.run_dir / "metrics.jsonl")[1:]}
    assert attested == 1.0  # by the process that has joined
