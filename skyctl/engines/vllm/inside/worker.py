"""`SkyctlWorkerExtension`: methods added to vLLM's workers, called through /collective_rpc."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.engines.vllm.inside.answers import keep_answer, kept_answers
from skyctl.engines.vllm.inside.draft import draft_model, load_draft
from skyctl.engines.vllm.inside.experts import (
    pack_after_updates,
    repack_tied_layers,
    update_problem,
)
from skyctl.wire.layouts import Program
from skyctl.wire.messages import DIGEST_VERSION, ReadTensor, RowQuestion, WeightsOffer
from skyctl.wire.nccl import leave_group, nccl_problem, nccl_settings

if TYPE_CHECKING:
    from skyctl.engines.vllm.inside.adapter_memory import GivenAdapters
    from skyctl.engines.vllm.inside.peers import PeerLoader
    from skyctl.engines.vllm.inside.worker_copies import WorkerCopies

_STARTED_AT = time.time()
pack_after_updates()  # vLLM imports this module in its workers, before they have a model


_READ = {
    "model_config": ("model",),
    "load_config": ("load_format",),
    "weight_transfer_config": ("backend",),
    "kv_transfer_config": ("kv_role", "kv_connector_extra_config"),
    "parallel_config": ("enable_eplb",),
    "speculative_config": ("method", "model"),
}


def require_mapped() -> None:
    """Raise RuntimeError while the weights sleep (vLLM's `CuMemAllocator`): a request to read them
    may have come late, and a kernel that touches unmapped memory ends the worker.
    """
    allocators = sys.modules.get("vllm.device_allocator.cumem")
    allocator = getattr(getattr(allocators, "CuMemAllocator", None), "instance", None)
    memory = allocator.pointer_to_data.values() if allocator is not None else ()
    if any(getattr(part, "is_asleep", False) and part.tag == "weights" for part in memory):
        raise RuntimeError("the weights of this worker sleep")


class SkyctlWorkerExtension:
    """Mixed into vLLM's worker class by `--worker-extension-cls`.

    Names start with `skyctl_`: vLLM refuses an extension that shadows a worker's attribute.
    """

    device: Any
    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any

    def skyctl_weight_digest(
        self,
        rows: Sequence[dict[str, Any]] = (),
        numbered: Sequence[Sequence[str]] = (),
        finite: bool = False,
        draft: bool = False,
    ) -> dict[str, Any]:
        """Digest of the weights this worker computes with; see `digest.py`. With `draft`, of those
        that it drafts tokens with.

        `arrangement` says with which servers' it can be compared (`arrangement`), if they have
        the same `digest_version`. `rows` are `RowQuestion`s, whose `RowAnswer`s come back in order.
        `numbered` names parameters by rank, whose `numbers` are returned. With `finite`,
        `not_finite` names a parameter that holds NaN or infinity, "" if none does. `shares_out`:
        data-parallel ranks hold different experts, or parts of them, and the same of everything
        else.
        """
        from skyctl.engines.vllm.inside.digest import (
            answer_rows,
            arrangement,
            digest_model,
        )

        require_mapped()
        model = draft_model(self) if draft else self.model_runner.get_model()
        parallel, loader = self.vllm_config.parallel_config, self._skyctl_loader()
        names = numbered[loader.rank] if numbered else ()
        digests = digest_model(model, loader.running_names(names), finite=finite)
        return {
            **digests,
            "numbers": loader.numbers_of(names, digests["numbers"]),
            "place": loader.rank,
            "digest_version": DIGEST_VERSION,
            "arrangement": arrangement(self.vllm_config),
            "data_parallel_rank": parallel.data_parallel_index,
            "rank": parallel.rank,
            "shares_out": parallel.data_parallel_size > 1,  # a dense model's ranks are unrelated
            "rows": [asdict(row) for row in answer_rows(model, [RowQuestion(**q) for q in rows])],
        }

    def skyctl_tensor_parts(self, tensors: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """A `TensorPart` for each `ReadTensor`, in order; see `checkpoint.py`."""
        from skyctl.engines.vllm.inside.checkpoint import parts_of

        require_mapped()
        questions = [ReadTensor(**tensor) for tensor in tensors]
        return [asdict(part) for part in parts_of(self.model_runner.get_model(), questions)]

    def skyctl_write_tensors(
        self, path: str, inode: int, tensors: Sequence[dict[str, Any]]
    ) -> None:
        """Write this worker's part of each `ReadTensor` into a file; see `checkpoint.py`."""
        from skyctl.engines.vllm.inside.checkpoint import write_tensors

        require_mapped()
        model = self.model_runner.get_model()
        write_tensors(model, path, inode, [ReadTensor(**tensor) for tensor in tensors])

    def skyctl_weights_share(self, key: str, directory: str, pid: int) -> dict[str, Any]:
        """A `WeightsOffer` to the worker of another server; see `worker_copies.py`."""
        return asdict(self._skyctl_copies().share(key, directory, pid))

    def skyctl_weights_fill(self, key: str, chunk: int) -> None:
        """Copy a chunk of the weights to where the other worker reads it."""
        self._skyctl_copies().fill(key, chunk)

    def skyctl_weights_open(self, key: str, offers: Sequence[dict[str, Any]], pid: int) -> None:
        """Get ready to copy what the other server's workers offer, by rank."""
        offer = offers[self.vllm_config.parallel_config.rank]
        self._skyctl_copies().open(key, WeightsOffer(**offer), pid)

    def skyctl_weights_copy(self, key: str, chunk: int, last: bool) -> None:
        """Copy a chunk into the parameters."""
        self._skyctl_copies().copy(key, chunk, last)

    def skyctl_weights_close(self, free: bool) -> None:
        """End a copy, on either side; `free`: nothing maps the buffers any more."""
        copies = self._skyctl_copies()
        copies.release() if free else copies.close()

    def skyctl_leave_answer(self, nonce: str, method: str, kwargs: dict[str, Any]) -> None:
        """Call another of these methods and keep its answer for `skyctl_answers` (`answers.py`).
        Raises RuntimeError: it failed; the message names this worker's rank.
        """
        parallel = self.vllm_config.parallel_config
        rank = (parallel.data_parallel_index, parallel.rank)
        if not method.startswith("skyctl_"):
            raise ValueError(f"{method!r} is not a method of skyctl's")
        try:
            answer = getattr(self, method)(**kwargs)
        except Exception as error:
            raise RuntimeError(f"data-parallel rank {rank[0]}: {method}: {error}") from error
        keep_answer(nonce, rank, answer)

    def skyctl_answers(self, nonce: str) -> list[dict[str, Any]]:
        """What the workers of all data-parallel ranks left under `nonce`."""
        return kept_answers(nonce)

    def skyctl_watch_reload(self) -> None:
        """Before a `reload_weights`: have it note what it does not fill; see `completeness.py`."""
        from skyctl.engines.vllm.inside.completeness import watched_load

        self._skyctl_not_loaded = watched_load(self.model_runner.get_model())

    def skyctl_repack_tied(self) -> None:
        """Complete a `reload_weights`; see `experts.py`.

        Raises:
            RuntimeError: the reload has left a part of the model wrong (`experts.py`), or did not
                fill it.
        """
        from skyctl.engines.vllm.inside.completeness import require_complete

        require_complete(self.__dict__.pop("_skyctl_not_loaded", []))
        model = self.model_runner.get_model()
        if problem := update_problem(model):
            raise RuntimeError(problem)
        repack_tied_layers(model)

    def skyctl_started_with(self) -> dict[str, Any]:
        """The parts of vLLM's configuration that a push reads, as /server_info has them."""
        config = self.vllm_config
        parts = {
            name: {key: getattr(section, key) for key in keys}
            for name, keys in _READ.items()
            if (section := getattr(config, name, None)) is not None
        }
        if hasattr(config, "weight_transfer_config"):
            parts.setdefault("weight_transfer_config", {})
        return parts

    def skyctl_update_problem(self) -> str:
        """Why this worker must not be pushed to; "" if it may. See `experts.py`."""
        return update_problem(self.model_runner.get_model())

    def skyctl_fit(
        self, config: Mapping[str, Any], tensors: Sequence[tuple[str, str, Sequence[int]]]
    ) -> dict[str, Any]:
        """How a checkpoint with this config.json, and tensors (name, torch dtype, shape), fits this
        worker's model; see `fit.py`.
        """
        from skyctl.engines.vllm.inside.fit import configurations, ties_output, uses

        model = self.model_runner.get_model()
        return {
            **configurations(self.vllm_config.model_config, config, started_at=_STARTED_AT),
            "uses": uses(model, tensors),
            "ties_output": ties_output(model),
        }

    def skyctl_draft_uses(
        self, path: str, tensors: Sequence[tuple[str, str, Sequence[int]]]
    ) -> list[str]:
        """What the draft model's loader does with each tensor (name, torch dtype, shape) of the
        checkpoint at `path`.

        Raises:
            RuntimeError: this worker has no draft model that could be loaded again, or no such
                directory.
        """
        from skyctl.engines.vllm.inside.fit import uses

        if not Path(path).is_dir():
            raise RuntimeError(f"{path} is not on its machine")
        return list(uses(draft_model(self), tensors))

    def skyctl_load_draft(self, path: str) -> None:
        """Load the draft model again, from a checkpoint's directory; see `draft.py`."""
        load_draft(self, path)

    def skyctl_adapter_fit(
        self, config: Mapping[str, Any], names: Sequence[str]
    ) -> dict[str, list[str]]:
        """What this worker would leave out of an adapter with this configuration and tensors of
        these names; see `adapter_fit.py`.
        """
        from skyctl.engines.vllm.inside.adapter_fit import unapplied, unread

        model = self.model_runner.get_model()
        return {"unapplied": unapplied(model, names), "unread": unread(config)}

    def skyctl_adapter_take(
        self,
        path: str,
        tensors: Sequence[Any],
        numbers: Sequence[int],
        source: Sequence[Any],
        needed: Sequence[str],
    ) -> str:
        """Copy an adapter's tensors out of another process's memory; see `adapter_memory.py`."""
        return self._skyctl_adapters().take(path, tensors, numbers, source, needed)

    def skyctl_adapter_write(self, path: str, file: str, offset: int) -> str:
        """Have the first worker write an adapter that it was given; see `adapter_memory.py`."""
        parallel = self.vllm_config.parallel_config
        if parallel.rank or parallel.data_parallel_index:
            return "absent"
        return self._skyctl_adapters().write(path, file, offset)

    def skyctl_adapter_release(self, paths: Sequence[str]) -> None:
        """Drop the memory of adapters that files have by now; vLLM keeps them loaded."""
        self._skyctl_adapters().release(paths)

    def skyctl_nccl(self) -> dict[str, Any]:
        """What a sender must know of this worker's NCCL; see `wire/nccl.py`."""
        return {"problem": nccl_problem(), "settings": nccl_settings()}

    def skyctl_leave_group(self) -> None:
        """Leave the NCCL group of an earlier sender; see `wire/nccl.py`."""
        leave_group(self.weight_transfer_engine)

    def skyctl_free_cached(self) -> None:
        """Free what torch caches: before 0.32, buffers of an NCCL update are never reused."""
        import torch

        torch.cuda.empty_cache()

    def skyctl_layout(self, described: Sequence[str] = (), key: str = "") -> dict[str, Any]:
        """How parameters are made of checkpoint tensors (`layout.py`), less those `described`; what
        a trainer's `key` has mapped stays mapped.
        """
        loader = self._skyctl_loader()
        with loader.lock:
            return loader.report(described, key).to_wire()

    def skyctl_layout_open(
        self,
        programs: Sequence[Mapping[str, Any]],
        payload: str = "",
        offsets: Sequence[int] = (),
        buffer_bytes: int = 0,
    ) -> None:
        """Get ready for the program of this worker's rank; see `layout_load.py`."""
        loader = self._skyctl_loader()
        program = Program.from_wire(programs[loader.rank])
        with loader.lock:
            loader.open(program, payload, offsets, buffer_bytes)

    def skyctl_layout_process(self, chunk: int, keep: bool) -> None:
        """Process the parameters that this chunk completes as their layers would."""
        loader = self._skyctl_loader()
        with loader.lock:
            loader.process(chunk, keep)

    def skyctl_layout_map(
        self,
        programs: Sequence[Mapping[str, Any]],
        exports: Sequence[Sequence[Sequence[Any]]],
        key: str,
        pids: Sequence[int],
        staged: bool | None,
        group: Mapping[str, Any] | None = None,
        place: int = 0,
    ) -> bool:
        """Get ready for a trainer's pushes: programs and exports by rank; see `layout_load.py`.
        When one of the trainer's processes `pids`, of this machine, ends, its memory is released,
        or the group left. With a `group` the ranks send; `place` is that of this server's first
        worker there; see `peers.py`.
        """
        loader = self._skyctl_loader()
        rank = loader.rank
        program = Program.from_wire(programs[rank])
        loader.release_when_ended(pids, key)  # before: one that ends meanwhile is not seen after
        with loader.lock:
            if group is None:
                return loader.map(program, exports[rank], key, staged)
            return loader.join(program, exports[rank], key, staged, group, place + rank)

    def skyctl_layout_stage(self, numbers: Sequence[Mapping[str, int]] | None = None) -> None:
        """Begin to copy what a trainer exports, or sends, to beside the parameters. `numbers`, by
        rank, are those of tensors that are sent to vLLM's loader.
        """
        loader = self._skyctl_loader()
        with loader.lock:
            loader.stage_numbered(None if numbers is None else numbers[loader.rank])

    def skyctl_layout_arrived(self, key: str) -> bool:
        """Whether that has ended. Raises RuntimeError: what has this `key` was let go."""
        return self._skyctl_loader().has_arrived(key)

    def skyctl_layout_load(
        self, chunks: Sequence[int] | None, last: bool, rows: Sequence[dict[str, Any]] = ()
    ) -> list[dict[str, str]]:
        """Copy chunks from the sender's memory into the parameters; None: all. Returns these `rows`
        of what vLLM's loader was given.
        """
        loader = self._skyctl_loader()
        with loader.lock:
            received = loader.received([RowQuestion(**row) for row in rows])
            loader.load(chunks, last)
        return received

    def skyctl_layout_receive(self, sizes: Sequence[int]) -> None:
        """Copy chunks of these sizes out of the sender's broadcasts into the parameters."""
        loader = self._skyctl_loader()
        with loader.lock:
            loader.receive(sizes)

    def skyctl_layout_trust(self, layouts: Sequence[str]) -> None:
        """The layout of this worker's rank was compared with what vLLM's loader made."""
        loader = self._skyctl_loader()
        loader.mark_proven(layouts[loader.rank])

    def skyctl_layout_close(self) -> None:
        """Release the sender's memory."""
        loader = self._skyctl_loader()
        with loader.lock:
            loader.close()

    def _skyctl_copies(self) -> WorkerCopies:
        from skyctl.engines.vllm.inside.worker_copies import WorkerCopies

        copies: WorkerCopies | None = getattr(self, "_skyctl_worker_copies", None)
        if copies is None:
            copies = self._skyctl_worker_copies = WorkerCopies(self)
        return copies

    def _skyctl_adapters(self) -> GivenAdapters:
        from skyctl.engines.vllm.inside.adapter_memory import GivenAdapters

        given: GivenAdapters | None = getattr(self, "_skyctl_given_adapters", None)
        if given is None:
            given = self._skyctl_given_adapters = GivenAdapters(self)
        return given

    def _skyctl_loader(self) -> PeerLoader:
        from skyctl.engines.vllm.inside.peers import PeerLoader

        loader: PeerLoader | None = getattr(self, "_skyctl_layout_loader", None)
        if loader is None:
            loader = self._skyctl_layout_loader = PeerLoader(self)
        return loader
