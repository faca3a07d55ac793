"""Tables in narrow terminals: the long text gives way, names and states never do."""

from __future__ import annotations

import io
from dataclasses import replace

import pytest
from rich.console import Console

from skyctl import output
from skyctl.cli import weights
from skyctl.cli.fleet_view import OperationView, status_view
from skyctl.core.status import (
    FleetStatus,
    Health,
    ReplicaStatus,
    RouterStatus,
    TinkerStatus,
    TrainerRank,
)
from skyctl.states import ReplicaState
from skyctl.store.state import ServerRow

NAMES = ("policy-qwen3-0", "policy-qwen3-1")
VERSION = "step-2000@1f2e3d4c"
DETAIL = "GET http://127.0.0.1:8000/is_paused answered 404: it has no such route; vLLM needs a mode"


def shown(*views: object, width: int, terminal: bool = True) -> list[str]:
    written = io.StringIO()
    console = Console(
        file=written, width=width, force_terminal=terminal, color_system=None, soft_wrap=True
    )
    console.print(*views)
    return [line.rstrip() for line in written.getvalue().splitlines()]


def status() -> FleetStatus:
    replicas = tuple(
        ReplicaStatus(
            name,
            ReplicaState(state),
            "http://127.0.0.1:8000",
            routed=state == "ready",
            running=3,
            waiting=0,
            kv_usage=0.2,
            pid=123456,
            port=8000,
            weight_version=VERSION,
            uptime_s=86400.0,
            rss_bytes=2**34,
        )
        for name, state in zip(NAMES, ("ready", "quarantined"), strict=True)
    )
    router = RouterStatus(ReplicaState.READY, "http://127.0.0.1:8100", workers=1)
    return FleetStatus("policy", Health.DEGRADED, replicas, router, weight_version=VERSION)


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_status_has_whole_names_states_and_versions(width: int) -> None:
    table = shown(status_view(status()), width=width)[2:]
    assert max(map(len, table)) <= width
    for line, name, state in zip(table[1:], NAMES, ("ready", "quarantined"), strict=False):
        assert line.startswith(name) and state in line.split() and VERSION in line
    assert ("MEMORY" in table[0]) == (width == 120)


def test_a_status_says_what_is_trained_where_there_is_a_training_process() -> None:
    api = TinkerStatus(ReplicaState.READY, "http://127.0.0.1:8200", models=1)
    without = shown(status_view(replace(status(), tinker=api)), width=120)
    idle = replace(api, ranks=(TrainerRank(77, "cuda:7"),))
    lines = shown(status_view(replace(status(), tinker=idle)), width=120)
    assert lines == [*without, "", "tinker trains in process 77 on cuda:7: 1 model"]
    busy = replace(idle, models=3, operation="optim_step", operation_s=75.0)
    *_, line = shown(status_view(replace(status(), tinker=busy)), width=120)
    assert line == "tinker trains in process 77 on cuda:7: 3 models, optim_step for 1m15s"
    two = replace(idle, ranks=(*idle.ranks, TrainerRank(78, "cuda:6")))
    *_, line = shown(status_view(replace(status(), tinker=two)), width=120)
    assert line == "tinker trains in processes 77 on cuda:7, 78 on cuda:6: 1 model"


@pytest.mark.parametrize("width", [60, 80, 120])
def test_a_detail_is_folded_and_nothing_of_it_is_lost(width: int) -> None:
    row = {"server": NAMES[0], "status": "failed", "elapsed_ms": 12.0, "detail": DETAIL}
    lines = shown(output.outcome_table([row]), width=width)
    assert max(map(len, lines)) <= width
    assert lines[1].startswith(f"{NAMES[0]}  failed  12  GET")
    assert " ".join(" ".join(lines[1:]).split()).endswith(DETAIL.split(maxsplit=1)[1])


def test_a_pipe_gets_each_row_on_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    row = {"server": NAMES[0], "status": "failed", "elapsed_ms": 12.0, "detail": DETAIL * 5}
    assert shown(output.outcome_table([row]), width=80, terminal=False)[1].endswith(DETAIL * 5)


def test_only_a_server_in_quarantine_has_a_text_behind_its_checkpoint() -> None:
    sound = ServerRow(NAMES[0], weight_version="v1", weights_digest="0f" * 16, checkpoint="/b")
    lines = shown(weights.servers_table([sound]), width=120)
    assert lines[1] == f"{NAMES[0]}  v1       0f0f0f0f0f0f  /b"
    lines = shown(weights.servers_table([sound, replace(sound, quarantine=DETAIL)]), width=200)
    assert lines[1].endswith("/b") and lines[2].endswith(f"/b          quarantined: {DETAIL}")


def test_the_progress_of_a_start_cuts_the_log_line_and_not_the_name() -> None:
    view = OperationView("starting")
    view.drawing = True
    replica = ReplicaStatus(NAMES[0], ReplicaState.STARTING, "http://h:1", log_line=DETAIL)
    view.see(FleetStatus("f", Health.STARTING, (replica,), None))
    line = shown(view.render(), width=50)[1]
    assert line.startswith(f"  {NAMES[0]}  starting") and line.endswith("…") and len(line) <= 50
