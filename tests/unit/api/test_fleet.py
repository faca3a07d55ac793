"""The Python API over stub servers that skyctl did not start."""

from __future__ import annotations

import asyncio
import fcntl
import pickle
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from skyctl import Fleet
from skyctl.api import OutcomeStatus
from skyctl.core.registry import remember, select
from skyctl.errors import (
    ConflictError,
    FleetFileError,
    NotFoundError,
    PartialFailure,
    PreflightError,
    PushError,
    ServerError,
    UsageError,
)
from skyctl.store.identity import own_identity
from skyctl.store.paths import fleet_paths
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState
from tests.stub.faults import Fault
from tests.unit.api.fleets import attached, in_memory, state_dict, stubs
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "base")


async def test_the_verbs_freeze_and_thaw_every_server(tmp_path: Path, base: Path) -> None:
    servers = stubs(base)
    async with attached(tmp_path, servers) as fleet, fleet:
        paused = await fleet.pause("keep")
        assert paused.ok and [o.server for o in paused] == ["demo-0", "demo-1"]
        assert all(server.engine.paused for server in servers)
        assert [r.state for r in (await fleet.status()).replicas] == ["paused", "paused"]
        assert (await fleet.resume(servers=["demo-1"])).outcomes[0].server == "demo-1"
        assert [server.engine.paused for server in servers] == [True, False]
        await fleet.resume()
        assert (await fleet.sleep(1)).verb == "sleep"
        assert all(server.engine.asleep for server in servers)
        await fleet.wake()
        assert not any(server.engine.sleeping for server in servers)


async def test_a_server_that_fails_raises_with_every_outcome_or_is_data(
    tmp_path: Path, base: Path
) -> None:
    servers = [*stubs(base, 1), *stubs(base, 1, faults={"/resume": Fault("status")})]
    async with attached(tmp_path, servers) as fleet, fleet:
        with pytest.raises(PartialFailure) as caught:
            await fleet.resume()
        assert [o.status for o in caught.value.outcomes] == [
            OutcomeStatus.OK,
            OutcomeStatus.FAILED,
        ]
        result = await fleet.resume(check=False)
        assert not result.ok and result.outcomes[1].status is OutcomeStatus.FAILED


async def test_generation_goes_through_the_router_in_the_order_of_prompts(
    tmp_path: Path, base: Path
) -> None:
    servers = stubs(base)
    async with attached(tmp_path, servers) as fleet, fleet:
        single = await fleet.generate("ab", max_tokens=3)
        assert single.finish_reason == "length" and len(single.token_ids) == 3
        assert single.prompt_token_ids == [97, 98]
        many = await fleet.generate(
            ["x", [97, 98], {"prompt": "y", "id": "mine", "max_tokens": 1}], max_tokens=2
        )
        assert [r.id for r in many] == ["0", "1", "mine"]
        assert [len(r.token_ids) for r in many] == [2, 2, 1]
        assert many[1].token_ids == single.token_ids[:2], "ids and text of one prompt differ"
        straight = await fleet.generate("ab", max_tokens=3, server="demo-1")
        assert straight.token_ids == single.token_ids
        assert any(path == "/v1/completions" for path, _ in servers[1].bodies)


async def test_openai_requests_and_tokens(tmp_path: Path, base: Path) -> None:
    async with attached(tmp_path, stubs(base)) as fleet, fleet:
        answer = await fleet.completion("ab", max_tokens=2)
        assert len(answer["choices"][0]["token_ids"]) == 2
        messages = [{"role": "user", "content": "hi"}]
        chat = await fleet.chat(messages, max_tokens=2)
        assert chat["choices"][0]["finish_reason"] == "length"
        assert await fleet.tokenize("ab") == [97, 98]
        assert await fleet.tokenize(messages) == chat["choices"][0]["prompt_token_ids"]
        assert await fleet.detokenize([97, 98]) == "ab"
        with pytest.raises(UsageError, match="one piece"):
            await fleet.chat(messages, stream=True)
        for value in (float("nan"), "\ud800", object()):
            with pytest.raises(UsageError, match="/v1/completions: it cannot be sent as JSON"):
                await fleet.completion("ab", user=value)


async def test_a_completion_waits_out_an_abort(tmp_path: Path, base: Path) -> None:
    servers = stubs(base, 1)
    servers[0].gate.hold()
    async with attached(tmp_path, servers) as fleet, fleet:
        completion = asyncio.create_task(fleet.completion("ab", max_tokens=2))
        while not servers[0].engine.requests:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await fleet.pause("abort")
        servers[0].gate.grant(10)
        await fleet.resume()
        answer = await asyncio.wait_for(completion, 20)
        assert answer["choices"][0]["finish_reason"] == "length"


