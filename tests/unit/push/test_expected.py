"""Weights that came to a digest once come to it again: in every push, part of a roll and launch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.errors import PreflightError, PushError
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushRequest, PushServer
from skyctl.push.rolling import push_rolling
from skyctl.push.servers import Before
from skyctl.push.transaction import push
from skyctl.push.verify import expected_of
from skyctl.store.expected import Expectations, ExpectedDigest, by_files
from skyctl.store.state import FleetState
from tests.unit.push.checkpoints import rewrite_unseen, tiny_tensors, write_checkpoint
from tests.unit.push.deliveries import site
from tests.unit.push.fleets import Recorder, Rotation, Stubs, pushed


@pytest.fixture
def stubs(tmp_path: Path) -> Stubs:
    return Stubs(tmp_path, count=1)


def learn(stubs: Stubs, outcome: dict[str, Any] | None) -> None:
    """As the fleet's state does between two pushes."""
    assert outcome is not None
    expected = stubs.fleet.expected.with_learned(outcome["digests"])
    stubs.fleet = replace(stubs.fleet, expected=expected)


def corrupt(stubs: Stubs, number: int = 0) -> None:
    stubs.engines[number].weigh = lambda updates: "something else"


async def test_a_single_server_is_compared_with_an_earlier_push(stubs: Stubs) -> None:
    first = await pushed(stubs)
    learn(stubs, first.learned)
    again = await pushed(stubs)
    assert again.servers[0].weights_digest == first.servers[0].weights_digest
    corrupt(stubs)
    with pytest.raises(PushError) as caught:
        await pushed(stubs)
    [row] = caught.value.details["servers"]
    assert row["state"] == "quarantined" and stubs.engines[0].paused
    assert first.servers[0].weights_digest in row["detail"]
    assert "digest" in row["detail"] and "expected" in row["detail"]


async def test_the_same_bytes_in_other_files_are_the_same_content(
    stubs: Stubs, tmp_path: Path
) -> None:
    learn(stubs, (await pushed(stubs)).learned)
    corrupt(stubs)
    copy = write_checkpoint(tmp_path / "copy", tiny_tensors(50))
    with pytest.raises(PushError, match="when it was pushed before"):
        await pushed(stubs, checkpoint=str(copy))


async def test_files_are_known_where_nobody_computes_the_bytes(stubs: Stubs) -> None:
    result = await pushed(stubs, transport="disk")
    assert result.learned is not None
    identity = read_checkpoint(str(stubs.new)).identity_digest
    assert [one["content"] for one in result.learned["digests"]] == [by_files(identity)]


async def test_other_bytes_in_files_that_look_untouched_are_other_weights(
    stubs: Stubs, tmp_path: Path
) -> None:
    step = write_checkpoint(tmp_path / "step", tiny_tensors(50))
    learn(stubs, (await pushed(stubs, checkpoint=str(step))).learned)
    corrupt(stubs)
    rewrite_unseen(step, tiny_tensors(70))
    assert (await pushed(stubs, checkpoint=str(step))).servers[0].ok


def test_files_bind_only_where_the_bytes_are_not_known() -> None:
    def expected(origin: Literal["push", "launch"], *names: str) -> bool:
        known = [ExpectedDigest("files:1", "", "d", origin)]
        return expected_of(site(None), known, names) is not None

    assert expected("push", "files:1")
    assert not expected("push", "bytes:2", "files:1")
    assert expected("launch", "bytes:2", "files:1")  # nobody has read what was launched


@pytest.mark.parametrize("other", ["content", "engine", "arrangement"])
async def test_other_contents_engines_and_arrangements_are_not_compared(
    stubs: Stubs, tmp_path: Path, other: str
) -> None:
    learn(stubs, (await pushed(stubs)).learned)
    corrupt(stubs)
    path = stubs.new
    if other == "content":
        path = write_checkpoint(tmp_path / "third", tiny_tensors(70))
    elif other == "engine":
        stubs.engines[0].version = "0.31.0"
    else:
        stubs.engines[0].arrangement = "tp2"
    assert (await pushed(stubs, checkpoint=str(path))).servers[0].ok


async def test_nothing_is_learned_from_servers_that_disagree(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, count=3)
    corrupt(stubs, 2)
    with pytest.raises(PushError) as caught:
        await pushed(stubs)
    assert caught.value.details["learned"] == {"digests": [], "broken": None}


async def test_nothing_is_learned_without_a_look_at_the_weights(stubs: Stubs) -> None:
    assert (await pushed(stubs, verify=False)).learned == {"digests": [], "broken": None}


async def test_each_part_of_a_roll_is_held_to_the_parts_before(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path, count=3)
    corrupt(stubs, 1)
    request = PushRequest(str(stubs.new), rolling=1, pause_mode="wait")
    async with stubs.client() as client:
        with pytest.raises(PushError, match=r"the roll stopped at demo-1.*when it was pushed befo"):
            await push_rolling(
                request,
                stubs.fleet,
                client=client,
                observer=Recorder(),
                rotation=Rotation(stubs),
            )
    assert stubs.engines[1].paused and not stubs.engines[2].paused
    assert stubs.engines[2].digest == "base"


