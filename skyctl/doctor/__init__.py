"""Checks of the machine, the fleet file and the running fleet, each with its fix.

Here facts are gathered (those of the machine in `machine.py`) and every check is run, which takes
seconds and changes nothing. The checks in `machine.py`, `fleet_file.py` and `running.py` are pure.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from skyctl import engines
from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.core.check import check_plan
from skyctl.core.findings import Severity
from skyctl.core.registry import supervisor_running
from skyctl.core.status import Health
from skyctl.core.urls import access, api_key, control_token
from skyctl.doctor.check_line import CheckLine
from skyctl.doctor.fleet_file import FilePlan, ModelFacts, check_fleet_file
from skyctl.doctor.machine import MachineFacts, Needs, check_machine, gather
from skyctl.doctor.running import RunningFacts, check_running
from skyctl.errors import ServerError, SkyctlError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import fan_out
from skyctl.http.target import ServerTarget
from skyctl.service import connect
from skyctl.service.drift import find_drift
from skyctl.states import ReplicaState
from skyctl.store.paths import state_root

if TYPE_CHECKING:
    from skyctl.core.plan import FleetPlan
    from skyctl.core.registry import FleetRef
    from skyctl.core.status import FleetStatus

ASK_TIMEOUT_S = 5.0


def examine_machine() -> list[CheckLine]:
    """The machine alone, if there is no fleet."""
    return check_machine(gather(None, state_root()), Needs())


async def examine(ref: FleetRef, *, verify: bool = False) -> list[CheckLine]:
    """Machine, fleet file and running fleet. `verify` has every server digest its weights now."""
    if ref.config.attached:
        return await _examine_running(ref, None, verify)
    from skyctl.core.planning import planned
    from skyctl.service.supervised import SupervisedFleet

    async with SupervisedFleet(ref) as fleet:
        ports, pins = await fleet.kept()
    plan: FleetPlan | None = None
    refused: list[CheckLine] = []
    try:
        plan = await asyncio.to_thread(planned, ref.config, ref.base_dir, ports, pins=pins)
    except SkyctlError as error:
        refused = [CheckLine("fleet-file", "plan", Severity.ERROR, error.message, error.hint)]
    python = plan.python if plan is not None else ref.config.python
    facts = await asyncio.to_thread(gather, python, state_root())
    findings = check_machine(facts, _needs(ref, plan)) + refused
    if plan is not None:
        findings += await asyncio.to_thread(_examine_file, ref, plan, facts, ports)
    return findings + await _examine_running(ref, plan, verify)


def _needs(ref: FleetRef, plan: FleetPlan | None) -> Needs:
    if plan is None:
        return Needs(cuda=ref.config.device == "cuda")
    return Needs(
        cuda=plan.device == "cuda",
        router=plan.router is not None,
        largest_world_size=max(server.world_size for server in plan.servers),
        hosts=tuple(sorted(_hosts(plan))),
    )


def _hosts(plan: FleetPlan) -> set[str]:
    """Where clients reach the fleet, as far as that is known before its start."""
    urls = [spec.url for spec in (*plan.servers, plan.router, plan.tinker) if spec is not None]
    return {host for url in urls if (host := urlsplit(url).hostname)}


def _examine_file(
    ref: FleetRef, plan: FleetPlan, facts: MachineFacts, ports: Mapping[str, int]
) -> list[CheckLine]:
    running = bool(ports) or supervisor_running(ref.paths)
    problems = check_plan(plan, own_ports=ports.values(), source=ref.source)
    return check_fleet_file(FilePlan(plan, problems, _model(plan.base), running), facts)


def _model(path: str) -> ModelFacts | None:
    """The model's sizes; None for one that is not on this disk (its own check reports that)."""
    if not Path(path).is_dir():
        return None
    try:
        checkpoint = read_checkpoint(path)
    except SkyctlError:
        return None  # not safetensors: the engine may load it all the same
    largest = max(checkpoint.tensors, key=lambda tensor: tensor.nbytes)
    return ModelFacts(checkpoint.total_bytes, largest.name, largest.nbytes)


async def _examine_running(ref: FleetRef, plan: FleetPlan | None, verify: bool) -> list[CheckLine]:
    async with connect(ref) as fleet:
        status = await fleet.status()
        if status.health == Health.DOWN and not status.replicas:
            return check_running(RunningFacts(status))
        weights, keys = await fleet.weights(), access(ref.config, ref.paths)
        up = [r for r in status.replicas if r.state.answers]
        engine = ref.config.engine
        token, key = control_token(keys), api_key(keys)
        targets = [ServerTarget(r.name, r.url, token, engine, key) for r in up]
        async with ControlClient() as client:
            vllm, workers, asks_token = await asyncio.gather(
                _ask_versions(client, targets),
                _workers(client, engine, status),
                _ask_token(client, targets),
            )
        verification: Mapping[str, Any] | None = None
        if verify:
            verification = (await fleet.verify_weights()).to_json()
        drift = []
        if plan is not None or ref.config.attached:
            drift = await find_drift(ref, fleet, status)
        return check_running(
            RunningFacts(
                status,
                drift,
                weights.servers,
                weights.pushes,
                vllm,
                workers,
                verification,
                asks_token,
                engine,
            )
        )


async def _ask_versions(client: ControlClient, targets: list[ServerTarget]) -> dict[str, str]:
    """The engine's version of each server that answers."""

    async def ask(target: ServerTarget) -> str:
        return await engines.server(client, target, timeout_s=ASK_TIMEOUT_S).version()

    outcomes = await fan_out(targets, ask, timeout_s=ASK_TIMEOUT_S)
    return {o.server: o.value for o in outcomes if o.value is not None}


async def _ask_token(client: ControlClient, targets: list[ServerTarget]) -> dict[str, bool]:
    """Whether a control route refuses requests without a token, for each server that answers."""

    async def refuses(target: ServerTarget) -> bool | None:
        keyless = replace(target, api_key=None, inference_key=None)
        stranger = engines.server(client, keyless, timeout_s=ASK_TIMEOUT_S)
        try:
            await stranger.is_paused()
        except ServerError as error:
            return True if error.status in (401, 403) else None
        return False

    outcomes = await fan_out(targets, refuses, timeout_s=ASK_TIMEOUT_S)
    return {o.server: o.value for o in outcomes if o.value is not None}


async def _workers(client: ControlClient, engine: str, status: FleetStatus) -> list[str] | None:
    if status.router is None or status.router.state is not ReplicaState.READY:
        return None
    try:
        router = engines.router(client, engine, status.router.url, timeout_s=ASK_TIMEOUT_S)
        return list(map(engines.routing(engine).worker, await router.workers()))
    except SkyctlError:
        return None  # the router's state has its own check
