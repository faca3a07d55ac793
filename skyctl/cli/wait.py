"""`skyctl wait`: block until a fleet is in a state from which a script can go on."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

import typer

from skyctl import output
from skyctl.cli import complete
from skyctl.cli.options import FileOption, FleetOption, JsonOption, ServersArgument, seconds
from skyctl.errors import DeadlineExceeded, FleetDownError, SkyctlError, UsageError, no_server
from skyctl.states import ReplicaState

if TYPE_CHECKING:
    from skyctl.core.status import FleetStatus, ReplicaStatus
    from skyctl.service import FleetService

POLL_S = 0.25
KINDS = ("ready", "paused", "awake", "version")
CONDITIONS = (*KINDS[:-1], "version=X")


ConditionOption = Annotated[
    str,
    typer.Option(
        "--for",
        metavar="STATE",
        help="ready, paused, awake or version=X.",
        autocompletion=complete.conditions,
    ),
]
WaitTimeoutOption = Annotated[float, seconds("Give up after this long.")]


def wait(
    servers: ServersArgument = None,
    condition: ConditionOption = "ready",
    file: FileOption = None,
    fleet: FleetOption = None,
    timeout: WaitTimeoutOption = 300.0,
    as_json: JsonOption = False,
) -> None:
    """Wait until every replica is ready, paused, awake, or at a weight version.

    Exits with 0 once it is, with 124 when the time is over, and with 1 at once when a replica
    was given up and will not get there. Also waits for a fleet that is still down.

    \b
    Examples:
      skyctl wait
      skyctl wait demo-0 --for paused --timeout 10
      skyctl wait --for version=step-200 && ./evaluate.sh
    """
    from skyctl.cli.fleet_calls import call_chosen_fleet

    awaited, noted = Condition.parse(condition), ""
    for name in servers or ():
        if name.partition("=")[0] in KINDS:
            raise UsageError(
                f"{name!r} is a condition, not a server", hint=f"skyctl wait --for {name}"
            )

    def note_pending(pending: Sequence[str]) -> None:
        nonlocal noted
        if noted != (text := "; ".join(pending)):
            noted = text
            output.note(f"waiting: {text}")

    began = time.perf_counter()
    status = call_chosen_fleet(
        file,
        fleet,
        lambda running: wait_for(
            running, awaited, timeout_s=timeout, names=servers or (), on_pending=note_pending
        ),
    )
    seconds = time.perf_counter() - began
    data = {"for": condition, "seconds": round(seconds, 3), "status": status.to_json()}
    output.emit(data, f"fleet {status.name} is {awaited} (waited {seconds:.1f} s)")


@dataclass(frozen=True)
class Condition:
    """A condition to wait for: `kind` is ready, paused, awake or version (`version` says which)."""

    kind: str
    version: str = ""

    @classmethod
    def parse(cls, text: str) -> Condition:
        """`ready`, `paused`, `awake` or `version=step-200`.

        Raises:
            UsageError: anything else.
        """
        kind, _, version = text.partition("=")
        if (kind in KINDS[:-1] and "=" not in text) or (kind == "version" and version):
            return cls(kind, version)
        raise UsageError(
            f"--for {text!r}: nothing to wait for",
            hint=f"wait for one of: {', '.join(CONDITIONS)}",
        )

    def __str__(self) -> str:
        return f"at version {self.version}" if self.kind == "version" else self.kind

    def met_by(self, replica: ReplicaStatus) -> bool:
        """Whether one server meets it. `base` is the version before the first push."""
        from skyctl.push.source import means

        if self.kind == "ready":
            return replica.state is ReplicaState.READY and replica.routed is not False
        if self.kind == "paused":
            return replica.state is ReplicaState.PAUSED
        if self.kind == "awake":
            return replica.state.as_intended and replica.state is not ReplicaState.ASLEEP
        return means(self.version, replica.weight_version or "base")

    def pending(self, status: FleetStatus, names: Sequence[str] = ()) -> list[str]:
        """`tiny-1 is starting` for each server that does not meet it yet; [] once all do."""
        chosen = [r for r in status.replicas if not names or r.name in names]
        if not chosen:
            return [f"fleet {status.name} is {status.health}"]
        waiting = [
            f"{r.name} has {r.weight_version or 'base'}"
            if self.kind == "version"
            else f"{r.name} is {r.state}"
            + (", not routed" if r.state is ReplicaState.READY else "")
            for r in chosen
            if not self.met_by(r)
        ]
        if self.kind == "ready" and not names:
            for name, front in status.fronts.items():
                if front.state is not ReplicaState.READY:
                    waiting.append(f"{name} is {front.state}")
        return waiting


async def wait_for(
    fleet: FleetService,
    condition: Condition,
    *,
    timeout_s: float,
    names: Sequence[str] = (),
    on_pending: Callable[[Sequence[str]], None] = lambda pending: None,
) -> FleetStatus:
    """Poll until all servers (or `names`) meet the condition; `on_pending` receives those that do
    not.

    A fleet that is down is waited for, too: another command may be starting it. So is a supervisor
    that does not answer: nothing here is on record of a fleet on another machine.

    Raises:
        DeadlineExceeded: they do not, after `timeout_s` seconds.
        SkyctlError: a server is given up or quarantined, and no recovery is under way.
        NotFoundError: a running fleet has no server of one of these names.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            status = await fleet.status()
        except (FleetDownError, DeadlineExceeded) as error:
            on_pending([error.message])
            late = DeadlineExceeded(
                f"not {condition} after {timeout_s:g} s: {error.message}", hint=error.hint
            )
        else:
            _refuse_unknown(status, names)
            pending = condition.pending(status, names)
            if not pending:
                return status
            on_pending(pending)
            _refuse_stuck(status, condition, names)
            late = DeadlineExceeded(
                f"fleet {status.name} is not {condition} after {timeout_s:g} s: "
                + "; ".join(pending),
                hint="look: skyctl status",
                details={"pending": pending, "status": status.to_json()},
            )
        if time.monotonic() >= deadline:
            raise late
        await asyncio.sleep(min(POLL_S, max(0.0, deadline - time.monotonic())))


def _refuse_unknown(status: FleetStatus, names: Sequence[str]) -> None:
    servers = [replica.name for replica in status.replicas]
    for name in names:
        if servers and name not in servers:
            raise no_server(status.name, name, servers)


def _refuse_stuck(status: FleetStatus, condition: Condition, names: Sequence[str]) -> None:
    from skyctl.core.status import OperationKind

    operation = status.operation
    if status.job or (operation and operation.under_way(OperationKind.RECOVER)):
        return
    for replica in status.replicas:
        stuck = replica.state.stuck and not condition.met_by(replica)
        if stuck and (not names or replica.name in names):
            detail = f": {replica.reason}" if replica.reason else ""
            raise SkyctlError(
                f"{replica.name} is {replica.state} and will not be {condition}{detail}",
                hint="skyctl recover"
                if replica.state.recoverable
                else f"skyctl logs {replica.name}; then: skyctl restart {replica.name}",
                details={"status": status.to_json()},
            )
