"""Back to the version before."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.errors import NotFoundError, WeightsGone
from skyctl.push.request import PushObserver, PushRequest
from skyctl.push.source import full_version, rollback
from skyctl.push.transaction import push
from skyctl.store.journal import PushRecord
from tests.unit.push.fleets import Stubs


def pushed(version: str, *, ok: bool = True) -> PushRecord:
    return PushRecord(
        "push-1",
        0.0,
        ok,
        version,
        f"runs/{version}",
        f"digest {version}",
        {"draft": f"drafts/{version}", "draft_digest": f"draft {version}"},
    )


def test_the_version_before_the_current_one_is_taken_and_failed_pushes_are_passed_over() -> None:
    pushes = [pushed("3", ok=False), pushed("2"), pushed("2"), pushed("1")]
    request = rollback(PushRequest("", pause_mode="wait"), pushes)
    assert (request.checkpoint, request.weight_version) == ("runs/1", "1")
    assert (request.expected_digest, request.pause_mode) == ("digest 1", "wait")
    assert (request.draft, request.expected_draft) == ("drafts/1", "draft 1")
    other = rollback(PushRequest("", draft="d"), pushes)
    assert (other.draft, other.expected_draft) == ("d", "")


def test_a_push_that_some_servers_have_made_its_version_the_current_one() -> None:
    rows = [{"ok": True, "version": "3"}, {"ok": False, "version": None}]
    partial = replace(pushed("3", ok=False), result={"version": "3", "servers": rows})
    undone = replace(partial, result={"servers": [{"ok": False, "version": "2"}]})
    assert rollback(PushRequest(""), [partial, pushed("2"), pushed("1")]).weight_version == "2"
    assert rollback(PushRequest(""), [undone, pushed("2"), pushed("1")]).weight_version == "1"


def test_rolled_back_twice_it_is_where_it_was() -> None:
    assert rollback(PushRequest(""), [pushed("1"), pushed("2"), pushed("1")]).weight_version == "2"


@pytest.mark.parametrize(("pushes", "version"), [([pushed("1")], None), ([pushed("2")], "base")])
def test_before_the_first_push_comes_what_servers_are_started_with(
    pushes: list[PushRecord], version: str | None
) -> None:
    back = rollback(PushRequest(""), pushes, version=version, base="/models/a")
    assert (back.checkpoint, back.weight_version) == ("/models/a", "base")
    pushes.insert(0, replace(pushed("base"), checkpoint="/models/a"))
    assert rollback(PushRequest(""), pushes, base="/models/a").weight_version != "base"


@pytest.mark.parametrize("sent", [[], ["2", "1"]])  # nothing; versions that are in no file
def test_a_base_that_is_not_the_version_before_must_be_asked_for(sent: list[str]) -> None:
    pushes = [replace(pushed(version), checkpoint="") for version in sent]
    with pytest.raises(NotFoundError, match="nothing to roll back to"):
        rollback(PushRequest(""), pushes, base="/models/a")
    asked = rollback(PushRequest(""), pushes, version="base", base="/models/a")
    assert asked.checkpoint == "/models/a"


def test_an_empty_word_means_no_version() -> None:
    """As a shell has it whose variable is not set."""
    for versions, words in ((["kept", "a@1"], "kept, a@1"), ([], "none")):
        with pytest.raises(NotFoundError, match="the name of a version is missing") as caught:
            full_version("", versions)
        assert caught.value.hint == f"versions: {words}"
    with pytest.raises(NotFoundError, match="the name of a version is missing"):
        rollback(PushRequest(""), [pushed("2"), pushed("1")], version="")


@pytest.mark.parametrize("pushes", [[], [pushed("1")], [pushed("2", ok=False), pushed("1")]])
def test_without_another_version_it_says_so(pushes: list[PushRecord]) -> None:
    with pytest.raises(NotFoundError, match="nothing to roll back to"):
        rollback(PushRequest(""), pushes)


async def test_a_checkpoint_that_was_written_anew_is_refused_before_anything_is_paused(
    tmp_path: Path,
) -> None:
    stubs = Stubs(tmp_path)
    digest = read_checkpoint(str(stubs.new)).identity_digest
    request = PushRequest(str(stubs.new), weight_version="1", expected_digest=digest)
    async with stubs.client() as client:
        result = await push(request, stubs.fleet, client=client, observer=PushObserver())
        assert all(server.ok for server in result.servers)
        shard = next(stubs.new.glob("*.safetensors"))
        os.utime(shard, ns=(1, 1))
        with pytest.raises(WeightsGone, match="overwritten since it was pushed as 1"):
            await push(request, stubs.fleet, client=client, observer=PushObserver())
    assert not any(engine.paused for engine in stubs.engines)