async def test_a_request_the_server_refuses_is_not_sent_again(tmp_path: Path, base: Path) -> None:
    servers = stubs(base, 1)
    async with attached(tmp_path, servers) as fleet, fleet:
        with pytest.raises(ServerError, match="does not exist"):
            await fleet.completion("ab", model="another")
        assert [path for path, _ in servers[0].bodies].count("/v1/completions") == 1
        results = await fleet.generate(["ab"], model="another", check=False)
        assert "does not exist" in results[0].error
        with pytest.raises(ServerError):
            await fleet.generate("ab", model="another")


async def test_requests_that_fail_leave_no_connections_behind(tmp_path: Path, base: Path) -> None:
    async with attached(tmp_path, stubs(base, 1)) as fleet, fleet:
        await fleet.generate(["ab"], model="another", check=False)
        before = psutil.Process().num_fds()
        for _ in range(5):
            await fleet.generate(["ab"], model="another", check=False)
            with pytest.raises(ServerError):
                await fleet.chat([{"role": "user", "content": "hi"}], model="another")
        assert psutil.Process().num_fds() <= before


async def test_several_answers_to_each_prompt_come_one_after_the_other(
    tmp_path: Path, base: Path
) -> None:
    async with attached(tmp_path, stubs(base, 1)) as fleet, fleet:
        results = await fleet.generate(["ab", {"prompt": "c", "n": 1}], n=2, max_tokens=2)
        assert [(result.id, result.sample) for result in results] == [("0", 0), ("0", 1), ("1", 0)]
        assert all(len(result.token_ids) == 2 for result in results)
        with pytest.raises(UsageError, match="several answers are a list"):
            await fleet.generate("ab", n=2)
        with pytest.raises(UsageError, match="concurrency=0 would send no request"):
            await asyncio.wait_for(fleet.generate(["ab"], concurrency=0), 2)


@pytest.mark.parametrize("prompt", [["ab", 3], [{"nothing": 1}], [""], [{"prompt": "a", "n": 0}]])
async def test_a_prompt_that_is_none_is_refused(
    tmp_path: Path, base: Path, prompt: list[Any]
) -> None:
    async with attached(tmp_path, stubs(base, 1)) as fleet:
        with pytest.raises(UsageError):
            await fleet.generate(prompt)


async def test_a_checkpoint_is_pushed_and_verified(tmp_path: Path, base: Path) -> None:
    servers = stubs(base)
    new = write_checkpoint(tmp_path / "new", tiny_tensors(50))
    stages = []
    async with attached(tmp_path, servers) as fleet, fleet:
        result = await fleet.sync_weights(
            new,
            weight_version="step-1",
            on_event=lambda e: stages.append(e.data.get("stage")),
        )
        assert result.version == "step-1" and all(server.ok for server in result.servers)
        assert result.freeze_window_s > 0 and "resume" in stages
        assert {s.engine.weight_version for s in servers} == {"step-1"}
        assert (await fleet.verify_weights()).agree is True
        state = await fleet.weights()
        assert [row.weight_version for row in state.servers] == ["step-1", "step-1"]
        assert state.pushes[0].version == "step-1"
        assert pickle.loads(pickle.dumps(result)) == result


@pytest.mark.parametrize(
    ("file", "options", "compared"),
    [
        (False, {}, False),
        (False, {"verify": True}, True),
        (True, {}, True),
        (True, {"verify": False}, False),
    ],
)
async def test_a_push_that_does_not_say_is_verified_as_the_fleet_file_has_it(
    tmp_path: Path, base: Path, file: bool, options: dict[str, bool], compared: bool
) -> None:
    more = f"weight_transfer: {{verify: {str(file).lower()}}}"
    async with attached(tmp_path, stubs(base), more) as fleet:
        new = write_checkpoint(tmp_path / "new", tiny_tensors(50))
        for weights in (new, state_dict(60)):
            result = await fleet.sync_weights(weights, **options)
            assert (result.compared is not None) == compared
            notes = [note for note in result.notes if "weight_transfer: {verify: false}" in note]
            assert len(notes) == (not options and not file)
        plan = (await fleet.sync_weights(new, dry_run=True)).plan
        assert plan is not None and any("verify" in note for note in plan["notes"]) == (not file)


