"""What servers really hold, side by side and beside the digests that the same content had before. A
check that could not be made has failed.

Digests can be compared where workers hold the model in the same arrangement. A server with two
tensor-parallel ranks holds different tensors from one with a single rank, and one that quantizes
what it loads holds different numbers; all are right. A digest therefore ends in a colon, the
version of the algorithm and the arrangement that the server's workers report
(`engines/vllm/inside/digest.py`): `5f0c…:v2-tp2-bfloat16`. Servers that report none are taken to
share one.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from skyctl import engines
from skyctl.checkpoints.checkpoint import Checkpoint
from skyctl.engines.base import Feature, Server, lacks_method
from skyctl.errors import PreflightError, ServerError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import fan_out
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.rows import Compared, KnownRows, Mismatch, compare
from skyctl.push.servers import PushedServer
from skyctl.states import UNLABELLED, label_matches
from skyctl.store.expected import ExpectedDigest, by_files
from skyctl.wire.worker import WorkerMethod

EXTENSION = "skyctl.engines.vllm.inside.worker.SkyctlWorkerExtension"
HOW_TO_DIGEST = f"start it with --worker-extension-cls {EXTENSION}, or push with --no-verify"
T = TypeVar("T")

_SEPARATOR = ":"


class CannotDigest(ServerError):
    """A server has neither skyctl's worker extension nor its engine's own checksums."""


@dataclass(frozen=True)
class Record:
    """What a server holds by the record: its version's label (None: nothing was pushed), its digest
    ("": unknown), and what the checkpoint says of it.
    """

    version: str | None = None
    digest: str = ""
    rows: tuple[KnownRows, ...] = ()


@dataclass(frozen=True)
class WeightsReport:
    """One server's weights."""

    server: str
    """Its name."""
    ok: bool
    """It could say what it holds."""
    digest: str = ""
    """Of its weights; "" if it cannot say."""
    version: str | None = None
    """Their label; None if it cannot say."""
    detail: str = ""
    """Why it cannot say, how the digest was made, or what differs from the record."""
    compared: dict[str, Any] | None = None
    """How much of the recorded checkpoint it was seen to hold."""
    as_recorded: bool | None = None
    """It holds what is on record; None if nothing is."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Verification:
    """All servers' reports, and whether those that can be compared hold the same: None if too few
    could say.
    """

    servers: tuple[WeightsReport, ...]
    agree: bool | None

    def to_json(self) -> dict[str, Any]:
        return {"servers": [report.to_json() for report in self.servers], "agree": self.agree}


def arrangement_of(digest: str) -> str:
    """The suffix of a digest, version included; "" if it has none."""
    return digest.partition(_SEPARATOR)[2]


def comparable(items: Iterable[T], digest: Callable[[T], str]) -> list[list[T]]:
    """Group `items` by the arrangement of their digests, in order. Those without a digest are left
    out.
    """
    groups: dict[str, list[T]] = {}
    for item in items:
        if digest(item):
            groups.setdefault(arrangement_of(digest(item)), []).append(item)
    return list(groups.values())


async def verify(
    servers: Sequence[ServerTarget],
    *,
    client: ControlClient,
    timeout_s: float,
    records: Mapping[str, Record] | None = None,
) -> Verification:
    """Ask every server for the digest and the version of its weights, and compare them with each
    other and with the record. Never raises for a server.
    """

    async def ask(target: ServerTarget) -> WeightsReport:
        server = engines.server(client, target, timeout_s=timeout_s)
        if (await server.metrics()).sleep_level:  # its memory may be unmapped
            raise ServerError(f"{target.name} is asleep: its weights cannot be looked at")
        record = (records or {}).get(target.name)
        weights = await weights_digest(
            server, timeout_s=timeout_s, rows=record.rows if record is not None else ()
        )
        version = await server.weight_version()
        problem = _unlike(record, weights.digest, version) if record is not None else ""
        return WeightsReport(
            target.name,
            True,
            weights.digest,
            version,
            problem or weights.how,
            weights.compared.to_json() if weights.compared and weights.compared.tensors else None,
            None if record is None else not problem,
        )

    outcomes = await fan_out(servers, ask, timeout_s=timeout_s * 2)
    reports = tuple(
        outcome.value or WeightsReport(outcome.server, False, detail=outcome.detail)
        for outcome in outcomes
    )
    digests = [report.digest for report in reports if report.digest]
    same = all(len(set(group)) == 1 for group in comparable(digests, str))
    agree = (True if len(digests) == len(reports) else None) if same else False
    return Verification(reports, agree)


def _unlike(record: Record, digest: str, version: str | None) -> str:
    """What differs from the record; "" if nothing does, as far as it can be compared."""
    if not label_matches(version, record.version):
        return f"labelled {version}, on record is {record.version or 'what it was started with'}"
    same_arrangement = arrangement_of(record.digest) == arrangement_of(digest)
    if record.digest and same_arrangement and record.digest != digest:
        return f"it holds other weights than those on record (digest {digest}, {record.digest})"
    return ""


@dataclass(frozen=True)
class WeightsDigest:
    """Digest over all workers of a server, with their arrangement.

    `compared` is None if the workers cannot be asked for rows; `how` then says how else the digest
    was made. `numbers` are those of the requested parameters, by rank.
    """

    digest: str
    compared: Compared | None = None
    how: str = ""
    numbers: Mapping[int, Mapping[str, int]] = field(default_factory=dict)


async def weights_digest(
    server: Server,
    *,
    timeout_s: float,
    rows: Sequence[KnownRows] = (),
    numbered: Sequence[Sequence[str]] = (),
    finite: bool = False,
    draft: bool = False,
) -> WeightsDigest:
    """Digest a server's weights by skyctl's own method, or by its engine's checksums if its workers
    say that they lack that method. `rows` are the checkpoint rows they must hold; `numbered` are
    the parameters, by rank, whose numbers are wanted. `finite`: refuse NaN and infinity.
    `draft`: of the weights that it drafts tokens with.

    Raises:
        CannotDigest: the server has no way to digest its weights.
        ServerError: it does not answer, answers something else, or does not hold the rows.
    """
    name = server.target.name
    arguments: dict[str, Any] = {"rows": [vars(known_rows.question) for known_rows in rows]}
    if numbered:
        arguments["numbered"] = [list(names) for names in numbered]
    if finite:
        arguments["finite"] = True
    if draft:
        arguments["draft"] = True
    try:
        answers = await server.ask_workers(WorkerMethod.DIGEST, arguments, timeout_s=timeout_s)
    except ServerError as error:
        if not lacks_method(error):
            raise
        return await _by_checksums(server, timeout_s=timeout_s)
    try:
        digest = _digest_of(answers, rows)
        wrong = [a["not_finite"] for a in answers if a["not_finite"]] if finite else []
    except Mismatch as error:
        raise ServerError(f"{name} does not hold what was sent: {error}") from error
    except (TypeError, LookupError, ValueError, AttributeError) as error:
        raise ServerError(
            f"{name} digested its weights in a way that is not understood ({error!r})",
            hint="it may run another skyctl: restart it",
        ) from error
    if wrong:
        raise ServerError(f"{name} holds NaN or infinity in {wrong[0]}")
    return digest


def can_compare(target: ServerTarget) -> bool:
    """Whether its engine lets skyctl read weights, to compare them with the checkpoint."""
    return Feature.COMPARISON in engines.ENGINES[target.engine].supports


async def _by_checksums(server: Server, *, timeout_s: float) -> WeightsDigest:
    checksums = await server.weight_checksums(timeout_s=timeout_s)
    if not checksums:
        hint = HOW_TO_DIGEST if can_compare(server.target) else "push with --no-verify"
        raise CannotDigest(f"{server.target.name} has no way to digest its weights", hint=hint)
    title = engines.ENGINES[server.target.engine].title
    return WeightsDigest(_combined(sorted(checksums.items())), how=f"by {title}'s checksums")


def _digest_of(answers: Sequence[Mapping[str, Any]], rows: Sequence[KnownRows]) -> WeightsDigest:
    if not answers:
        raise ValueError("no worker answered")
    replicas: dict[int, list[Mapping[str, Any]]] = {}
    for answer in answers:
        replicas.setdefault(int(answer.get("data_parallel_rank", 0)), []).append(answer)
    shared_out = any(answer.get("shares_out") for answer in answers)
    alike = {
        number: _combined([str(answer["dense" if shared_out else "digest"]) for answer in workers])
        for number, workers in replicas.items()
    }
    first, *others = sorted(replicas)
    for number in others:
        if alike[number] != alike[first]:
            raise Mismatch(f"data-parallel rank {number} holds other weights than rank {first}")
    models = [replicas[number] for number in sorted(replicas)]
    if shared_out:  # all of them share one
        models = [[answer for workers in models for answer in workers]]
    compared = [compare(rows, workers) for workers in models]
    digest = _combined([str(answer["digest"]) for answer in models[0]])
    version = int(answers[0].get("digest_version", 0))
    named = [f"v{version}" if version else "", str(answers[0].get("arrangement", ""))]
    suffix = "-".join(part for part in named if part)
    return WeightsDigest(
        f"{digest}{_SEPARATOR}{suffix}" if suffix else digest,
        min(compared, key=lambda compared: compared.tensors),
        numbers={
            int(answer["place"]): answer["numbers"] for answer in answers if answer.get("numbers")
        },
    )


def _combined(parts: Sequence[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()


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
        if server.given.recorded.launched_with
        and server.proof.digest_before
        and server.before.version in (None, UNLABELLED)
    ]
    return [
        ExpectedDigest(
            server.given.recorded.launched_with,
            server.before.engine,
            server.proof.digest_before,
            "launch",
        )
        for group in comparable(launched, lambda server: server.proof.digest_before)
        if len(
            {(server.given.recorded.launched_with, server.proof.digest_before) for server in group}
        )
        == 1
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
