"""What do the servers really hold? Digests and versions side by side."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import ServerError
from skyctl.http.client import ControlClient
from skyctl.http.fanout import fan_out
from skyctl.http.target import ServerTarget
from skyctl.push.alike import arranged, comparable
from skyctl.push.samples import Sample, differing

DIGEST_METHOD = "skyctl_weight_digest"


@dataclass(frozen=True)
class WeightsReport:
    """One server's weights. `digest` and `version` are "" and None when it cannot say; `detail`
    tells why, or how the digest was made."""

    server: str
    ok: bool
    digest: str = ""
    version: str | None = None
    detail: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Verification:
    """All servers' reports, and whether those that can be compared (`push/alike.py`) hold the
    same: None when too few could say."""

    servers: tuple[WeightsReport, ...]
    agree: bool | None

    def to_json(self) -> dict[str, Any]:
        return {"servers": [report.to_json() for report in self.servers], "agree": self.agree}

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Verification:
        """Inverse of `to_json`."""
        return cls(tuple(WeightsReport(**row) for row in data["servers"]), data["agree"])


async def verify(
    servers: Sequence[ServerTarget], *, client: ControlClient, timeout_s: float
) -> Verification:
    """Ask every server for the digest and the version of its weights. Never raises for a server."""

    async def ask(target: ServerTarget) -> WeightsReport:
        server = VLLMServer(client, target, timeout_s=timeout_s)
        digest, detail = await weights_digest(server, timeout_s=timeout_s)
        return WeightsReport(target.name, True, digest, await server.weight_version(), detail)

    outcomes = await fan_out(servers, ask, timeout_s=timeout_s * 2)
    reports = tuple(
        outcome.value or WeightsReport(outcome.server, False, detail=outcome.detail)
        for outcome in outcomes
    )
    known = [report.digest for report in reports if report.digest]
    same = all(len(set(group)) == 1 for group in comparable(known, str))
    agree = (True if len(known) == len(reports) else None) if same else False
    return Verification(reports, agree)


async def weights_digest(
    server: VLLMServer, *, timeout_s: float, samples: Mapping[str, Sample] | None = None
) -> tuple[str, str]:
    """Digest over all workers of a server, with their arrangement, and a word on how it was made.

    skyctl's own method where the server has it, else vLLM's checksums, else "". `samples` are
    tensors whose bytes are known: a worker that holds others fails the verification.

    Raises:
        ServerError: the server does not answer, or holds other bytes than the samples.
    """
    try:
        results = await server.collective_rpc(
            DIGEST_METHOD, kwargs={"names": list(samples or ())}, timeout_s=timeout_s
        )
        if results:
            _check_samples(server.target.name, samples or {}, results)
            digest = _combined([_digest_of(result) for result in results])
            return arranged(digest, _arrangement_of(results[0])), ""
    except ServerError as error:
        if not error.status:
            raise
    try:
        checksums = await server.weight_checksums(timeout_s=timeout_s)
    except ServerError as error:
        if not error.status:
            raise
        checksums = None
    if not checksums:
        return "", "the server has no way to digest its weights"
    return _combined(sorted(checksums.items())), "by vLLM's checksums"


def _check_samples(name: str, samples: Mapping[str, Sample], results: Sequence[Any]) -> None:
    for result in results:
        answered = result.get("samples", {}) if isinstance(result, dict) else {}
        if wrong := differing(samples, answered):
            raise ServerError(
                f"{name}: {wrong[0]} is not what was sent ({len(wrong)} of {len(samples)} sampled "
                "tensors differ)"
            )


def _digest_of(result: Any) -> str:
    """One worker's answer: a mapping, or what /collective_rpc made of something else."""
    return str(result["digest"] if isinstance(result, dict) else result)


def _arrangement_of(result: Any) -> str:
    return str(result.get("arrangement", "")) if isinstance(result, dict) else ""


def _combined(parts: Sequence[Any]) -> str:
    return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()
