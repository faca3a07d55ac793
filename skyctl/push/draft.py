"""Servers that draft tokens by weights of their own (speculative decoding). A push brings both: the
weights of a draft model from `--draft DIR`, those of an MTP head from the checkpoint itself.

Workers load them from their files once they hold the model's, while their server is paused: no
request meets one without the other.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skyctl.checkpoints.checkpoint import Checkpoint, locate, read_checkpoint
from skyctl.checkpoints.compat import Answer, check_compatible, open_questions, read_running
from skyctl.checkpoints.finite import refuse_not_finite
from skyctl.checkpoints.header import torch_name
from skyctl.engines.base import lacks_method
from skyctl.engines.launches import draft_problem
from skyctl.errors import PreflightError, ServerError
from skyctl.push.request import PushFleet, PushRequest
from skyctl.push.rows import KnownRows, read_rows
from skyctl.push.server_facts import ServerFacts
from skyctl.push.servers import Holds, PushedServer, alive, each
from skyctl.push.source import Source, refuse_changed_draft
from skyctl.push.verify import weights_digest
from skyctl.wire.messages import TensorUse
from skyctl.wire.worker import WorkerMethod

_MTP = "mtp"


@dataclass(frozen=True)
class Draft:
    """What the servers of a push that draft tokens are to draft with."""

    checkpoint: Checkpoint
    """The files that it is in."""
    servers: frozenset[str]
    """The names of these servers."""
    rows: tuple[KnownRows, ...]
    """What their draft models must hold afterwards."""
    directory: str = ""
    """The directory of these files; "" if they are the pushed checkpoint's own."""

    async def load(self, servers: Sequence[PushedServer], *, timeout_s: float) -> None:
        """Have the servers that hold the model's new weights load these."""

        async def load(server: PushedServer) -> None:
            path = {"path": str(self.checkpoint.path)}
            await server.control.ask_workers(WorkerMethod.LOAD_DRAFT, path, timeout_s=timeout_s)

        loading = [s for s in alive(servers) if s.holds is Holds.NEW and s.name in self.servers]
        await each(loading, load, timeout_s=timeout_s * 2, call_name="draft model")

    async def compare(self, server: PushedServer, *, timeout_s: float) -> None:
        """Compare what a server drafts with with the files. Raises ServerError: it is something
        else, or nothing could be compared.
        """
        if server.name not in self.servers:
            return
        report = await weights_digest(
            server.control, timeout_s=timeout_s, rows=self.rows, draft=True
        )
        if report.compared is None or not report.compared.tensors:
            reason = report.compared.why_not if report.compared else "by checksums alone"
            raise ServerError(
                f"{server.name}: no tensor of its draft model could be compared with "
                f"{self.checkpoint.path} ({reason}); to do without: --no-verify"
            )
        server.proof.draft_digest = report.digest


async def check_draft(
    request: PushRequest,
    fleet: PushFleet,
    source: Source,
    facts: Sequence[ServerFacts],
    servers: Sequence[PushedServer],
) -> tuple[Draft | None, list[str]]:
    """The draft weights of a push, None if no server has any; and notes.

    Raises:
        NotFoundError, PreflightError, WeightsGone: they are missing, or do not fit, or are not what
            they were; nothing was touched.
    """
    drafting = [(fact, s) for fact, s in zip(facts, servers, strict=True) if fact.process.drafts]
    if not drafting:
        if request.draft:
            raise PreflightError(
                f"--draft {request.draft}: no server drafts tokens by weights of its own",
                hint="leave --draft out",
            )
        return None, []
    checkpoint, beside = await asyncio.to_thread(
        _files, request, fleet, source, [fact for fact, _ in drafting]
    )
    if beside and request.scan_nan is not False and not request.dry_run:
        await asyncio.to_thread(refuse_not_finite, checkpoint)
    first, timeout_s = drafting[0][0], fleet.timeouts.control_s
    base = await asyncio.to_thread(read_running, first.process.draft_model or first.process.model)
    questions = {tensor.name: tensor for tensor in open_questions(checkpoint, base)}
    questions |= {tensor.name: tensor for tensor in checkpoint.tensors}
    tensors = [(t.name, torch_name(t.dtype, t.name), list(t.shape)) for t in questions.values()]
    uses = await asyncio.gather(
        *(_uses(fact, server, checkpoint, tensors, timeout_s) for fact, server in drafting)
    )
    # the model's own configuration was compared already
    running = base.config if beside else checkpoint.config
    answers = [Answer(running, None, each, False) for each in uses]
    notes = await asyncio.to_thread(
        check_compatible, checkpoint, base, answers, allowed=request.allow_config
    )
    taken = {name for each in uses for name, use in each.items() if use is TensorUse.LOADED}
    part = replace(checkpoint, tensors=tuple(t for t in checkpoint.tensors if t.name in taken))
    rows = await asyncio.to_thread(read_rows, part)
    names = frozenset(fact.name for fact, _ in drafting)
    draft = Draft(checkpoint, names, rows, str(checkpoint.path) if beside else "")
    return draft, notes if beside else []


