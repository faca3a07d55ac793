"""What `up` would do, process by process, and that its steps do exactly that."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.core.planner import plan_fleet
from skyctl.fleetfile.schema import FleetConfig
from skyctl.store.processes import ProcessRow
from skyctl.supervisor.reconcile import ChangeKind, Difference, compare, preview, settings_of
from skyctl.supervisor.steps import order_of
from skyctl.supervisor.wire import spec_hash
from tests.unit.supervisor.fleets import fleet_plan, stub_router, stub_server

ARGUMENTS = {
    "max_model_len": (1024, 2048),
    "max-num-seqs": (8, 16),
    "enforce_eager": (True, False),
}


def random_plan(dice: random.Random, ports: dict[str, int]) -> FleetPlan:
    """The plan of a random fleet file; what has a port keeps it."""
    values: dict[str, object] = {
        "name": "fleet",
        "model": dice.choice(["/models/a", "/models/b"]),
        "device": "cuda",
        "replicas": dice.randint(1, 6),
        "gpus": dice.sample(range(8), 8) if dice.random() < 0.2 else list(range(8)),
        "tensor_parallel_size": dice.choice([1, 1, 1, 2]) if dice.random() < 0.1 else 1,
        "args": {n: dice.choice(v) for n, v in ARGUMENTS.items() if dice.random() < 0.3},
        "env": {n: dice.choice("12") for n in ("MODE", "HF_TOKEN") if dice.random() < 0.3},
        "router": {
            "enabled": dice.random() < 0.8,
            "policy": dice.choice(["random", "round_robin"]),
        },
    }
    free = iter(range(20000 + 100 * dice.randint(0, 9), 30000))
    return plan_fleet(
        FleetConfig.model_validate(values),
        Path("/fleet"),
        gpus=list(range(16)),
        next_port=lambda: next(free),
        environ={},
        known_ports=ports,
    )


def rows_of(plan: FleetPlan) -> list[ProcessRow]:
    """The record of a fleet that runs the plan."""
    specs = [(spec.name, spec) for spec in plan.servers]
    specs += [("router", plan.router)] if plan.router else []  # type: ignore[list-item]
    return [
        ProcessRow(
            name, "server", "ready", "", None, spec_hash(spec), "", 1, settings=settings_of(spec)
        )
        for name, spec in specs
    ]


@pytest.mark.parametrize("seed", range(200))
def test_the_plan_shows_what_the_steps_of_up_then_do(seed: int) -> None:
    dice = random.Random(seed)
    before = random_plan(dice, {})
    after = random_plan(dice, {spec.name: spec.port for spec in before.servers})
    router = spec_hash(before.router) if before.router else None
    runs = {spec.name: spec_hash(spec) for spec in before.servers}
    changes = compare(after, runs, router)
    shown = preview(after, changes, rows_of(before))

    specs = {spec.name: spec for spec in after.servers}
    running = {spec.name: spec for spec in before.servers}
    steps = order_of(changes, running, specs, serving=running, parallel=dice.randint(1, 3))
    started, stopped = carry_out(steps, running, specs)
    did = {
        ChangeKind.START: started - stopped,
        ChangeKind.RESTART: started & stopped,
        ChangeKind.STOP: stopped - started,
        ChangeKind.KEEP: running.keys() & specs.keys() - started - stopped,
    }
    servers = [process for process in shown.processes if process.name != "router"]
    assert {k: {p.name for p in servers if p.kind is k} for k in ChangeKind} == did
    assert {n: spec_hash(spec) for n, spec in running.items()} == {
        n: spec_hash(spec) for n, spec in specs.items()
    }
    for process in servers:
        if process.kind is ChangeKind.RESTART:
            old = settings_of(next(s for s in before.servers if s.name == process.name))
            new = settings_of(specs[process.name])
            differing = {n for n in old.keys() | new.keys() if old.get(n) != new.get(n)}
            assert {d.setting for d in process.differences} == differing != set()


def carry_out(
    order: object, running: dict[str, ServerSpec], specs: dict[str, ServerSpec]
) -> tuple[set[str], set[str]]:
    """Take the steps on `running`; what was started and what stopped."""
    started: set[str] = set()
    stopped: set[str] = set()

    def take(stop: tuple[str, ...], start: tuple[str, ...]) -> None:
        for name in stop:
            del running[name]
        running.update({name: specs[name] for name in start})
        stopped.update(stop)
        started.update(start)
        ports = [spec.port for spec in running.values()]
        gpus = [gpu for spec in running.values() for gpu in spec.gpus]
        assert len(ports) == len(set(ports)) and len(gpus) == len(set(gpus))

    take((), order.first)  # type: ignore[attr-defined]
    for step in order.steps:  # type: ignore[attr-defined]
        take(step.stop, step.start)
    take(order.last, ())  # type: ignore[attr-defined]
    return started, stopped


def test_a_secret_shows_that_it_differs_and_not_its_value() -> None:
    a = stub_server("a", HF_TOKEN="hunter2")
    other = replace(a, env={**a.env, "HF_TOKEN": "hunter3"})
    plan = fleet_plan([other])
    rows = rows_of(fleet_plan([a]))
    shown = preview(plan, compare(plan, {"a": spec_hash(a)}, None), rows)
    (difference,) = shown.processes[0].differences
    assert difference.setting == "HF_TOKEN" and difference.before != difference.after
    assert "hunter" not in repr(shown) + repr(rows)


def test_the_same_arguments_in_another_order_are_named_as_such() -> None:
    a = replace(stub_server("a"), argv=("x", "--one", "1", "--two"))
    other = replace(a, argv=("x", "--two", "--one", "1"))
    plan = fleet_plan([other])
    shown = preview(plan, compare(plan, {"a": spec_hash(a)}, None), rows_of(fleet_plan([a])))
    assert shown.processes[0].differences == (Difference("order of arguments", None, None),)


def test_fronts_start_restart_stop_and_stay_as_servers_do() -> None:
    a, router = stub_server("a"), stub_router()
    kinds = {}
    for planned in (router, stub_router(), None):
        for runs in (router, None):
            plan = fleet_plan([a], planned)
            digest = spec_hash(runs) if runs else None
            shown = preview(plan, compare(plan, {"a": spec_hash(a)}, digest), [])
            shown_kinds = [p.kind for p in shown.processes if p.name == "router"]
            kinds[planned is router, planned is None, runs is None] = [str(k) for k in shown_kinds]
    assert kinds == {
        (True, False, False): ["keep"],
        (True, False, True): ["start"],
        (False, False, False): ["restart"],
        (False, False, True): ["start"],
        (False, True, False): ["stop"],
        (False, True, True): [],
    }
