"""Renders recovery: what was found, what was done, and the resulting error."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from skyctl import output
from skyctl.errors import PartialFailure, SkyctlError
from skyctl.units import format_seconds

if TYPE_CHECKING:
    from rich.table import Table

    from skyctl.core.diagnosis import Finding
    from skyctl.core.recovery import Recovered

_PLANS = {
    "nothing": "",
    "resume": "check and resume",
    "sleep": "check and put to sleep again",
    "push": "scrub and push again",
    "restart": "restart",
    "quarantine": "quarantine",
    "adopt": "take over",
    "end": "end what is left",
    "down": "finish `skyctl down`",
    "replace": "replace, the servers go on",
}


def findings_table(findings: Sequence[Finding]) -> Table:
    """SERVER, FOUND, TO DO, DETAIL."""
    rows = [
        [one.server, output.styled(one.found), _PLANS[one.action], one.detail] for one in findings
    ]
    return output.table(["SERVER", "FOUND", "TO DO", "DETAIL"], rows)


def recovered_table(recovered: Sequence[Recovered]) -> Table:
    """SERVER, WAS, DONE, RESULT, TIME, DETAIL."""
    rows = [
        [
            one.server,
            output.styled(one.found),
            _PLANS[one.action],
            output.styled("ok" if one.ok else "failed"),
            format_seconds(one.seconds),
            one.detail,
        ]
        for one in recovered
    ]
    return output.table(["SERVER", "WAS", "DONE", "RESULT", ">TIME", "DETAIL"], rows)


def failure(recovered: Sequence[Recovered]) -> SkyctlError | None:
    """The error that these outcomes come to; None when every server is as it should be."""
    failed = [one for one in recovered if not one.ok]
    if not failed:
        return None
    first = failed[0]
    message = (
        f"recover: {len(failed)} of {len(recovered)} servers could not be put right "
        f"({first.server}: {first.detail})"
    )
    hint = "look: skyctl status"
    if len(failed) < len(recovered):
        return PartialFailure(message, outcomes=recovered, hint=hint)
    return SkyctlError(message, hint=hint)
