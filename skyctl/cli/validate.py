"""`skyctl validate`: check the fleet file, and whether this machine has what it needs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from skyctl import output
from skyctl.cli.fleet_file import FileArgument, chosen_fleet, kept
from skyctl.cli.options import FileOption, FleetOption, JsonOption
from skyctl.errors import SkyctlError
from skyctl.units import count_of

if TYPE_CHECKING:
    from skyctl.core.check import Problem
    from skyctl.core.plan import FleetPlan
    from skyctl.core.registry import FleetRef


def validate(
    path: FileArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    offline: Annotated[
        bool,
        typer.Option(
            "--offline", help="Check the file only, not this machine's ports, GPUs and packages."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Check a fleet file, and whether this machine can run it. Starts nothing.

    Exit code 2: the file is wrong. Exit code 1: the machine lacks something.

    \b
    Examples:
      skyctl validate
      skyctl validate fleets/production.yaml --offline
    """
    ref = chosen_fleet(path, file, fleet)
    warnings, problems, summary = _findings(ref, offline=offline)
    data = {
        "name": ref.name,
        "file": None if ref.file is None else str(ref.file),
        "problems": [problem.to_json() for problem in problems],
        "warnings": warnings,
    }
    for warning in warnings:
        output.warn(warning)
    if not problems:
        output.emit(data, Text(f"fleet {ref.name}: valid, {summary}"))
        return
    lines = Text()
    for problem in problems:
        lines.append("✗ ", "red").append(problem.message + "\n")
        if problem.hint:
            lines.append(f"  {problem.hint}\n", "bright_black")
    lines.rstrip()
    error = SkyctlError(f"fleet {ref.name}: {count_of(len(problems), 'problem')}")
    output.emit(data, lines, error=error)


def _findings(ref: FleetRef, *, offline: bool) -> tuple[list[str], list[Problem], str]:
    """Warnings, problems, and one phrase that says what the fleet is."""
    from skyctl.core.check import check_plan, learn_arguments
    from skyctl.core.planning import at_present, plan_here, plan_offline

    servers = ref.config.servers
    if servers is not None:
        count = count_of(len(servers), "server") if isinstance(servers, list) else "found servers"
        return [], [], f"{count} that skyctl did not start"
    if offline:
        plan = plan_offline(ref.config, ref.base_dir)
        return list(plan.warnings), [], f"{_summary(plan)} (this machine was not looked at)"
    learn_arguments(ref.config, ref.base_dir, output.note)
    recorded_ports, pins = kept(ref)
    config = at_present(ref.config, recorded_ports)
    plan = plan_here(config, ref.base_dir, known_ports=recorded_ports, pins=pins)
    own = set(recorded_ports.values())
    if "router" in recorded_ports and plan.router is not None:
        own.add(plan.router.metrics_port)
    return list(plan.warnings), check_plan(plan, own_ports=own, source=ref.source), _summary(plan)


def _summary(plan: FleetPlan) -> str:
    return f"{count_of(len(plan.servers), 'replica')} of {plan.served_model_name} on {plan.device}"
