"""A sender's group and what it broadcasts, over gloo, with SGLang's own code as the other rank.

SGLang is not installed here. What the other rank runs follows 0.5.14: `init_custom_process_group`
(`srt/utils/common.py`), `_update_bucketed_weights_from_distributed` (`model_runner.py`) and
`FlattenedTensorBucket` (`weight_sync/tensor_bucket.py`).
"""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading

import pytest

from skyctl.checkpoints.header import Tensor
from skyctl.engines.sglang.tensors import dialect_for
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.reader import Filled
from skyctl.transfer.transports.base import Session
from skyctl.transfer.transports.choose import load_transport
from skyctl.transfer.transports.nccl_torch import TorchGroup, group_name
from skyctl.transfer.transports.rendezvous import HOST

torch = pytest.importorskip("torch")
pytest.importorskip("torch.distributed")

RANK = """
import json, sys
from datetime import timedelta
import torch, torch.distributed as dist


def init_custom_process_group(backend, init_method, world_size, rank, group_name):
    from torch.distributed.distributed_c10d import (
        Backend, PrefixStore, _new_process_group_helper, _world, default_pg_timeout, rendezvous,
    )

    store, rank, world_size = next(
        rendezvous(init_method, rank, world_size, timeout=default_pg_timeout)
    )
    store.set_timeout(default_pg_timeout)
    store = PrefixStore(group_name, store)
    pg, _ = _new_process_group_helper(
        world_size, rank, [], Backend(backend), store, group_name=group_name,
        backend_options=None, timeout=default_pg_timeout, device_id=None,
    )
    _world.pg_group_ranks[pg] = {i: i for i in range(world_size)}
    return pg


def receive(names, dtypes, shapes, group):
    empty = [torch.empty(s, dtype=getattr(torch, d)) for d, s in zip(dtypes, shapes)]
    flat = torch.cat([one.flatten().view(torch.uint8) for one in empty], dim=0)
    dist.broadcast(flat, src=0, group=group)
    found, at = {}, 0
    for name, one in zip(names, empty):
        size = one.flatten().view(torch.uint8).numel()
        found[name] = flat[at : at + size].view(one.dtype).reshape(one.shape)
        at += size
    return found


# the worker's own group, as a server has one
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
init = json.loads(input())
group = init_custom_process_group(
    "gloo", f"tcp://{init['master_address']}:{init['master_port']}",
    init["world_size"], init["rank_offset"], init["group_name"],
)
print("joined", flush=True)
for line in sys.stdin:
    update = json.loads(line)
    found = receive(update["names"], update["dtypes"], update["shapes"], group)
    print(json.dumps({n: [str(t.dtype), list(t.shape), t.double().sum().item()]
                      for n, t in found.items()}), flush=True)
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
