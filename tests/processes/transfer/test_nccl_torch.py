"""A sender's group and what it broadcasts, over gloo, to a rank that joins and receives as SGLang's
workers do.

What such a worker calls was read in 0.5.14: `init_custom_process_group` (`srt/utils/common.py`),
`_update_bucketed_weights_from_distributed` (`model_runner.py`) and `FlattenedTensorBucket`
(`weight_sync/tensor_bucket.py`).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import pytest

from skyctl.checkpoints.header import Tensor
from skyctl.engines.sglang.engine import dialect_for
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.reader import Filled
from skyctl.transfer.transports import load_transport
from skyctl.transfer.transports.base import HOST, Session
from skyctl.transfer.transports.nccl import TorchGroup, group_name

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

RANK = """
import json, sys
import torch, torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

# the worker's own group, as a server has one
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
init = json.loads(input())
name, rank, ranks = init["group_name"], init["rank_offset"], init["world_size"]
place = f"tcp://{init['master_address']}:{init['master_port']}"
store, _, _ = next(c10d.rendezvous(place, rank, ranks, timeout=c10d.default_pg_timeout))
group, _ = c10d._new_process_group_helper(
    ranks, rank, [], c10d.Backend("gloo"), dist.PrefixStore(name, store), group_name=name,
    timeout=c10d.default_pg_timeout,
)
c10d._world.pg_group_ranks[group] = dict(enumerate(range(ranks)))
print("joined", flush=True)
for line in sys.stdin:
    update = json.loads(line)
    kinds = [getattr(torch, dtype) for dtype in update["dtypes"]]
    sizes = [torch.empty(s, dtype=k).nbytes for s, k in zip(update["shapes"], kinds)]
    bucket = torch.empty(sum(sizes), dtype=torch.uint8)
    dist.broadcast(bucket, src=0, group=group)
    found = {}
    for n, k, s, part in zip(update["names"], kinds, update["shapes"], bucket.split(sizes)):
        weight = part.view(k).reshape(s)
        found[n] = [str(weight.dtype), list(weight.shape), weight.double().sum().item()]
    print(json.dumps(found), flush=True)
"""
TIMEOUT_S = 60.0
WEIGHTS = {
    "a": torch.arange(7, dtype=torch.bfloat16),
    "b": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "c": torch.full((5,), 3, dtype=torch.uint8),
    "d": torch.tensor(2.5, dtype=torch.float64),
    "e": torch.arange(4, dtype=torch.bfloat16),
}
NAMES = {"bfloat16": "BF16", "float32": "F32", "uint8": "U8", "float64": "F64"}


def header(name: str, weight: torch.Tensor) -> Tensor:
    return Tensor(name, NAMES[str(weight.dtype)[6:]], tuple(weight.shape), 0, 0, weight.nbytes)


def test_servers_hold_what_was_broadcast_and_newcomers_are_refused() -> None:
    transport = load_transport("nccl").speaking(dialect_for("0.5.14"))
    plan = plan_chunks(
        [header(*one) for one in WEIGHTS.items()],
        40,
        packing=transport.packing,
        alignment=transport.alignment,
    )
    group = TorchGroup(group_name("42"), 2, timeout_s=TIMEOUT_S, backend="gloo")
    session = Session("42", plan, 2, {"master_address": HOST, "master_port": group.port})
    dialect = dialect_for("0.5.14")
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert rank.stdin is not None and rank.stdout is not None
    watchdog = threading.Timer(TIMEOUT_S, rank.kill)
    watchdog.start()
    try:

        def tell(message: object) -> None:
            print(json.dumps(message), file=rank.stdin, flush=True)

        socket.create_connection((HOST, group.port)).close()  # the keeper's look at the address
        tell(transport.init_info(session, rank_offset=1, dialect=dialect))
        group.form()
        assert rank.stdout.readline() == "joined\n"
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection((HOST, group.port))
        found: dict[str, object] = {}
        for chunk in plan.chunks:
            filled = Filled(chunk.index, chunk.index, ())
            tell(transport.update_info(session, chunk, filled, server=0, dialect=dialect))
            slot = torch.zeros(chunk.size, dtype=torch.uint8)
            for placed in chunk.placed:
                size = placed.tensor.nbytes
                content = WEIGHTS[placed.tensor.name].flatten().view(torch.uint8)
                slot[placed.offset : placed.offset + size] = content
            group.broadcast(slot)
            found |= json.loads(rank.stdout.readline())
    finally:
        watchdog.cancel()
        rank.kill()
        rank.wait()
    assert len(plan.chunks) > 2
    assert found == {
        name: [str(weight.dtype), list(weight.shape), weight.double().sum().item()]
        for name, weight in WEIGHTS.items()
    }
