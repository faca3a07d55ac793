"""The end of a push: servers are checked, then labelled and resumed.

They must hold what was sent, and all the same; only then they get its version.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Sequence

from skyctl.errors import ServerError
from skyctl.kill_points import reached
from skyctl.push import sleeping
from skyctl.push.check import Checked
from skyctl.push.expected import agreed, expected_of, names_of, unexpected
from skyctl.push.freeze import resume
from skyctl.push.layouts import numbered, settle_parameters
from skyctl.push.phases import Delivered, Verified
from skyctl.push.request import PushResult
from skyctl.push.result import conclude
from skyctl.push.run import Run
from skyctl.push.sites import Site, Weights, alive, each, require_paused
from skyctl.push.verify import HOW_TO_DIGEST, can_compare, comparable, weights_digest
from skyctl.states import PushStage, PushState
from skyctl.store.expected import BrokenReload


async def verify(run: Run, delivered: Delivered) -> Verified:
    """Drop caches of the old weights, and compare what the servers hold with the checkpoint, with
    the digests it had before, and with each other.
    """
    checked = delivered.checked
    with run.stage(PushStage.VERIFY):
        loaded = alive([site for site in checked.sites if site.weights is Weights.NEW])
        timeout_s = run.fleet.update_timeout_s
        comparing = functools.partial(_compare, run, checked)
        await each(loaded, comparing, timeout_s=timeout_s * 2, what="verify")
        _agree(run, checked, loaded, delivered.content_digest)
        reached("push.verify.done")
    return Verified(checked, delivered.delivery, delivered.label)


async def _compare(run: Run, checked: Checked, site: Site) -> None:
    """Compare what one server holds with the source. Raises ServerError."""
    source, timeout_s = checked.source, run.fleet.update_timeout_s
    # both must end before this does: a pause that outlives its push would freeze the server
    meanwhile = asyncio.gather(
        _refuse_thawed(site), site.vllm.reset_caches(), return_exceptions=True
    )
    try:
        if not (run.request.verify or site.copied):
            return
        report = await weights_digest(
            site.vllm,
            timeout_s=timeout_s,
            rows=() if site.copied else source.rows,  # every byte is compared then
            numbered=numbered(site),
            finite=source.trainer is not None,
        )
    finally:
        errors = [error for error in await meanwhile if isinstance(error, BaseException)]
        if errors:
            raise errors[0]
    site.digest, site.compared = report.digest, report.compared
    if site.expected:
        note = await settle_parameters(site, report.numbers, source.whole, timeout_s=timeout_s)
        if note:
            run.note(note)
    if run.request.weights_digest not in (None, site.digest):
        raise ServerError(
            f"{site.name} does not hold what was announced (digest {site.digest}, "
            f"announced {run.request.weights_digest})"
        )
    if source.checkpoint is not None:
        _require_comparison(site)


def _agree(run: Run, checked: Checked, loaded: Sequence[Site], content_digest: str) -> None:
    """Fail servers that hold something other than they should, by earlier digests and by the
    others'; learn what they hold.
    """
    source = checked.source
    names = () if source.checkpoint is None else names_of(source.checkpoint, content_digest)
    _enforce(run, checked, alive(loaded), names)
    _outvote(alive(loaded))
    unseen = source.trainer is not None and source.checkpoint is None
    if unseen and not run.request.weights_digest:
        _require_change(alive(loaded))
    if source.trainer is None:  # a trainer's are compared by rows only
        run.learned.digests += agreed(loaded, names)


async def _refuse_thawed(site: Site) -> None:
    """Freeze a server again that was thawed while it was loaded; what it answered meanwhile is
    unknown.
    """
    try:
        await require_paused(site)
    except ServerError:
        await site.vllm.pause("abort", clear_cache=False)
        raise


def _require_change(sites: Sequence[Site]) -> None:
    """Fail servers that hold what they held before: they were sent nothing."""
    for site in sites:
        before = site.server.weights_digest or site.digest_before
        if site.digest and site.digest == before and not site.server.half_updated:
            site.failure = (
                "verify: the trainer sent nothing: the weights are what they were "
                f"(digest {before}); one that sends the same again announces their digest"
            )


def _require_comparison(site: Site) -> None:
    if site.compared is None:
        if not can_compare(site.target):
            return  # its checksums are compared with the others' and with those of earlier loads
        raise ServerError(
            f"{site.name} cannot be compared with the checkpoint, its workers lack skyctl's "
            f"extension; {HOW_TO_DIGEST}"
        )
    if not site.compared.tensors:
        raise ServerError(
            f"{site.name}: no tensor could be compared with the checkpoint "
            f"({site.compared.why_not or 'nothing was asked for'}); to do without: --no-verify"
        )


def _enforce(run: Run, checked: Checked, sites: Sequence[Site], names: Sequence[str]) -> None:
    """Fail servers whose digest is not the one that the same weights had before, or only note it if
    the request allows that.
    """
    known = (*run.learned.digests, *run.fleet.expected.digests)
    unseen = [one for one in sites if one.compared is None and not expected_of(one, known, names)]
    if names and unseen:
        servers = ", ".join(site.name for site in unseen)
        run.note(f"{servers}: nothing was compared with the checkpoint's bytes")
    for site, one in unexpected(sites, known, names):
        by_launch = one.origin == "launch"
        when = "when vLLM loaded it" if by_launch else "when it was pushed before"
        said = (
            f"its weights are not what this checkpoint came to {when} (digest {site.digest}, "
            f"expected {one.digest})"
        )
        if run.request.allow_unproven_reload:
            run.note(f"{site.name}: {said}")
            continue
        site.failure = f"verify: {said}"
        if by_launch:
            site.failure += f": vLLM {checked.engine} does not reload this model as it loads it"
            files = checked.source.files
            run.learned.broken = BrokenReload(files.layout_digest, checked.engine, files.name)


def _outvote(sites: Sequence[Site]) -> None:
    """Fail servers whose digest differs from that of the majority in the same arrangement."""
    for group in comparable(sites, lambda site: site.digest):
        digests = [site.digest for site in group]
        most = max(set(digests), key=digests.count)
        sure = digests.count(most) * 2 > len(digests)
        for site in group:
            if not (sure and site.digest == most):
                site.failure = f"verify: its weights differ from the others' (digest {site.digest})"


async def publish(run: Run, verified: Verified) -> PushResult:
    """Give the servers the new version, and thaw them.

    Raises:
        PushError: a server is not at the new version and thawed.
    """
    sites = verified.checked.sites
    with run.stage(PushStage.RESUME):
        _record_verified(run, verified)
        await _label(run, sites, verified.label)
        reached("push.resume.call")
        await sleeping.wake_all(run, sites)
        await resume(
            run, [site for site in sites if site.weights in (Weights.OLD, Weights.VERIFIED)]
        )
        await sleeping.sleep_after(run, sites)
        reached("push.resume.done")
    return conclude(run, verified)


def _record_verified(run: Run, verified: Verified) -> None:
    """From here on, whoever finds this push dead commits it: only the thaw is left."""
    checked = verified.checked
    loaded = alive([site for site in checked.sites if site.weights is Weights.NEW])
    run.observer.fact(
        "verified",
        {
            "version": verified.label,
            "checkpoint": checked.source.path,
            "checkpoint_digest": checked.source.identity,
            "content_digest": verified.content_digest,
            "transport": checked.way.name,
            "whole": not run.request.rolling,
            "servers": {site.name: site.digest for site in loaded},
        },
    )


async def _label(run: Run, sites: Sequence[Site], label: str) -> None:
    """Label the servers that hold the new weights with their version; then they may serve."""

    async def call(site: Site) -> None:
        await require_paused(site)  # a process that was restarted meanwhile holds something else
        await site.vllm.set_weight_version(label)
        site.version = label
        site.weights = Weights.VERIFIED
        run.observer.server(site.name, PushState.UPDATED, label)

    loaded = alive([site for site in sites if site.weights is Weights.NEW])
    await each(loaded, call, timeout_s=run.fleet.control_timeout_s, what="publish the version")
    reached("push.published")