async def test_tensors_from_memory_come_to_what_a_checkpoint_of_them_does(
    tmp_path: Path, base: Path, home: Path
) -> None:
    servers = stubs(base)
    written = write_checkpoint(tmp_path / "new", tiny_tensors(50))

    async def gathered() -> AsyncIterator[tuple[str, Any]]:
        for name, tensor in state_dict(50).items():
            assert in_memory(home)
            yield name, tensor

    async with attached(tmp_path, servers) as fleet, fleet:
        by_path = await fleet.sync_weights(written)
        pushed = {server.engine.digest for server in servers}
        for source in (state_dict(50), iter(state_dict(50).items()), gathered()):
            await fleet.sync_weights(state_dict(9))
            assert {server.engine.digest for server in servers} != pushed
            result = await fleet.sync_weights(source, weight_version="step-2")
            assert {server.engine.digest for server in servers} == pushed
            assert result.content_digest == by_path.content_digest
            assert result.version == "step-2"
        assert not any(server.engine.paused for server in servers)
    # nobody restarts these servers: nothing is kept for them
    assert list((home / "fleets" / "demo" / "weights").iterdir()) == []
    assert in_memory(home) == []


async def test_tensors_of_a_model_and_a_draft_model_are_pushed_together(
    tmp_path: Path, base: Path
) -> None:
    pytest.importorskip("torch")
    draft, servers = write_checkpoint(tmp_path / "draft", tiny_tensors(70)), stubs(base)
    for server in servers:
        drafts = {"method": "draft_model", "model": str(base)}
        server.engine.settings = {"speculative_config": drafts}
    async with attached(tmp_path, servers) as fleet, fleet:
        with pytest.raises(PreflightError, match="speculative decoding by draft_model"):
            await fleet.sync_weights(state_dict(50))
        assert (await fleet.sync_weights(state_dict(50), draft=draft)).draft == str(draft)
    assert all(f"draft {draft}" in server.engine.log for server in servers)


async def test_tensors_that_do_not_fit_are_refused_before_anything_is_paused(
    tmp_path: Path, base: Path, home: Path
) -> None:
    torch = pytest.importorskip("torch")
    servers = stubs(base)
    wrong = {**state_dict(50), "model.norm.weight": torch.ones(9)}
    halves = {name: tensor.clamp(-9, 9).half() for name, tensor in state_dict(50).items()}
    missing = {n: t for n, t in state_dict(50).items() if n != "model.norm.weight"}
    async with attached(tmp_path, servers) as fleet, fleet:
        for source, words in (
            (wrong, "model.norm.weight is .9. here"),
            (halves, "is float16 here, float32 in the checkpoint"),
            (missing, "model.norm.weight is missing"),
            ({}, "empty"),
        ):
            with pytest.raises(PreflightError, match=words):
                await fleet.sync_weights(source)
        result = await fleet.sync_weights(halves, dtype="match")
        assert all(server.ok for server in result.servers)
    assert all(server.engine.log.count("pause keep") == 1 for server in servers)
    assert list((home / "fleets" / "demo" / "weights").iterdir()) == []


async def test_an_iterator_that_fails_leaves_nothing(
    tmp_path: Path, base: Path, home: Path
) -> None:
    def failing() -> Any:
        yield next(iter(state_dict(1).items()))
        raise ZeroDivisionError

    async with attached(tmp_path, stubs(base)) as fleet, fleet:
        with pytest.raises(ZeroDivisionError):
            await fleet.sync_weights(failing())
    assert list((home / "fleets" / "demo" / "weights").iterdir()) == []


async def test_a_push_that_fails_says_how_each_server_was_left(tmp_path: Path, base: Path) -> None:
    servers = [*stubs(base, 1), *stubs(base, 1, faults={"/pause": Fault("status")})]
    async with attached(tmp_path, servers) as fleet, fleet:
        with pytest.raises(PushError) as caught:
            await fleet.sync_weights(state_dict(50))
        assert [row["server"] for row in caught.value.details["servers"]] == ["demo-0", "demo-1"]
        again = pickle.loads(pickle.dumps(caught.value))
        assert (again.message, again.hint, again.details) == (
            caught.value.message,
            caught.value.hint,
            caught.value.details,
        )


async def test_two_pushes_at_once_are_told_of_each_other(tmp_path: Path, base: Path) -> None:
    # long enough for the other to come meanwhile, on a busy machine as well
    servers = stubs(base, faults={"/pause": Fault("delay", seconds=1)})
    async with attached(tmp_path, servers) as fleet, fleet:
        results = await asyncio.gather(
            fleet.sync_weights(state_dict(50)),
            fleet.sync_weights(state_dict(60)),
            return_exceptions=True,
        )
        assert sorted(isinstance(r, ConflictError) for r in results) == [False, True], results


