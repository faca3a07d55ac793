"""A round of each benchmark that repeats a fault many times: races, cycles, ejection."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from benchmarks import cycles, eject, races


def test_of_two_racing_pushes_one_wins_and_the_other_is_told_by_whom() -> None:
    result = races.run(1, kinds=("attached",))
    assert result["problems"] == []
    assert result["one_winner"] == 1


def test_cycles_of_up_kill_and_down_leave_no_orphan_and_spare_strangers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))  # so that it is put back at the end
    monkeypatch.setattr(cycles, "KILLS", ("server", "supervisor while servers start"))
    result = cycles.run(2)
    assert result["cycles"] == 2
    assert (result["orphans"], result["foreign_kills"]) == ([], 0)
    assert result["shared_memory_left"] == []


def test_a_decoy_that_is_signalled_is_counted() -> None:
    with cycles.decoys() as strangers:
        process = strangers.identities[0].process()
        assert process is not None
        process.kill()
        process.wait(10)
        assert strangers.killed() == 1


@pytest.mark.real
@pytest.mark.skipif(
    importlib.util.find_spec("vllm_router") is None, reason="vllm-router is not installed"
)
async def test_a_replica_lost_behind_the_real_router_is_ejected_and_fails_no_later_request(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path))
    with eject.stub_fleet(tmp_path, 2) as ref:
        result = await eject.measure(ref, 1, clients=4, warm_s=0.5)
    assert result["ejected_s_worst"] <= 10
    assert result["failed_after_ejection_percent"] <= 1
