"""A rank of the training worker: `python -m skyctl.tinker.worker FD SETTINGS`, one operation at a
time.

It has models over one base, their gradients, optimizers and files. Every operation is deterministic
and all or nothing: one that fails leaves the model as it was. After a death a model is therefore
rebuilt from its last snapshot and the requests since.

The worker answers each message with one. It ends when the API process is gone, and never writes to
the ledger: only the API process records what was done.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch

from skyctl.tinker import worker_messages
from skyctl.tinker.adapter import Base
from skyctl.tinker.files import DamagedCheckpoint
from skyctl.tinker.losses import LossError
from skyctl.tinker.passes import Answer
from skyctl.tinker.ranks import OutOfStep, Ranks
from skyctl.tinker.trainer import Trainer

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Load the base model, say hello, and serve until the socket closes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    settings = json.loads(sys.argv[2])
    if os.getppid() != settings["parent"]:
        return 0  # it died before the request above
    connection = socket.socket(fileno=int(sys.argv[1]))
    rank, devices = settings["rank"], settings["devices"]
    threads = settings["threads"] or max(1, torch.get_num_threads() // len(devices))
    if threads != torch.get_num_threads():
        torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads it
    base = Base(
        settings["path"],
        device=devices[rank],
        dtype=settings["dtype"],
        checkpointing=settings["checkpointing"],
        ranks=Ranks.joined(
            rank, len(devices), settings["meeting"], devices[rank], settings["timeout_s"]
        ),
        shard=settings["shard_base"],
    )
    trainer = Trainer(base, name=settings["name"], batch_tokens=settings["batch_tokens"])
    hello = {"architecture": base.architecture, "context": base.context, "sharded": base.sharded}
    if base.shard_reason and not rank:
        sys.stdout.write(f"{base.shard_reason}\n")
        sys.stdout.flush()
    connection.sendall(worker_messages.pack(hello))
    return _serve(trainer, connection)


def _serve(trainer: Trainer, connection: socket.socket) -> int:
    """Answer until the socket closes, or this rank is out of step with the others."""
    stream = connection.makefile("rb")
    while (message := worker_messages.read(stream)) is not None:
        try:
            answer = _answer(trainer, *message)
        except OutOfStep as error:
            traceback.print_exc()
            fault = {"error": f"the trainer failed: {error}", "category": "server", "ends": True}
            connection.sendall(worker_messages.pack(fault))
            return 1
        connection.sendall(worker_messages.pack(*answer))
    return 0


def _answer(trainer: Trainer, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        return _do(trainer, header, body)
    except LossError as error:
        return {"error": str(error), "category": "user"}, b""
    except DamagedCheckpoint as error:
        return {"error": f"a checkpoint is damaged: {error}", "category": "server"}, b""
    except OutOfStep:
        raise
    except Exception as error:  # the API process decides what becomes of the model
        traceback.print_exc()
        return {"error": f"the trainer failed: {error!r}", "category": "server"}, b""


def _do(trainer: Trainer, header: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    operation, model = header["do"], header.get("model", "")
    if operation == "create":
        trainer.create(model, header["config"])
        return {"bytes": trainer.bytes_of(model)}, b""
    if operation == "open":
        trainer.open(model, Path(header["directory"]), optimizer=header["optimizer"])
        return {"bytes": trainer.bytes_of(model)}, b""
    if operation == "park":
        trainer.park(model)
    elif operation == "close":
        trainer.close(model)
    elif operation == "save":
        size = trainer.save(model, Path(header["directory"]), optimizer=header["optimizer"])
        return {"size": size}, b""
    elif operation == "zero_gradients":
        trainer.zero_gradients(model)
    elif operation == "forward_backward":
        units = worker_messages.cut(body, header["units"])
        return _passes(*trainer.forward_backward(model, units, header["slice_s"]))
    elif operation == "go_on":
        return _passes(*trainer.go_on(model, header["slice_s"]))
    elif operation == "optim_step":
        return {"metrics": trainer.optim_step(model, header["params"])}, b""
    elif operation == "prompt_logprobs":
        return {}, trainer.prompt_logprobs(header, body)
    else:
        raise ValueError(f"no operation {operation!r}")
    return {}, b""


def _passes(units: list[list[Answer]], more: bool) -> tuple[dict[str, Any], bytes]:
    """The lengths of the answers by unit, or their errors; the answers."""
    errors = {"errors": [[str(a) if isinstance(a, LossError) else "" for a in u] for u in units]}
    contents = [[b"" if isinstance(a, LossError) else a for a in unit] for unit in units]
    lengths = [[len(content) for content in unit] for unit in contents]
    body = b"".join(content for unit in contents for content in unit)
    return {**errors, "units": lengths, "more": more}, body


if __name__ == "__main__":
    sys.exit(main())