async def test_a_dry_run_touches_nothing(tmp_path: Path, base: Path) -> None:
    servers = stubs(base)
    async with attached(tmp_path, servers) as fleet:
        result = await fleet.sync_weights(state_dict(50), dry_run=True)
        assert result.plan is not None and result.plan["transport"] == "shm"
        assert all("pause keep" not in server.engine.log for server in servers)


async def test_it_is_pickled_without_its_connections_and_works_again(
    tmp_path: Path, base: Path
) -> None:
    async with attached(tmp_path, stubs(base)) as fleet, fleet:
        await fleet.generate("ab", max_tokens=1)
        copy = pickle.loads(pickle.dumps(fleet))
        assert isinstance(copy, Fleet) and copy.name == "demo"
        assert (await copy.pause("keep")).ok
        assert (await copy.resume()).ok


async def test_it_serves_many_tasks_and_other_threads_loops_at_once(
    tmp_path: Path, base: Path
) -> None:
    async with attached(tmp_path, stubs(base)) as fleet:

        async def block() -> int:
            async with fleet:
                return len((await fleet.generate("ab", max_tokens=2)).token_ids)

        def elsewhere(lengths: list[int]) -> None:
            lengths.append(asyncio.run(block()))
            lengths.append(asyncio.run(block()))

        lengths: list[int] = []
        thread = threading.Thread(target=elsewhere, args=(lengths,))
        async with fleet:
            thread.start()
            assert await asyncio.gather(*(block() for _ in range(5))) == [2] * 5
            await asyncio.to_thread(thread.join, 30)
            assert (await fleet.generate("ab", max_tokens=2)).retries == 0
        assert lengths == [2, 2]
        assert not fleet._sessions, "a loop's connections outlived its blocks"


async def test_lifecycle_verbs_of_an_attached_fleet_are_refused(tmp_path: Path, base: Path) -> None:
    async with attached(tmp_path, stubs(base, 1)) as fleet:
        for call in (fleet.up(), fleet.down(), fleet.restart(), fleet.scale(2)):
            with pytest.raises(UsageError, match="did not start"):
                await call
        assert (await fleet.urls()).servers.keys() == {"demo-0"}


async def test_a_fleet_is_found_by_its_name_afterwards(
    tmp_path: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    async with attached(tmp_path, stubs(base, 1)) as fleet:
        await fleet.status()
        assert (await Fleet.named("demo").status()).name == "demo"
        assert Fleet.load().name == "demo"
    with pytest.raises(NotFoundError):
        Fleet.named("nobody")
    with pytest.raises(FleetFileError):
        Fleet.load(tmp_path / "absent.yaml")


@pytest.fixture
def copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """The file of a fleet that was started, and a copy of it in another directory."""
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    files = tmp_path / "project" / "fleet.yaml", tmp_path / "copy" / "fleet.yaml"
    for file in files:
        file.parent.mkdir()
        file.write_text("name: demo\nmodel: org/tiny\ndevice: cpu\n")
    remember(select([files[0]], None))
    return files


async def test_up_from_a_copied_directory_takes_over_nobodys_servers(
    copied: tuple[Path, Path],
) -> None:
    row = ProcessRow("demo-0", "server", "running", "t", own_identity(), "h", "127.0.0.1", 8000)
    with FleetState(fleet_paths("demo").database) as state:  # no supervisor is left
        state.save_process(row)
    with pytest.raises(ConflictError, match=f"demo is up already, from {copied[0]}"):
        await Fleet.load(copied[1]).up()


@pytest.mark.parametrize(
    "act",
    [
        lambda fleet: fleet.down(),
        lambda fleet: fleet.pause(),
        lambda fleet: fleet.scale(2),
        lambda fleet: fleet.sync_weights("/step-1"),
        lambda fleet: fleet.status(),
    ],
    ids=["down", "pause", "scale", "sync-weights", "status"],
)
async def test_a_copied_directory_acts_on_nobodys_servers(
    copied: tuple[Path, Path], act: Callable[[Fleet], Awaitable[Any]]
) -> None:
    with fleet_paths("demo").supervisor_lock.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ConflictError, match=f"demo is up already, from {copied[0]}"):
            await act(Fleet.load(copied[1]))
