"""Digests that servers must have: those that the same content had before, in the same engine
version.
"""

from __future__ import annotations

from collections.abc import Sequence

from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.errors import PreflightError
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.servers import PushedServer
from skyctl.push.verify import arrangement_of, can_compare, comparable
from skyctl.states import UNLABELLED
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
    accepted = {digest.content for digest in fleet.expected.digests if digest.origin == "push"}
    if request.allow_unproven_reload or accepted.intersection(names_of(checkpoint, "")):
        return
    for broken in fleet.expected.broken:
        if (broken.layout, broken.engine) == (checkpoint.layout_digest, engine):
            raise PreflightError(
                f"vLLM {engine} does not reload this model as it loads it: a push of "
                f"{broken.model} left other weights than its launch",
                hint="restart the servers on the checkpoint; or --allow-unproven-reload",
            )


def launch_digests(servers: Sequence[PushedServer]) -> list[ExpectedDigest]:
    """Digests of servers that nobody has pushed to, as vLLM loaded them; none where they differ
    from each other.
    """
    launched = [
        server
        for server in servers
        if server.given.launched_with
        and server.proof.digest_before
        and server.before.version in (None, UNLABELLED)
    ]
    return [
        ExpectedDigest(
            server.given.launched_with, server.before.engine, server.proof.digest_before, "launch"
        )
        for group in comparable(launched, lambda server: server.proof.digest_before)
        if len({(server.given.launched_with, server.proof.digest_before) for server in group}) == 1
        for server in group
    ]


def expected_of(
    server: PushedServer, digests: Sequence[ExpectedDigest], names: Sequence[str]
) -> ExpectedDigest | None:
    """The digest a server should have, if known. Those of pushes take precedence, because they were
    compared with the checkpoint; where the engine does not allow that, those of launches do.

    Where the bytes of this push are known, other bytes are not expected to come to what an earlier
    push of the same files came to: files may have changed without a trace.
    """
    measured_by = (server.before.engine, arrangement_of(server.proof.digest))
    by_bytes = any(name.startswith(BY_BYTES) for name in names)
    candidates = [
        digest
        for digest in digests
        if digest.content in names
        and (digest.engine, digest.arrangement) == measured_by
        and (digest.content.startswith(BY_BYTES) or not by_bytes or digest.origin == "launch")
    ]
    first = "push" if can_compare(server.target) else "launch"
    return next(
        (digest for digest in candidates if digest.origin == first), next(iter(candidates), None)
    )


def unexpected(
    servers: Sequence[PushedServer], digests: Sequence[ExpectedDigest], names: Sequence[str]
) -> list[tuple[PushedServer, ExpectedDigest]]:
    """Servers whose digest is not the expected one, each with the expected one."""
    pairs = [(server, expected_of(server, digests, names)) for server in servers]
    return [
        (server, digest)
        for server, digest in pairs
        if digest is not None and digest.digest != server.proof.digest
    ]


def agreed(servers: Sequence[PushedServer], names: Sequence[str]) -> list[ExpectedDigest]:
    """Digests to expect from now on: those on which all servers of one arrangement agree and which,
    if their engine lets skyctl see it, match the checkpoint.
    """
    return [
        ExpectedDigest(name, engine, group[0].proof.digest)
        for group in comparable(servers, lambda server: server.proof.digest)
        if len({server.proof.digest for server in group}) == 1
        and all(not server.failure and _as_sent(server) for server in group)
        for engine in sorted({server.before.engine for server in group})
        for name in names
    ]


def _as_sent(server: PushedServer) -> bool:
    """Whether it was seen to hold what was sent, as far as its engine lets skyctl see."""
    return (
        bool(server.proof.compared.tensors)
        if server.proof.compared
        else not can_compare(server.target)
    )