# --- what vLLM itself loads ------------------------------------------------------------------


def launched(stubs: Stubs, checkpoint: Path) -> None:
    """As servers that were started with the checkpoint."""
    name = by_files(read_checkpoint(str(checkpoint)).identity_digest)
    stubs.record(launched_with=name)


async def test_a_push_of_the_launch_checkpoint_gives_the_digest_of_the_launch(
    stubs: Stubs,
) -> None:
    launched(stubs, stubs.base)
    stubs.engines[0].digest = "what base comes to"
    stubs.engines[0].weigh = lambda updates: "what base comes to"
    result = await pushed(stubs, checkpoint=str(stubs.base))
    assert result.learned is not None and result.learned["broken"] is None
    origins = {one["origin"] for one in result.learned["digests"]}
    assert origins == {"launch", "push"}


async def test_a_reload_that_is_broken_is_named_remembered_and_refused(
    stubs: Stubs, tmp_path: Path
) -> None:
    launched(stubs, stubs.base)
    with pytest.raises(PushError, match="does not reload this model as it loads it") as caught:
        await pushed(stubs, checkpoint=str(stubs.base))
    assert stubs.engines[0].paused
    with FleetState(tmp_path / "state" / "state.sqlite") as state:
        state.expected.learn(caught.value.details["learned"])
        stubs.fleet = replace(stubs.fleet, expected=state.expected.everything())
    assert stubs.fleet.expected.broken[0].model == "base"
    await stubs.engines[0].resume()
    stubs.engines[0].log.clear()
    with pytest.raises(PreflightError, match="does not reload this model") as refused:
        await pushed(stubs)
    assert "--allow-unproven-reload" in refused.value.hint and stubs.engines[0].log == []
    allowed = await pushed(stubs, allow_unproven_reload=True)
    assert allowed.servers[0].ok
    learn(stubs, allowed.learned)  # a replica that is restarted gets it as well
    assert (await pushed(stubs)).servers[0].ok
    with pytest.raises(PreflightError, match="does not reload this model"):
        await pushed(stubs, checkpoint=str(stubs.base))


async def test_a_launch_is_held_against_the_push_that_goes_back_to_it(stubs: Stubs) -> None:
    launched(stubs, stubs.base)
    learn(stubs, (await pushed(stubs)).learned)
    stubs.record(launched_with="")
    with pytest.raises(PushError, match="when vLLM loaded it"):
        await pushed(stubs, checkpoint=str(stubs.base))


async def test_what_is_not_expected_can_be_allowed_and_is_expected_then(stubs: Stubs) -> None:
    learn(stubs, (await pushed(stubs)).learned)
    corrupt(stubs)
    allowed = await pushed(stubs, allow_unproven_reload=True)
    assert any("expected" in note for note in allowed.notes)
    learn(stubs, allowed.learned)
    assert (await pushed(stubs)).servers[0].ok


@pytest.mark.parametrize("labelled", [True, False])
async def test_weights_that_somebody_else_pushed_are_nobodys_launch(
    stubs: Stubs, labelled: bool
) -> None:
    launched(stubs, stubs.base)
    stubs.engines[0].weight_version = "theirs" if labelled else "default"
    result = await pushed(stubs)
    assert result.learned is not None
    origins = {one["origin"] for one in result.learned["digests"]}
    assert ("launch" in origins) is not labelled


async def test_a_dead_push_left_the_digest_in_its_journal(stubs: Stubs) -> None:
    observer = Recorder()
    async with stubs.client() as client:
        await push(PushRequest(str(stubs.new)), stubs.fleet, client=client, observer=observer)
    name, state, digest = observer.servers[0]
    assert (name, state) == ("demo-0", "weighed") and digest
    assert observer.servers[1][1] == "pausing"


def test_what_is_learned_later_comes_first() -> None:
    row = {"content": "c", "engine": "e", "digest": "old"}
    known = Expectations().with_learned([row]).with_learned([{**row, "digest": "new"}])
    assert [one.digest for one in known.digests] == ["new", "old"]


@pytest.mark.parametrize(("engine", "counts"), [("vllm", "push"), ("sglang", "launch")])
def test_a_push_counts_before_a_launch_where_it_is_compared_with_the_checkpoint(
    engine: str, counts: str
) -> None:
    one = site(None)
    one.given = PushServer(ServerTarget("demo-0", "http://127.0.0.1:1", engine=engine))
    one.before, one.proof.digest = Before(engine="1"), "new:tp1"
    pushed = ExpectedDigest("files:1", "1", "a:tp1", "push")
    launched = ExpectedDigest("files:1", "1", "b:tp1", "launch")
    for known in ([pushed, launched], [launched, pushed]):
        found = expected_of(one, known, ["files:1"])
        assert found is not None and found.origin == counts
    assert expected_of(one, [pushed], ["files:1"]) == pushed
    assert expected_of(one, [launched], ["files:1"]) == launched