def _files(
    request: PushRequest, fleet: PushFleet, source: Source, facts: Sequence[ServerFacts]
) -> tuple[Checkpoint, bool]:
    """What these servers are to draft with, and whether it lies beside the pushed checkpoint. With
    the model that they were started with goes the draft model that they were started with.
    """
    directory = request.draft or _at_start(fleet, source, facts)
    if directory and (request.draft or Path(directory).resolve() != Path(source.path).resolve()):
        checkpoint = read_checkpoint(directory)
        refuse_changed_draft(request.expected_draft, checkpoint)
        return checkpoint, True
    for fact in facts:
        if not directory and (fact.process.drafts != _MTP or source.checkpoint is None):
            raise _refused(fact.name, fact.process.drafts)
    return source.files, False


def _at_start(fleet: PushFleet, source: Source, facts: Sequence[ServerFacts]) -> str:
    """The draft model that all these servers were started with, if the source is the model that
    they were started with; else "".
    """
    first, path = facts[0].process.draft_model, source.path and Path(source.path).resolve()
    for fact in facts:
        planned = fleet.model_path or ""  # perhaps with a revision, which servers do not name
        model = locate(
            planned if planned.partition("@")[0] == fact.process.model else fact.process.model
        )
        if model is None or model.resolve() != path or fact.process.draft_model != first:
            return ""
    return first


def _refused(server: str, drafts: str) -> PreflightError:
    return PreflightError(
        f"{server}: {draft_problem(drafts)}",
        hint="push both: --draft DIR; or restart the servers on the checkpoint instead",
    )


async def _uses(
    fact: ServerFacts,
    server: PushedServer,
    checkpoint: Checkpoint,
    tensors: Sequence[tuple[str, str, list[int]]],
    timeout_s: float,
) -> dict[str, TensorUse]:
    """What a server's draft model takes of these tensors, by their names."""
    try:
        answers = await server.control.ask_workers(
            WorkerMethod.DRAFT_USES,
            {"path": str(checkpoint.path), "tensors": tensors},
            timeout_s=timeout_s,
        )
    except ServerError as error:
        if lacks_method(error):  # started without skyctl's worker extension
            raise _refused(server.name, fact.process.drafts) from error
        raise PreflightError(
            f"{server.name}: its draft weights cannot be pushed: {error.message}",
            hint="restart the servers on the checkpoint instead",
        ) from error
    uses = {}
    for number, (name, *_) in enumerate(tensors):
        of_workers = {TensorUse(answer[number]) for answer in answers}
        uses[name] = next(use for use in TensorUse if use in of_workers)
    if not any(uses[tensor.name] is TensorUse.LOADED for tensor in checkpoint.tensors):
        raise PreflightError(
            f"{checkpoint.path} holds nothing that {server.name} drafts tokens with "
            f"(speculative decoding by {fact.process.drafts})",
            hint="push its draft weights as well: --draft DIR; or restart the servers on it",
        )
    return uses
