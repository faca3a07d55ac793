"""Weights from Python: checkpoints, tensors of a trainer, and updates that a trainer sends."""

from __future__ import annotations

import math
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from os import PathLike
from typing import Any, Literal

from skyctl.api.direct import is_direct, push_direct
from skyctl.api.session import SessionHolder
from skyctl.api.trainer_opening import TrainerOpening
from skyctl.api.updates import Update, push_tensors, updating
from skyctl.checkpoints.checkpoint import absolute
from skyctl.checkpoints.live import NamedTensors
from skyctl.core.registry import FleetRef
from skyctl.core.requests import Forget, SaveWeights
from skyctl.core.results import KeptVersion, SavedWeights, WeightsState, push_result
from skyctl.errors import UsageError
from skyctl.live.model import MATCH, Names, Weights
from skyctl.live.options import TrainerOptions
from skyctl.live.ranks import PATIENCE_S
from skyctl.push.forecast import Stage
from skyctl.push.request import Layout, PushRequest, PushResult, usual_mode
from skyctl.push.trial_file import trial_content
from skyctl.push.verify import Verification
from skyctl.states import TRAINER, PauseMode
from skyctl.store.journal import JobEvent


class WeightsFleet(SessionHolder):
    """The part of `Fleet` that changes and examines weights."""

    async def sync_weights(
        self,
        source: str | PathLike[str] | NamedTensors,
        *,
        weight_version: str | None = None,
        dtype: object = None,
        transport: str = "auto",
        chunk_size: int | None = None,
        stage: Stage = "auto",
        stage_rate: int | None = None,
        layout: Layout = "auto",
        pause_mode: PauseMode | None = None,
        verify: bool | None = None,
        dry_run: bool = False,
        scan_nan: bool | None = None,
        allow_unproven_reload: bool = False,
        allow_config: Sequence[str] = (),
        trial: Mapping[str, Any] | str | PathLike[str] | None = None,
        keep: bool = False,
        draft: str | PathLike[str] | None = None,
        rolling: int = 0,
        colocated: bool = False,
        sleep_after: int = 0,
        on_event: Callable[[JobEvent], None] = lambda event: None,
        timeout_s: float | None = None,
    ) -> PushResult:
        """Push weights into every server while it runs: all end verified at one version.

        `source` is a checkpoint directory, or what a trainer has in memory after its optimizer
        step: a state dict, or an iterator, plain or async, of (name, tensor). Names, shapes and
        dtypes must be those of the Hugging Face checkpoint the servers run; sharded tensors are
        gathered by the caller (on one rank: `(name, tensor.full_tensor())`).

        Servers copy tensors on a GPU of their machine out of this process, as in a push by
        `trainer`: no file has them then. Others are taken one by one: copied to host memory,
        written to a private directory, and pushed from there once all have been checked, so the
        servers keep running until then. That costs one copy of each tensor off its device and one
        write, and the size of the model in /dev/shm if it fits (twice that during the push), else
        on the disk of the state directory. The fleet keeps them until other weights replace them or
        it goes down, because a replica that restarts is given the same weights. The tensors may
        change again as soon as the iterator has been read, and at the latest when this returns.
        Dead processes leave nothing: what they wrote is swept by the fleet's next push, `up` or
        `down`.

        Args:
            weight_version: label of the new weights; derived from their digest when None.
            dtype: for tensors only. None refuses tensors of another dtype than what runs; "match"
                converts each to that; a torch dtype (or its name) converts all floating-point
                tensors; "as-is" leaves it to the servers to cast.
            chunk_size: bytes per chunk; None takes the fleet's.
            stage: where the checkpoint is before servers are frozen: "gpu", "host" or "stream".
            stage_rate: bytes per second that are read at most while servers serve; None takes the
                fleet's.
            layout: "runtime" copies tensors straight into parameters, "checkpoint" passes them to
                vLLM's loader; "auto" copies where a server has seen it proven.
            pause_mode: what becomes of running requests; "keep" when None, "wait" with a trial.
            verify: compare what servers hold afterwards; None does as the fleet file says.
            scan_nan: refuse NaN and infinity: True reads the whole checkpoint first, False checks
                nothing, None checks what is sent.
            allow_unproven_reload: accept weights that get another digest than expected.
            allow_config: keys of config.json in which the checkpoint may differ from what the
                servers run; they keep computing by theirs.
            trial: prompts that the new weights must answer as expected before users get them, as
                the path or the content of a trial file (docs/how-to/careful-pushes.md).
            rolling: update this many servers at a time, out of the router, while the others serve.
            colocated: sleeping servers are woken for it, weights first; asleep again on failure.
            sleep_after: level to sleep at afterwards; 0 is none.
            keep: make the fleet's own copy first, and push that (`kept_weights` lists them). Of
                weights that servers copied from a GPU, a server writes it after the push.
            draft: the checkpoint of the model that servers draft tokens with.
            on_event: receives the push's stages, progress and notes as they happen.
            timeout_s: bounds the wait for the push, from when the tensors are written.

        Raises:
            PreflightError, NotFoundError, UsageError: refused; nothing was paused.
            ConflictError: another push is in progress.
            TrialFailed: the new weights were not accepted; `details["trial"]` has the answers.
            PushError: it failed midway; `details["servers"]` says how each server was left.
            DeadlineExceeded: it has not ended after `timeout_s`; it goes on, or, where servers
                copied from a GPU, was cancelled and has ended.
        """
        request = PushRequest(
            checkpoint="",
            transport=transport,
            chunk_size=chunk_size,
            stage=stage,
            stage_rate=stage_rate,
            layout=layout,
            weight_version=weight_version,
            pause_mode=pause_mode or usual_mode(leaves_router=trial is not None or rolling > 0),
            verify=verify,
            dry_run=dry_run,
            scan_nan=scan_nan,
            allow_unproven_reload=allow_unproven_reload,
            allow_config=tuple(allow_config),
            trial=trial_content(trial),
            keep=keep,
            rolling=rolling,
            colocated=colocated,
            sleep_after=sleep_after,
            draft="" if draft is None else self._path(draft),
        )
        async with self._connected() as fleet:
            if isinstance(source, str | PathLike):
                request = replace(request, checkpoint=self._path(source))
                job = await fleet.wait_job(await fleet.start_push(request), on_event, timeout_s)
                return push_result(job)
            options: dict[str, Any] = {"dtype": dtype, "on_event": on_event, "timeout_s": timeout_s}
            reason = ""
            if is_direct(source, request):
                result, reason = await push_direct(self, source, request, **options)
                if result is not None:
                    return result
            result = push_result(await push_tensors(fleet, source, request, **options))
            if reason:
                result.notes.append(f"the tensors went through a file: {reason}")
            return result

    def trainer(
        self,
        weights: Weights,
        *,
        names: Names | None = None,
        dtype: object = MATCH,
        group: Any = None,
        patience_s: float = PATIENCE_S,
        transport: Literal["auto", "ipc", "gloo", "nccl"] = "auto",
    ) -> TrainerOpening:
        """Connect a trainer, of which each rank has a part of the weights in memory.

            live = await fleet.trainer(model)     # on every rank of a torch.distributed job
            result = await live.push("step-12")

        Nothing is gathered: each rank sends what it has. Only rank 0 speaks with the fleet. Opening
        it compares the model with the servers'; a difference names rank and tensor.

        Args:
            weights: a torch.nn.Module, sharded by FSDP 2 or tensor parallelism or not at all; a
                mapping of names to tensors or DTensors; or a function that says which parts of a
                tensor this rank has (`skyctl.live.model.Slices`).
            names: from a trainer's name to the Hugging Face name; to several names for a fused
                tensor in which these lie one after the other, to None for one that is not sent.
            dtype: what is sent: "match" converts float32 masters to what the servers run; others
                as of `sync_weights`.
            group: the ranks' torch.distributed group, if that is not the default group.
            patience_s: how long ranks wait for each other.
            transport: how servers get at the ranks' memory: they map it ("ipc", one machine), or
                ranks send it point to point ("nccl" between GPUs, "gloo" between CPUs). "auto" has
                "ipc" on one machine, between several the others.

        Returns:
            What is to be awaited or entered by `async with`; `.blocking()` of it is for programs
            without an event loop.

        Raises:
            PreflightError, UsageError: the ranks do not have what the servers run.
            ConflictError: another trainer is open on the fleet.
            RankFailed: a rank died or did not come. FleetDownError: the fleet does not run.
        """
        options = TrainerOptions(weights, names, dtype, group, patience_s, transport)
        return TrainerOpening(self, options)

    @asynccontextmanager
    async def update(
        self,
        version: str,
        *,
        checkpoint: str | PathLike[str] | None = None,
        digest: str | None = None,
        pause_mode: PauseMode = "keep",
        verify: bool | None = None,
        keep: bool = False,
        on_event: Callable[[JobEvent], None] = lambda event: None,
        timeout_s: float | None = None,
    ) -> AsyncIterator[Update]:
        """Freeze the fleet while this process sends weights with an engine of its own.

            async with fleet.update("step-12") as update:
                for server in update.servers: ...  # init, start, update and finish, as it does

        The block is entered when all servers are frozen. When it is left, sessions that are still
        open are finished, caches dropped, the servers' weights compared, labelled with `version`
        and resumed; the outcome is in `update.result`. If the block raises, servers that were not
        written to go on at their old weights, and the others are quarantined, as after a push that
        broke off.

        Args:
            checkpoint: the same weights on disk: servers are compared with it, and a server that
                restarts gets them. Without it servers are only compared with each other, and a
                server that restarts stays closed until the next push or update; unchanged weights
                count as a failure, too.
            digest: the digest that each server's weights must have (`weights_digest` of an earlier
                push).
            pause_mode: what becomes of running requests.
            verify: whether to compare at all; None does with a digest, else as the fleet file says.
            keep: a server then writes what it got into a copy of the fleet's own on disk, which
                servers that restart get; the next push waits until that is whole. Refused if none
                could.
            timeout_s: for the block; None takes `weight_transfer.update_timeout_s`.

        Raises:
            UsageError: a `digest` without `verify`, or no time to send in.
            PreflightError: refused; nothing was paused. ConflictError: another command acts.
            PushError: `details["servers"]` says how each server was left.
        """
        if digest is not None and verify is False:
            raise UsageError(
                "a digest is compared as weights are verified, and verify is False",
                hint="leave one of the two out",
            )
        if timeout_s is not None and not 0 < timeout_s < math.inf:
            # once the servers are frozen it could only quarantine them
            raise UsageError(
                f"timeout_s={timeout_s} leaves the trainer no time to send in, or no end of it",
                hint="leave it out for weight_transfer.update_timeout_s",
            )
        request = PushRequest(
            checkpoint="" if checkpoint is None else self._path(checkpoint),
            transport=TRAINER,
            weight_version=version,
            pause_mode=pause_mode,
            verify=verify if digest is None else True,
            weights_digest=digest,
            keep=keep,
        )
        async with (
            self._connected() as fleet,
            updating(fleet, request, on_event=on_event, timeout_s=timeout_s) as update,
        ):
            yield update

    async def model_path(self) -> str | None:
        """Directory or hub id of what the servers run now: what a trainer can start from.

        None if an attached fleet does not say, or after an update whose weights are in no file.
        """
        async with self._connected() as fleet:
            rows = (await fleet.weights()).servers
            if any(row.weight_version is not None and not row.checkpoint for row in rows):
                return None
            return await fleet.model_path()

    async def weights(self) -> WeightsState:
        """What each server carries, and the history of pushes."""
        async with self._connected() as fleet:
            return await fleet.weights()

    async def kept_weights(self) -> list[KeptVersion]:
        """The versions of which the fleet keeps its own copy, newest first."""
        async with self._connected() as fleet:
            return list(await fleet.kept_versions())

    async def forget_weights(self, version: str) -> int:
        """Delete the fleet's own copy of a version; returns the bytes of weights in it.

        Raises:
            NotFoundError: it is not kept. ConflictError: the fleet runs it.
        """
        async with self._connected() as fleet:
            return await fleet.forget_version(Forget(version))

    async def save_weights(
        self, directory: str | PathLike[str], *, version: str = ""
    ) -> SavedWeights:
        """Have a server write what it runs into a new directory, as a Hugging Face checkpoint. It
        serves meanwhile; pushes are refused.

        Args:
            version: which weights the fleet must serve; "" for whichever it does.

        Raises:
            PreflightError: its weights cannot be read out of it, or the directory is in use.
            NotFoundError: the fleet serves another version.
        """
        path = os.path.abspath(directory) if isinstance(self._ref, FleetRef) else directory  # noqa: PTH100, ASYNC240
        async with self._connected() as fleet:
            return await fleet.save_weights(SaveWeights(str(path), version))

    async def verify_weights(self) -> Verification:
        """Compare what the servers hold now, byte for byte."""
        async with self._connected() as fleet:
            return await fleet.verify_weights()

    def _path(self, checkpoint: str | PathLike[str]) -> str:
        """Absolute for a fleet on this machine; for another, a path on the fleet's machine."""
        return absolute(str(checkpoint)) if isinstance(self._ref, FleetRef) else str(checkpoint)
