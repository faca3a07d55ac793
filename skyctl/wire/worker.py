"""The methods of skyctl's worker extension, by the names that servers call them by."""

from __future__ import annotations

from enum import StrEnum


class WorkerMethod(StrEnum):
    """Called over a server's control routes (`Server.collective_rpc`, `ask_workers`)."""

    STARTED_WITH = "skyctl_started_with"
    UPDATE_PROBLEM = "skyctl_update_problem"
    NCCL = "skyctl_nccl"
    KEEP_ANSWER = "skyctl_leave_answer"
    KEPT_ANSWERS = "skyctl_answers"
    FIT = "skyctl_fit"
    ADAPTER_FIT = "skyctl_adapter_fit"
    ADAPTER_TAKE = "skyctl_adapter_take"
    ADAPTER_WRITE = "skyctl_adapter_write"
    ADAPTER_RELEASE = "skyctl_adapter_release"
    DIGEST = "skyctl_weight_digest"
    DRAFT_USES = "skyctl_draft_uses"
    LOAD_DRAFT = "skyctl_load_draft"
    TENSOR_PARTS = "skyctl_tensor_parts"
    WRITE_TENSORS = "skyctl_write_tensors"
    WEIGHTS_SHARE = "skyctl_weights_share"
    WEIGHTS_FILL = "skyctl_weights_fill"
    WEIGHTS_OPEN = "skyctl_weights_open"
    WEIGHTS_COPY = "skyctl_weights_copy"
    WEIGHTS_CLOSE = "skyctl_weights_close"
    WATCH_RELOAD = "skyctl_watch_reload"
    REPACK_TIED = "skyctl_repack_tied"
    LEAVE_GROUP = "skyctl_leave_group"
    FREE_CACHED = "skyctl_free_cached"
    LAYOUT = "skyctl_layout"
    LAYOUT_OPEN = "skyctl_layout_open"
    LAYOUT_MAP = "skyctl_layout_map"
    LAYOUT_STAGE = "skyctl_layout_stage"
    LAYOUT_ARRIVED = "skyctl_layout_arrived"
    LAYOUT_LOAD = "skyctl_layout_load"
    LAYOUT_RECEIVE = "skyctl_layout_receive"
    LAYOUT_PROCESS = "skyctl_layout_process"
    LAYOUT_PROVEN = "skyctl_layout_trust"
    LAYOUT_CLOSE = "skyctl_layout_close"
