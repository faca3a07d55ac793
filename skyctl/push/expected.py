"""Digests that servers must have: those that the same content had before, in the same engine
version.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.errors import PreflightError
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.sites import Site
from skyctl.push.verify import UNLABELLED, arrangement_of, can_compare, comparable
from skyctl.store.expected import ExpectedDigest, by_files

BY_BYTES = "bytes:"
"""Begins the name of a content whose every byte was read."""


def names_of(checkpoint: Checkpoint, content_digest: str) -> tuple[str, ...]:
    """The names under which a checkpoint's bytes are recorded; `content_digest` is "" if nobody
    computed it.
    """
    by_bytes = (f"{BY_BYTES}{content_digest}",) if content_digest else ()
    return (*by_bytes, by_files(checkpoint.identity_digest))


def refuse_broken(
    request: PushRequest, fleet: PushFleet, checkpoint: Checkpoint, engine: str
) -> None:
    """Raise PreflightError for a model whose reload is recorded as broken in this engine version,
    unless this very checkpoint was pushed and accepted regardless.
    """
    accepted = {one.content for one in fleet.expected.digests if one.origin == "push"}
    if request.allow_unproven_reload or accepted.intersection(names_of(checkpoint, "")):
        return
    for known in fleet.expected.broken:
        if (known.layout, known.engine) == (checkpoint.layout_digest, engine):
            raise PreflightError(
                f"vLLM {engine} does not reload this model as it loads it: a push of "
                f"{known.model} left other weights than its launch",
                hint="restart the servers on the checkpoint; or --allow-unproven-reload",
            )


def launch_digests(sites: Sequence[Site]) -> list[ExpectedDigest]:
    """Digests of servers that nobody has pushed to, as vLLM loaded them; none where they differ
    from each other.
    """
    launched = [
        site
        for site in sites
        if site.server.launched_with
        and site.digest_before
        and site.old_version in (None, UNLABELLED)
    ]
    return [
        ExpectedDigest(one.server.launched_with, one.engine, one.digest_before, "launch")
        for group in comparable(launched, lambda site: site.digest_before)
        if len({(site.server.launched_with, site.digest_before) for site in group}) == 1
        for one in group
    ]


def expected_of(
    site: Site, known: Sequence[ExpectedDigest], names: Sequence[str]
) -> ExpectedDigest | None:
    """The digest a server should have, if known. Those of pushes take precedence, because they were
    compared with the checkpoint; where the engine does not allow that, those of launches do.

    Where the bytes of this push are known, other bytes are not expected to come to what an earlier
    push of the same files came to: files may have changed without a trace.
    """
    wanted = (site.engine, arrangement_of(site.digest))
    by_bytes = any(name.startswith(BY_BYTES) for name in names)
    found = [
        one
        for one in known
        if one.content in names
        and (one.engine, one.arrangement) == wanted
        and (one.content.startswith(BY_BYTES) or not by_bytes or one.origin == "launch")
    ]
    first = "push" if can_compare(site.target) else "launch"
    return next((one for one in found if one.origin == first), next(iter(found), None))


def unexpected(
    sites: Sequence[Site], known: Sequence[ExpectedDigest], names: Sequence[str]
) -> list[tuple[Site, ExpectedDigest]]:
    """Servers whose digest is not the expected one, each with the expected one."""
    found = [(site, expected_of(site, known, names)) for site in sites]
    return [(site, one) for site, one in found if one is not None and one.digest != site.digest]


def agreed(sites: Sequence[Site], names: Sequence[str]) -> list[ExpectedDigest]:
    """Digests to expect from now on: those on which all servers of one arrangement agree and which,
    if their engine lets skyctl see it, match the checkpoint.
    """
    return [
        ExpectedDigest(name, engine, group[0].digest)
        for group in comparable(sites, lambda site: site.digest)
        if len({site.digest for site in group}) == 1
        and all(not site.failure and _as_sent(site) for site in group)
        for engine in sorted({site.engine for site in group})
        for name in names
    ]


def _as_sent(site: Site) -> bool:
    """Whether it was seen to hold what was sent, as far as its engine lets skyctl see."""
    return bool(site.compared.tensors) if site.compared else not can_compare(site.target)
