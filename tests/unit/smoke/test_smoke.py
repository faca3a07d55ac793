"""The runner: what happens around steps that pass, fail, hang, break or do not apply."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from skyctl.core.registry import FleetRef
from skyctl.core.results import WeightsState
from skyctl.errors import ConflictError, SkyctlError, UsageError
from skyctl.fleetfile.schema import FleetConfig
from skyctl.smoke import smoke
from skyctl.smoke.steps import (
    FleetUnderTest,
    Skipped,
    SmokeOptions,
    Step,
    push_base,
    push_other,
    steps_for,
    weights_now,
)
from skyctl.store.fleet_weights import FleetWeights
from skyctl.store.identity import own_identity
from skyctl.store.paths import FleetPaths
from skyctl.store.processes import ProcessRow
from skyctl.store.state import FleetState, ServerRow


@pytest.fixture
def ref(tmp_path: Path) -> FleetRef:
    paths = FleetPaths(tmp_path / "home", "tiny").prepare()
    paths.log("tiny-0").write_text("first\nlast\n")
    paths.log("router").write_text("routing\n")
    config = FleetConfig.model_validate({"name": "tiny", "model": "m"})
    return FleetRef("tiny", paths, config, tmp_path, None)


def step(
    name: str, done: list[str], does: Callable[[], Awaitable[None]] | Exception | None = None
) -> Step:
    async def run(run: FleetUnderTest) -> str:
        done.append(name)
        if isinstance(does, Exception):
            raise does
        if does is not None:
            await does()
        return f"{name} done"

    return Step(name, run)


async def test_every_step_runs_in_order_and_then_the_last(ref: FleetRef) -> None:
    done: list[str] = []
    steps = [step("a", done), step("b", done)]
    report = await smoke(ref, SmokeOptions(), steps=steps, last=step("down", done))
    assert report.passed and done == ["a", "b", "down"]
    assert [s.detail for s in report.steps] == ["a done", "b done", "down done"]
    assert report.logs == {}


async def test_after_a_failure_only_the_last_step_is_tried(ref: FleetRef, tmp_path: Path) -> None:
    done: list[str] = []
    error = SkyctlError("no answer", hint="look")
    steps = [step("a", done, error), step("b", done)]
    options = SmokeOptions(keep_logs=tmp_path / "kept")
    report = await smoke(ref, options, steps=steps, last=step("down", done))
    assert done == ["a", "down"]
    assert [(s.name, s.status.value) for s in report.steps] == [
        ("a", "failed"),
        ("b", "skipped"),
        ("down", "passed"),
    ]
    assert (report.steps[0].detail, report.steps[0].hint) == ("no answer", "look")
    assert report.logs == {"router": ["routing"], "tiny-0": ["first", "last"]}
    kept = {path.name for path in (tmp_path / "kept").iterdir()}
    assert kept == {"router.log", "tiny-0.log", "status.json"}


async def test_a_step_that_does_not_apply_is_skipped_and_the_rest_go_on(ref: FleetRef) -> None:
    done: list[str] = []
    steps = [step("a", done, Skipped("not here")), step("b", done)]
    report = await smoke(ref, SmokeOptions(), steps=steps, last=step("down", done))
    assert report.passed and done == ["a", "b", "down"]
    assert report.steps[0].detail == "not here"


async def test_a_bug_of_ours_is_an_error_and_not_a_failure(ref: FleetRef) -> None:
    done: list[str] = []
    report = await smoke(
        ref, SmokeOptions(), steps=[step("a", done, KeyError("x"))], last=step("down", done)
    )
    assert report.steps[0].status == "error" and "KeyError: 'x'" in report.steps[0].detail
    assert done == ["a", "down"]


async def test_all_steps_share_one_deadline_and_the_last_has_its_own(ref: FleetRef) -> None:
    done: list[str] = []

    async def hang() -> None:
        await asyncio.Event().wait()

    steps = [step("a", done, hang), step("b", done)]
    options = SmokeOptions(timeout_s=0.05)
    report = await smoke(ref, options, steps=steps, last=step("down", done))
    assert "not done after" in report.steps[0].detail
    assert done == ["a", "down"]


async def test_a_cancelled_run_takes_the_fleet_down_all_the_same(ref: FleetRef) -> None:
    done: list[str] = []
    hanging = asyncio.Event()

    async def hang() -> None:
        hanging.set()
        await asyncio.Event().wait()

    steps = [step("a", done, hang)]
    task = asyncio.create_task(smoke(ref, SmokeOptions(), steps=steps, last=step("down", done)))
    await hanging.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert done == ["a", "down"]


async def test_a_reused_fleet_is_left_up(ref: FleetRef) -> None:
    done: list[str] = []
    options = SmokeOptions(reuse=True)
    await smoke(ref, options, steps=[step("a", done)], last=step("down", done))
    assert done == ["a"]


async def test_weights_that_cannot_be_pushed_back_are_not_replaced(
    ref: FleetRef, tmp_path: Path
) -> None:
    run = FleetUnderTest(ref, SmokeOptions(checkpoint="b", reuse=True))
    for weights in (None, FleetWeights("step-9", str(tmp_path / "gone"))):
        run.weights = weights
        for push in (push_base, push_other):
            with pytest.raises(Skipped):
                await push(run)


def test_the_weights_of_servers_are_what_is_recorded_of_all_of_them() -> None:
    def now(*rows: ServerRow, base: str | None = "m") -> FleetWeights | None:
        return weights_now(WeightsState(rows, (), base, "d" if base else None))

    pushed = ServerRow("a", weight_version="step-1", checkpoint="c", checkpoint_digest="e")
    assert now(ServerRow("a"), ServerRow("b")) == FleetWeights("base", "m", "d")
    assert now(pushed) == FleetWeights("step-1", "c", "e")
    assert now(ServerRow("a"), base=None) is None
    assert now(ServerRow("a"), pushed) is None
    assert now(ServerRow("a", weight_version="live")) is None, "a trainer's memory had them"


async def test_servers_that_run_on_without_a_supervisor_are_not_taken_down(ref: FleetRef) -> None:
    done: list[str] = []
    row = ProcessRow("a", "server", "running", "t", own_identity(), "h", "127.0.0.1", 8000)
    with FleetState(ref.paths.database) as state:
        state.save_process(row)
    with pytest.raises(ConflictError, match="running"):
        await smoke(ref, SmokeOptions(), steps=[step("a", done)], last=step("down", done))
    assert done == []


async def test_an_attached_fleet_can_only_be_reused(tmp_path: Path) -> None:
    config = FleetConfig.model_validate({"name": "far", "servers": ["http://h:1"]})
    ref = FleetRef("far", FleetPaths(tmp_path, "far"), config, tmp_path, None)
    with pytest.raises(UsageError, match="attached"):
        await smoke(ref, SmokeOptions(), steps=[])


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (SmokeOptions(), "up generate pause-resume push-same verify"),
        (SmokeOptions(reuse=True), "generate pause-resume push-same verify"),
        (
            SmokeOptions(checkpoint="b"),
            "up generate pause-resume push-same push-other push-back verify",
        ),
    ],
)
def test_the_options_decide_about_the_steps(options: SmokeOptions, expected: str) -> None:
    assert " ".join(step.name for step in steps_for(options)) == expected
