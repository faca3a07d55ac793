"""The training worker: `python -m skyctl.tinker.worker FD SETTINGS`, one operation at a time.

It answers each message with one. It ends when the API process is gone, and never writes to the
ledger: only the API process records what was done.
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

from skyctl.tinker import frames
from skyctl.tinker.adapter import Base
from skyctl.tinker.files import DamagedCheckpoint
from skyctl.tinker.losses import LossError
from skyctl.tinker.trainer import Trainer

_PR_SET_PDEATHSIG = 1


def main() -> int:
    """Load the base model, say hello, and serve until the socket closes."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    settings = json.loads(sys.argv[2])
    if os.getppid() != settings["parent"]:
        return 0  # it died before the request above
    connection = socket.socket(fileno=int(sys.argv[1]))
    if settings["threads"]:
        torch.set_num_threads(settings["threads"])
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # nothing here reads it
    base = Base(
        settings["path"],
        device=settings["device"],
        dtype=settings["dtype"],
        checkpointing=settings["checkpointing"],
    )
    trainer = Trainer(base, name=settings["name"], batch_tokens=settings["batch_tokens"])
    stream = connection.makefile("rb")
    connection.sendall(frames.packed({"architecture": base.architecture, "context": base.context}))
    while (message := frames.read(stream)) is not None:
        connection.sendall(frames.packed(*_answer(trainer, *message)))
    return 0


def _answer(trainer: Trainer, asked: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    try:
        return _do(trainer, asked, body)
    except LossError as error:
        return {"error": str(error), "category": "user"}, b""
    except DamagedCheckpoint as error:
        return {"error": f"a checkpoint is damaged: {error}", "category": "server"}, b""
    except Exception as error:  # the API process decides what becomes of the model
        traceback.print_exc()
        return {"error": f"the trainer failed: {error!r}", "category": "server"}, b""


def _do(trainer: Trainer, asked: dict[str, Any], body: bytes) -> tuple[dict[str, Any], bytes]:
    operation, model = asked["do"], asked.get("model", "")
    if operation == "create":
        trainer.create(model, asked["config"])
    elif operation == "open":
        trainer.open(model, Path(asked["directory"]), optimizer=asked["optimizer"])
    elif operation == "close":
        trainer.close(model)
    elif operation == "save":
        size = trainer.save(model, Path(asked["directory"]), optimizer=asked["optimizer"])
        return {"size": size}, b""
    elif operation == "zero_gradients":
        trainer.zero_gradients(model)
    elif operation == "forward_backward":
        return {}, trainer.forward_backward(model, body)
    elif operation == "optim_step":
        return {"metrics": trainer.optim_step(model, asked["params"])}, b""
    elif operation == "prompt_logprobs":
        return {}, trainer.prompt_logprobs(asked, body)
    else:
        raise ValueError(f"no operation {operation!r}")
    return {}, b""


if __name__ == "__main__":
    sys.exit(main())
