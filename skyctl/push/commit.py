"""The end of a push: servers are checked, then labelled and resumed.

They must hold what was sent, and all the same; only then they get its version.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Sequence

from skyctl.errors import ServerError
from skyctl.kill_points import reached
from skyctl.push import sleeping
from skyctl.push.check import Checked
from skyctl.push.freeze import label_verified, resume
from skyctl.push.frozen import require_paused
from skyctl.push.layouts import numbered, settle_parameters
from skyctl.push.request import PushResult
from skyctl.push.run import Delivered, Run, Verified, conclude
from skyctl.push.servers import Holds, PushedServer, alive, each
from skyctl.push.verify import (
    HOW_TO_DIGEST,
    agreed,
    can_compare,
    comparable,
    expected_of,
    names_of,
    unexpected,
    weights_digest,
)
from skyctl.states import PushStage, PushState
from skyctl.store.expected import BrokenReload


async def verify(run: Run, delivered: Delivered) -> Verified:
    """Drop caches of the old weights, and compare what the servers hold with the checkpoint, with
    the digests it had before, and with each other.
    """
    checked = delivered.checked
    with run.stage(PushStage.VERIFY):
        loaded = alive([server for server in checked.servers if server.holds is Holds.NEW])
        timeout_s = run.fleet.timeouts.update_s
        comparing = functools.partial(_compare, run, checked)
        await each(loaded, comparing, timeout_s=timeout_s * 2, call_name="verify")
        _agree(run, checked, loaded, delivered.content_digest)
        reached("push.verify.done")
    return Verified(checked, delivered.delivery, delivered.label)


async def _compare(run: Run, checked: Checked, server: PushedServer) -> None:
    """Compare what one server holds with the source. Raises ServerError."""
    source, timeout_s = checked.source, run.fleet.timeouts.update_s
    # both must end before this does: a pause that outlives its push would freeze the server
    meanwhile = asyncio.gather(
        require_paused(server), server.control.reset_caches(), return_exceptions=True
    )
    try:
        if not (run.fleet.verifies(run.request) or server.proof.copied):
            return
        # of copied weights every byte is compared with what the sender read: these files, or a
        # copy on another machine that may be of another step
        by_numbers = server.proof.copied and not run.fleet.leaves_machine
        report = await weights_digest(
            server.control,
            timeout_s=timeout_s,
            rows=() if by_numbers else server.proof.rows or source.rows,
            numbered=numbered(server),
            finite=source.trainer is not None,
        )
    finally:
        errors = [error for error in await meanwhile if isinstance(error, BaseException)]
        if errors:
            raise errors[0]
    server.proof.digest, server.proof.compared = report.digest, report.compared
    if server.proof.expected:
        note = await settle_parameters(server, report.numbers, source.whole, timeout_s=timeout_s)
        if note:
            run.note(note)
    if run.request.weights_digest not in (None, server.proof.digest):
        raise ServerError(
            f"{server.name} does not hold what was announced (digest {server.proof.digest}, "
            f"announced {run.request.weights_digest})"
        )
    if source.checkpoint is not None or source.live is not None:
        _require_comparison(server)
    if run.fleet.verifies(run.request) and checked.draft is not None:
        await checked.draft.compare(server, timeout_s=timeout_s)


def _agree(run: Run, checked: Checked, loaded: Sequence[PushedServer], content_digest: str) -> None:
    """Fail servers that hold something other than they should, by earlier digests and by the
    others'; learn what they hold.
    """
    source = checked.source
    names = () if source.checkpoint is None else names_of(source.checkpoint, content_digest)
    _enforce(run, checked, alive(loaded), names)
    _outvote(alive(loaded), "its weights differ", lambda server: server.proof.digest)
    _outvote(alive(loaded), "its draft weights differ", lambda server: server.proof.draft_digest)
    trainer = source.trainer if source.checkpoint is None else None
    if trainer is not None and not (run.request.weights_digest or trainer.passed_on):
        _require_change(alive(loaded))
    if source.trainer is None:  # a trainer's are compared by rows only
        run.learned.digests += agreed(loaded, names)


def _require_change(servers: Sequence[PushedServer]) -> None:
    """Fail servers that hold what they held before: they were sent nothing."""
    for server in servers:
        before = server.given.recorded.weights_digest or server.proof.digest_before
        if (
            server.proof.digest
            and server.proof.digest == before
            and not server.given.recorded.half_updated
        ):
            server.failure = (
                "verify: the trainer sent nothing: the weights are what they were "
                f"(digest {before}); one that sends the same again announces their digest"
            )


def _require_comparison(server: PushedServer) -> None:
    if server.proof.compared is None:
        if not can_compare(server.target):
            return  # its checksums are compared with the others' and with those of earlier loads
        raise ServerError(
            f"{server.name} cannot be compared with the checkpoint, its workers lack skyctl's "
            f"extension; {HOW_TO_DIGEST}"
        )
    if not server.proof.compared.tensors:
        raise ServerError(
            f"{server.name}: no tensor could be compared with the checkpoint "
            f"({server.proof.compared.why_not or 'nothing was asked for'}); "
            "to do without: --no-verify"
        )


def _enforce(
    run: Run, checked: Checked, servers: Sequence[PushedServer], names: Sequence[str]
) -> None:
    """Fail servers whose digest is not the one that the same weights had before, or only note it if
    the request allows that.
    """
    digests = (*run.learned.digests, *run.fleet.expected.digests)
    unseen = [
        server.name
        for server in servers
        if server.proof.compared is None and not expected_of(server, digests, names)
    ]
    if names and unseen:
        run.note(f"{', '.join(unseen)}: nothing was compared with the checkpoint's bytes")
    for server, expected in unexpected(servers, digests, names):
        by_launch = expected.origin == "launch"
        when = "when vLLM loaded it" if by_launch else "when it was pushed before"
        message = (
            f"its weights are not what this checkpoint came to {when} "
            f"(digest {server.proof.digest}, expected {expected.digest})"
        )
        if run.request.allow_unproven_reload:
            run.note(f"{server.name}: {message}")
            continue
        server.failure = f"verify: {message}"
        if by_launch:
            server.failure += f": vLLM {checked.engine} does not reload this model as it loads it"
            files = checked.source.files
            run.learned.broken = BrokenReload(files.layout_digest, checked.engine, files.name)


def _outvote(
    servers: Sequence[PushedServer], problem: str, digest_of: Callable[[PushedServer], str]
) -> None:
    """Fail servers whose digest differs from that of the majority in the same arrangement."""
    for group in comparable(servers, digest_of):
        digests = [digest_of(server) for server in group]
        most = max(set(digests), key=digests.count)
        sure = digests.count(most) * 2 > len(digests)
        for server in group:
            if not (sure and digest_of(server) == most):
                server.failure = f"verify: {problem} from the others' (digest {digest_of(server)})"


async def publish(run: Run, verified: Verified) -> PushResult:
    """Give the servers the new version, and thaw them.

    Raises:
        PushError: a server is not at the new version and thawed.
    """
    servers = verified.checked.servers
    with run.stage(PushStage.RESUME):
        _record_verified(run, verified)
        await _label(run, servers, verified.label)
        reached("push.resume.call")
        await sleeping.wake_all(run, servers)
        await label_verified(run, [server for server in servers if server.holds is Holds.OLD])
        await resume(
            run, [server for server in servers if server.holds in (Holds.OLD, Holds.VERIFIED)]
        )
        await sleeping.sleep_after(run, servers)
        reached("push.resume.done")
    return conclude(run, verified)


def _record_verified(run: Run, verified: Verified) -> None:
    """From here on, whoever finds this push dead commits it: only the thaw is left."""
    checked = verified.checked
    loaded = alive([server for server in checked.servers if server.holds is Holds.NEW])
    run.observer.fact(
        "verified",
        {
            "version": verified.label,
            "checkpoint": checked.source.path,
            "checkpoint_digest": checked.source.identity,
            "content_digest": verified.content_digest,
            "transport": checked.way.name,
            **checked.draft_record,
            "whole": not run.request.rolling,
            "servers": {server.name: server.proof.digest for server in loaded},
        },
    )


async def _label(run: Run, servers: Sequence[PushedServer], label: str) -> None:
    """Label the servers that hold the new weights with their version; then they may serve."""

    async def call(server: PushedServer) -> None:
        await require_paused(server)  # a process that was restarted meanwhile holds something else
        await server.control.set_weight_version(label, run.fleet.versions)
        server.version = label
        server.holds = Holds.VERIFIED
        if server.before.empty:
            server.did.slept = 0  # for the record, that it has weights again
        run.observer.server(server.name, PushState.UPDATED, label)

    loaded = alive([server for server in servers if server.holds is Holds.NEW])
    await each(
        loaded, call, timeout_s=run.fleet.timeouts.control_s, call_name="publish the version"
    )
    reached("push.published")
