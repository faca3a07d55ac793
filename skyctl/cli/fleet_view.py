"""Renders a fleet: the status table, and the progress of up, restart and scale."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from skyctl import output
from skyctl.core.status import Health, RouterStatus
from skyctl.states import ReplicaState
from skyctl.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from collections.abc import Iterable

    from skyctl.core.findings import Finding
    from skyctl.core.status import (
        FleetStatus,
        FrontStatus,
        ReplicaStatus,
        ScalingStatus,
        TinkerStatus,
    )

_HEALTH = {
    Health.HEALTHY: "green",
    Health.PARTIAL: "green",
    Health.DEGRADED: "yellow",
    Health.UPDATING: "cyan",
    Health.STARTING: "yellow",
    Health.STOPPING: "bright_black",
    Health.PAUSED: "blue",
    Health.ASLEEP: "blue",
    Health.UNAVAILABLE: "red",
    Health.DOWN: "red",
}
ROUTED = {True: Text("yes", "green"), False: Text("no", "yellow"), None: None}
# columns of `status` that a narrow terminal does without
_SPARE = ("MEMORY", "PID", "PORT", "KV", "RESTARTS", "WAIT", "RUN", "GPUS", "UPTIME")
_BUSY_SIGNS = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"


def status_view(status: FleetStatus) -> RenderableType:
    """Headline, one row per replica and front, then what is wrong and what to type."""
    parts: list[RenderableType] = [headline(status)]
    if status.replicas:
        parts += [Text(), _table(status)]
    if (tinker := status.tinker) is not None and tinker.ranks:
        parts += [Text(), _training_line(tinker)]
    if status.scaling is not None:
        parts += [Text(), _scaling_line(status.scaling)]
    if status.reasons or status.unapplied:
        parts.append(Text())
    if status.unapplied:
        line = Text.assemble(("· ", "cyan"), "the fleet file has changes that are not applied")
        parts.append(_advised(line, "skyctl plan"))
    return Group(*parts, *reason_lines(status), *restart_lines(status))


def _training_line(tinker: TinkerStatus) -> Text:
    models = "1 model" if tinker.models == 1 else f"{tinker.models} models"
    ranks = ", ".join(f"{rank.pid} on {rank.device}" for rank in tinker.ranks)
    noun = "process" if len(tinker.ranks) == 1 else "processes"
    facts = f"tinker trains in {noun} {ranks}: {models}"
    if tinker.operation is not None:
        facts += f", {tinker.operation} for {format_seconds(tinker.operation_s or 0.0)}"
    return Text(facts, "dim")


def _scaling_line(scaling: ScalingStatus) -> Text:
    line = Text(f"scale: {scaling}")
    if scaling.load is None and scaling.reason:
        line.append(f": {scaling.reason}")
    if scaling.asleep:
        line.append(f"; asleep: {', '.join(scaling.asleep)}", "dim")
    return line


def restart_lines(status: FleetStatus) -> list[Text]:
    """Why replicas that run again were restarted, a line each."""
    return [
        Text(f"{replica.name} was started again: {replica.restart_reason}", "dim")
        for replica in status.replicas
        if replica.restart_reason and replica.state.as_intended
    ]


def reason_lines(status: FleetStatus) -> list[Text]:
    """What is wrong with the fleet, a line each, and what to type about it."""
    return [
        _advised(
            Text.assemble(("! ", "yellow") if reason.fault else ("· ", "cyan"), reason.message),
            reason.hint,
        )
        for reason in status.reasons
    ]


def drift_lines(drift: Iterable[Finding]) -> list[Text]:
    """Differences from the fleet file and from the intended state, a line each."""
    lines = [
        _advised(
            Text.assemble(("± ", "yellow"), (difference.server, "bold"), f" {difference.detail}"),
            difference.hint,
        )
        for difference in drift
    ]
    return [Text(), *lines] if lines else []


def _advised(line: Text, hint: str) -> Text:
    return line.append(f"  → {hint}", style="dim") if hint else line


def headline(status: FleetStatus) -> Text:
    """One line: name, health, model, weights, and the operation in progress."""
    line = Text.assemble(
        (status.name, "bold"), "  ", (str(status.health), f"bold {_HEALTH[status.health]}")
    )
    facts = [status.device, status.model]
    if status.replicas:
        facts.append(f"weights {status.weight_version or 'base'}")
    if status.adapters:
        facts.append(f"adapters {', '.join(status.adapters)}")
    if status.supervised is None:
        facts.append("attached")
    elif status.supervised:
        facts.append(f"supervisor {status.supervisor_pid}")
    line.append("  " + " · ".join(fact for fact in facts if fact), style="dim")
    operation = status.operation
    if operation is not None and operation.ended_at is None:
        progress = status.rollout.partition(": ")[2] if status.rollout and not status.job else ""
        line.append(f"  {operation.job} {progress or operation.detail}".rstrip(), style="cyan")
    if status.job is not None:
        line.append(f"  {status.rollout or f'{status.job} running'}", style="cyan")
    if status.health == Health.DOWN and not status.replicas:
        line.append("  start it: skyctl up", style="dim")
    return line


def _table(status: FleetStatus) -> RenderableType:
    columns = ["REPLICA", "STATE", "ROUTED", ">RUN", ">WAIT", ">KV", "WEIGHTS", ">UPTIME"]
    columns += [">MEMORY", ">PID", ">PORT"]
    rows = [_replica_cells(replica) for replica in status.replicas]
    rows += [_front_cells(name, front) for name, front in status.fronts.items()]
    every: list[ReplicaStatus | FrontStatus] = [*status.replicas, *status.fronts.values()]
    blank = [""] * len(status.fronts)
    extra: dict[str, list[Any]] = {
        ">ACCEPTED": [_accepted(replica) for replica in status.replicas] + blank,
        ">RESTARTS": [process.restarts for process in every],
        "GPUS": [",".join(map(str, replica.gpus)) for replica in status.replicas] + blank,
        "ROLE": [replica.role for replica in status.replicas] + blank,
        "NODE": [replica.node or "" for replica in status.replicas] + blank,
    }
    for column, cells in extra.items():
        if any(cells):  # empty ones are left out: the table fits into 80 characters
            columns.append(column)
            rows = [[*row, cell] for row, cell in zip(rows, cells, strict=True)]
    return output.table(columns, rows, spare=_SPARE)


def _accepted(replica: ReplicaStatus) -> str:
    """The share of the tokens that its draft model or head proposed; "" without one."""
    if not replica.draft_tokens:
        return ""
    return f"{(replica.accepted_tokens or 0) / replica.draft_tokens:.0%}"


def _replica_cells(replica: ReplicaStatus) -> list[object]:
    return [
        replica.name,
        output.styled(replica.state),
        ROUTED[replica.routed],
        replica.running,
        replica.waiting,
        None if replica.kv_usage is None else f"{replica.kv_usage:.0%}",
        Text(replica.weight_version or "base"),
        *_process_cells(replica),
    ]


def _front_cells(name: str, front: FrontStatus) -> list[object]:
    routed: str | None = ""
    if isinstance(front, RouterStatus):
        routed = None if front.workers is None else f"→ {front.workers}"
    return [name, output.styled(front.state), routed, "", "", "", "", *_process_cells(front)]


def _process_cells(process: ReplicaStatus | FrontStatus) -> list[object]:
    return [
        None if process.uptime_s is None else format_seconds(process.uptime_s),
        None if process.rss_bytes is None else format_bytes(process.rss_bytes),
        process.pid,
        process.port,
    ]


class OperationView:
    """The progress of one operation: a live table, or one plain line per change of state."""

    def __init__(self, title: str) -> None:
        self._title = title
        self._began = time.monotonic()
        self._latest: FleetStatus | None = None
        self._since: dict[str, tuple[str, float]] = {}
        self.drawing = False

    def see(self, status: FleetStatus) -> None:
        """Update with a new status."""
        self._latest = status
        for name, state, reason in _states(status):
            shown = f"{state}, waits" if reason.startswith("waits for") else str(state)
            if self._since.get(name, ("", 0.0))[0] == shown:
                continue
            self._since[name] = (shown, time.monotonic())
            if not self.drawing:
                seconds = f"{time.monotonic() - self._began:.0f} s"
                output.note(f"{name}: {state} ({seconds})" + (f" – {reason}" if reason else ""))

    def render(self) -> RenderableType:
        """The table as of now."""
        spent = time.monotonic() - self._began
        sign = _BUSY_SIGNS[int(spent * 8) % len(_BUSY_SIGNS)]
        head = Text.assemble((f"{sign} ", "cyan"), (self._title, "bold"), (f"  {spent:.0f} s", ""))
        if self._latest is None:
            return head
        grid = Table.grid(padding=(0, 2))
        for justify in ("left", "left", "right"):
            grid.add_column(justify=justify, no_wrap=True)
        grid.add_column()  # alone gives way where space is short
        lines = {replica.name: replica.log_line for replica in self._latest.replicas}
        for name, state, reason in _states(self._latest):
            began = self._since.get(name, ("", self._began))[1]
            detail = reason or lines.get(name, "")
            grid.add_row(
                f"  {name}",
                output.styled(state),
                f"{time.monotonic() - began:.0f} s",
                Text(detail, style="dim", no_wrap=True, overflow="ellipsis"),
            )
        return Group(head, grid)


def log_tail(name: str, lines: list[str], telling: str) -> RenderableType:
    """The end of a log, with the line that says why in red."""
    shown: list[RenderableType] = [Text(f"── {name}: last {len(lines)} lines of its log", "bold")]
    for line in lines:
        shown.append(Text(f"  {line}", "bold red" if telling and telling in line else "dim"))
    if telling and not any(telling in line for line in lines):
        shown.append(Text(f"  {telling}", "bold red"))
    return Group(*shown)


def _states(status: FleetStatus) -> list[tuple[str, ReplicaState, str]]:
    rows = [(replica.name, replica.state, replica.reason) for replica in status.replicas]
    rows += [(name, front.state, front.reason) for name, front in status.fronts.items()]
    return rows
