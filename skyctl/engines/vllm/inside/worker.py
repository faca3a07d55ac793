"""`SkyctlWorkerExtension`: methods that vLLM's workers get, called through /collective_rpc."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from skyctl.engines.vllm.inside.experts import pack_after_updates
from skyctl.engines.vllm.inside.wire import DIGEST_VERSION, RowQuestion

pack_after_updates()  # vLLM imports this module in its workers, before they have a model


class SkyctlWorkerExtension:
    """Mixed into vLLM's worker class by `--worker-extension-cls`.

    Names start with `skyctl_`: vLLM refuses an extension that shadows a worker's attribute.
    """

    model_runner: Any
    vllm_config: Any
    weight_transfer_engine: Any

    def skyctl_weight_digest(self, rows: Sequence[dict[str, Any]] = ()) -> dict[str, Any]:
        """Digest of the weights this worker computes with; see `digest.py`.

        `arrangement` tells with which servers' it can be compared (`arrangement.py`), if they have
        the same `digest_version`. `rows` are `RowQuestion`s, whose `RowAnswer`s come back in order
        (`rows.py`).
        """
        from skyctl.engines.vllm.inside.arrangement import arrangement
        from skyctl.engines.vllm.inside.digest import digest_model
        from skyctl.engines.vllm.inside.rows import answer_rows

        model = self.model_runner.get_model()
        parallel = self.vllm_config.parallel_config
        return {
            **digest_model(model),
            "digest_version": DIGEST_VERSION,
            "arrangement": arrangement(self.vllm_config),
            "data_parallel_rank": parallel.data_parallel_index,
            "rank": parallel.rank,
            "rows": [asdict(row) for row in answer_rows(model, [RowQuestion(**q) for q in rows])],
        }

    def skyctl_leave_answer(self, nonce: str, method: str, kwargs: dict[str, Any]) -> None:
        """Call another of these methods and keep its answer for `skyctl_answers` (`ranks.py`).

        Raises:
            RuntimeError: the method failed; the message names this worker's rank.
        """
        from skyctl.engines.vllm.inside.ranks import leave

        parallel = self.vllm_config.parallel_config
        rank = (parallel.data_parallel_index, parallel.rank)
        if not method.startswith("skyctl_"):
            raise ValueError(f"{method!r} is no method of skyctl's")
        try:
            answer = getattr(self, method)(**kwargs)
        except Exception as error:
            raise RuntimeError(f"data-parallel rank {rank[0]}: {method}: {error}") from error
        leave(nonce, rank, answer)

    def skyctl_answers(self, nonce: str) -> list[dict[str, Any]]:
        """What the workers of all data-parallel ranks left under `nonce`."""
        from skyctl.engines.vllm.inside.ranks import collect

        return collect(nonce)

    def skyctl_repack_tied(self) -> None:
        """Complete a `reload_weights`; see `tied.py`.

        Raises:
            RuntimeError: the reload has left a part of the model wrong (`experts.py`).
        """
        from skyctl.engines.vllm.inside.experts import update_problem
        from skyctl.engines.vllm.inside.tied import repack_tied_layers

        model = self.model_runner.get_model()
        if problem := update_problem(model):
            raise RuntimeError(problem)
        repack_tied_layers(model)

    def skyctl_update_problem(self) -> str:
        """Why this worker must not be pushed to; "" when it may. See `experts.py`."""
        from skyctl.engines.vllm.inside.experts import update_problem

        return update_problem(self.model_runner.get_model())

    def skyctl_nccl(self) -> dict[str, Any]:
        """What a sender must know of this worker's NCCL; see `nccl.py`."""
        from skyctl.engines.vllm.inside.nccl import nccl_report

        return nccl_report()

    def skyctl_leave_group(self) -> None:
        """Let go of the NCCL group of an earlier sender; see `nccl.py`."""
        from skyctl.engines.vllm.inside.nccl import leave_group

        leave_group(self.weight_transfer_engine)

    def skyctl_free_cached(self) -> None:
        """Give back what torch caches: before 0.32, buffers of an NCCL update are never reused."""
        import torch

        torch.cuda.empty_cache()
