"""Why a replica cannot run on several machines as the fleet file has it."""

from __future__ import annotations


def spanning_refusal(
    nodes: int,
    *,
    launcher: str,
    hosts: int,
    stages: int,
    copies: int,
    share_gpus: bool,
    sender: str,
) -> str:
    """One sentence with the next step, "" where nothing is wrong. `stages` and `copies` are the
    pipeline- and data-parallel sizes, `sender` names what would bring tensors in, "" for disk."""
    if nodes == 1:
        return ""
    asked = f"`nodes_per_replica: {nodes}`"
    if launcher != "ssh":
        return f"{asked} goes with `launcher: ssh`: elsewhere a replica runs on one machine"
    if stages % nodes:
        return (
            f"{asked} with `pipeline_parallel_size: {stages}`: each machine takes whole pipeline "
            f"stages; write a multiple of {nodes}"
        )
    if hosts < nodes:
        return f"{asked}, and `ssh: hosts` names {hosts}: add machines"
    if copies > 1:
        return f"{asked} does not go with `data_parallel_size`: write more replicas"
    if share_gpus:
        return f"{asked} does not go with `share_gpus`: leave one of the two out"
    if sender:
        return (
            f"{asked} with {sender}: a sender reaches the workers of one machine; leave it out: "
            "each machine reads the checkpoint (disk)"
        )
    return ""
