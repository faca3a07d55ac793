"""What a replica on several machines rules out in a fleet file."""

from __future__ import annotations

from skyctl.fleetfile.sections import WeightTransferSection


def check_spanning(
    nodes: int,
    *,
    launcher: str,
    hosts: int,
    stages: int,
    copies: int,
    share_gpus: bool,
    transfer: WeightTransferSection,
) -> None:
    """Raise ValueError if a replica of so many pipeline `stages` and `copies` of the model cannot
    run on so many of the file's `hosts`.
    """
    setting = f"`nodes_per_replica: {nodes}`"
    if launcher != "ssh":
        raise ValueError(
            f"{setting} goes with `launcher: ssh`: elsewhere a replica runs on one machine"
        )
    if stages % nodes:
        raise ValueError(
            f"{setting} with `pipeline_parallel_size: {stages}`: each machine takes whole "
            f"pipeline stages; write a multiple of {nodes}"
        )
    if hosts < nodes:
        raise ValueError(f"{setting}, and `ssh: hosts` names {hosts}: add machines")
    if copies > 1:
        raise ValueError(f"{setting} does not go with `data_parallel_size`: write more replicas")
    if share_gpus:
        raise ValueError(f"{setting} does not go with `share_gpus`: leave one of the two out")
    transport, backend = transfer.transport, transfer.backend
    if backend or transport not in ("auto", "disk"):
        sender = f"backend {backend}" if backend else f"transport {transport}"
        raise ValueError(
            f"{setting} with {sender}: a sender reaches the workers of one machine; leave it "
            "out: each machine reads the checkpoint (disk)"
        )
