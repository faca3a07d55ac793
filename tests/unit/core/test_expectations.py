"""What a push is told of its servers' weights, and what is kept of what it learned."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.core.expectations import arguments_of, files_of, informed, other_weights, push_fleet
from skyctl.core.jobs import record_failure, record_result
from skyctl.core.plan import ServerSpec
from skyctl.errors import PushError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.http.target import ServerTarget
from skyctl.push.request import (
    PushFleet,
    PushRequest,
    PushResult,
    PushServer,
    RecordedState,
    ServerPush,
)
from skyctl.store.base_weights import BaseFiles, BaseWeights
from skyctl.store.expected import BrokenReload, ExpectedDigest, Learned, by_files
from skyctl.store.in_doubt import InDoubt, in_doubt, put_in_doubt
from skyctl.store.journal import JobEvent
from skyctl.store.state import FleetState
from tests.unit.push.checkpoints import write_checkpoint

DIGEST = ExpectedDigest("bytes:1", "0.32.0", "ab:tp2")


@pytest.fixture
def state(tmp_path: Path) -> Iterator[FleetState]:
    with FleetState(tmp_path / "fleet" / "state.sqlite") as state:
        yield state


def fleet(*names: str) -> PushFleet:
    targets = [ServerTarget(name, "http://127.0.0.1:1") for name in names]
    return PushFleet("demo", tuple(PushServer(target) for target in targets))


def result() -> PushResult:
    servers = [ServerPush("a", True, "ready", "v1", "ab:tp2")]
    learned = Learned([DIGEST]).to_json()
    return PushResult("v1", "/c", "id", "shm", 1, 1, 0.1, 0.1, 0.1, {}, servers, learned=learned)


def test_the_next_push_knows_what_the_last_one_learned(state: FleetState) -> None:
    job = state.journal.begin("push", PushRequest("/c").to_json())
    record_result(state, job.id, PushRequest("/c"), result())
    told = informed(fleet("a", "b"), state)
    assert told.expected.digests == (DIGEST,)
    assert [server.recorded.weights_digest for server in told.servers] == ["ab:tp2", ""]


def test_a_push_that_failed_has_learned_too(state: FleetState) -> None:
    job = state.journal.begin("push", PushRequest("/c").to_json())
    broken = BrokenReload("layout", "0.32.0", "moe")
    details = {"servers": [], "learned": Learned([DIGEST], broken).to_json()}
    record_failure(state, job.id, PushRequest("/c"), PushError("no", details=details))
    known = informed(fleet("a"), state).expected
    assert (known.digests, known.broken) == ((DIGEST,), (broken,))


def test_of_a_push_that_failed_on_some_servers_the_others_files_are_on_record(
    state: FleetState,
) -> None:
    job = state.journal.begin("push", PushRequest("/c").to_json())
    state.update_server("a", weight_version="v1", checkpoint_digest="of an earlier push")
    failed = ServerPush("b", False, "failed", None, "")
    part = replace(result(), servers=[*result().servers, failed])
    record_failure(state, job.id, PushRequest("/c"), PushError("no", details=part.to_json()))
    row, weights = state.server("a"), state.weights()
    assert (row.checkpoint, row.checkpoint_digest) == ("/c", "id")
    assert (weights.version, weights.checkpoint_digest) == ("v1", "id")


def test_a_push_that_failed_under_a_label_in_use_leaves_the_records_of_that_label(
    state: FleetState,
) -> None:
    job = state.journal.begin("push", PushRequest("/other").to_json())
    state.update_server("a", weight_version="v1", weights_digest="x", checkpoint="/c")
    held = replace(result(), servers=[ServerPush("a", False, "ready", "v1", "other")])
    record_failure(state, job.id, PushRequest("/other"), PushError("no", details=held.to_json()))
    assert (state.server("a").weights_digest, state.server("a").checkpoint) == ("x", "/c")
    part = replace(result(), checkpoint="")
    record_failure(state, job.id, PushRequest(""), PushError("no", details=part.to_json()))
    assert state.server("a").checkpoint is None


@pytest.mark.parametrize("end", ["paused", "ready"])
def test_a_server_in_doubt_is_cleared_by_a_push_that_failed_once_that_has_released_it(
    state: FleetState, end: str
) -> None:
    put_in_doubt(state, {"a": InDoubt("a", "push-0", "start", False, True, version="v1")})
    job = state.journal.begin("push", PushRequest("/c").to_json())
    states = [JobEvent.server("a", each) for each in ("pausing", "paused", end)]
    state.journal.add_events(job.id, JobEvent.stage("pause"), *states, JobEvent.stage("init"))
    row = ServerPush("a", True, end, "v0", "").to_json()
    record_failure(state, job.id, PushRequest("/c"), PushError("no", details={"servers": [row]}))
    left = in_doubt(state)
    assert left.keys() == ({"a"} if end == "paused" else set())
    assert [(one.stage, one.version) for one in left.values()] == [("start", "v1")] * len(left)


def recorded_of_a(state: FleetState) -> RecordedState:
    """What a push is told of server `a`."""
    given = PushServer(ServerTarget("a", "http://127.0.0.1:1"))
    config = FleetConfig(name="demo", model="x")
    [server] = push_fleet("demo", config, [given], state, "python").servers
    return server.recorded


def test_a_push_resumes_what_an_earlier_one_froze_unless_that_was_asked_for_since(
    state: FleetState,
) -> None:
    put_in_doubt(state, {"a": InDoubt("a", "push-1", "pause", False, True)})
    recorded = recorded_of_a(state)
    assert recorded.in_doubt and recorded.thaw
    state.update_server("a", sleep_level=1)  # which the push asks it about
    recorded = recorded_of_a(state)
    assert recorded.thaw and recorded.sleep_level == 1
    state.update_server("a", paused=True)
    recorded = recorded_of_a(state)
    assert recorded.in_doubt and not recorded.thaw


def test_a_server_in_which_a_session_was_found_holds_what_its_digest_says(
    state: FleetState,
) -> None:
    """Another push does not take its weights for whole."""
    put_in_doubt(state, {"a": InDoubt("a", "push-1", "recover", False, True)})
    assert recorded_of_a(state).half_updated


def test_a_launch_counts_until_something_is_pushed(state: FleetState) -> None:
    state.expected.launched("a", "files:1")
    assert informed(fleet("a"), state).servers[0].recorded.launched_with == "files:1"
    state.update_server("a", weight_version="v1")
    assert informed(fleet("a"), state).servers[0].recorded.launched_with == ""


def spec(*argv: str) -> ServerSpec:
    return ServerSpec("a", ("python", "-m", "vllm", *argv), {}, "127.0.0.1", 8000)


def test_a_models_files_are_named_by_their_bytes_and_settings(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path / "c")
    before = files_of(str(path))
    assert before.shards == by_files(read_checkpoint(str(path)).identity_digest)
    assert files_of("org/not-here") == BaseFiles() == files_of("")
    (path / "README.md").write_text("not a setting")
    assert files_of(str(path)) == before == before.unless_changed(before)
    (path / "chat_template.jinja").write_text("{{ messages }}")
    after = files_of(str(path))
    assert after.shards == before.shards and after.settings != before.settings
    assert after.unless_changed(before) == BaseFiles(before.shards)
    write_checkpoint(tmp_path / "c", {})
    assert files_of(str(path)).shards != before.shards


FILES = BaseFiles("files:1", "settings")
BASE = BaseWeights(FILES, {"0.32 tp1": "d1"})


@pytest.mark.parametrize(
    ("base", "launched", "place", "digest", "problem"),
    [
        (BASE, FILES, "0.32 tp1", "d1", ""),
        (BASE, FILES, "0.32 tp1", "d2", "holds other weights"),
        (BASE, BaseFiles("files:2"), "0.32 tp1", "d1", ""),  # the same bytes in other files
        (BASE, BaseFiles("files:2"), "0.32 tp2", "d2", "was overwritten"),
        (BASE, BaseFiles("files:2"), "0.33 tp1", "d1", ""),  # as another engine loads them
        (BASE, FILES, "0.32 tp2", "d2", ""),  # the first of its arrangement
        (BASE, FILES, "", "", ""),  # it cannot say
        (BASE, BaseFiles(), "", "", "was overwritten"),
        (BASE, None, "", "", "cannot be compared"),
        (BaseWeights(), BaseFiles(), "0.32 tp1", "d1", ""),
        (BaseWeights(), BaseFiles(), "", "", ""),
    ],
)
def test_digests_decide_and_files_only_where_there_are_not_two(
    base: BaseWeights, launched: BaseFiles | None, place: str, digest: str, problem: str
) -> None:
    answer = other_weights(base, launched, place, digest)
    assert problem in answer and bool(problem) == bool(answer)


@pytest.mark.parametrize(
    ("base", "launched", "problem"),
    [
        (BASE, FILES, ""),  # by its files it is the same
        (BASE, None, "could not be read (no answer)"),
        (BaseWeights(), BaseFiles(), "could not be read (no answer)"),  # the first of its fleet
    ],
)
def test_a_server_whose_weights_could_not_be_read_serves_only_by_its_files(
    base: BaseWeights, launched: BaseFiles | None, problem: str
) -> None:
    answer = other_weights(base, launched, "", "", "no answer")
    assert problem in answer and bool(problem) == bool(answer)


def test_servers_that_differ_in_their_port_alone_have_the_same_arguments() -> None:
    one = spec("--model", "m", "--host", "127.0.0.1", "--port", "1")
    other = spec("--model", "m", "--host", "127.0.0.1", "--port", "2")
    assert arguments_of(one) == arguments_of(other)
    assert arguments_of(one) != arguments_of(spec("--model", "m", "--enable-lora"))
