"""`python -m tests.stub.server --port P --faults '{…}'`: a stub in place of a vLLM server.

Takes vLLM's own flags and ignores those it has no use for. `--faults` (or $STUB_FAULTS) is the
routes' faults (see faults.py) plus, for the start itself, `startup_delay_s` and `exit_at_start`
(an exit code); with `joins` it takes its place in a sender's gloo group. Ready when it answers;
stops on TERM.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from skyctl.checkpoints.hub import HubReference
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.gpus import DIRECTORY, SharedMemory
from tests.stub.state import StubEngine


def main(arguments: Sequence[str]) -> int:
    """Serve until told to stop; returns the exit code."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--model", default="stub-model")
    parser.add_argument("--revision", default="main")
    parser.add_argument("--served-model-name", default=None)
    parser.add_argument("--weight-transfer-config", default='{"backend": ""}')
    parser.add_argument("--speculative-config", type=json.loads, default={})
    parser.add_argument("--tensor-parallel-size", type=int, default=1)
    parser.add_argument("--faults", default=os.environ.get("STUB_FAULTS", "{}"))
    parser.add_argument("--vllm-version", default="0.32.0")
    parser.add_argument("--token-delay-s", type=float, default=0.0)
    parser.add_argument("--middleware", action="append", default=[])
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--max-lora-rank", type=int, default=16)
    options, _ignored = parser.parse_known_args(arguments)
    faults = json.loads(options.faults)
    time.sleep(faults.pop("startup_delay_s", 0))
    joins = faults.pop("joins", False)
    code = faults.pop("exit_at_start", None)
    if code is not None:
        print("stub: told to exit at start", file=sys.stderr)
        return int(code)
    reference = HubReference.parse(f"{options.model}@{options.revision}")  # as vLLM finds it
    snapshot = reference.snapshot(os.environ) if reference is not None else None
    engine = StubEngine(
        model=str(snapshot or options.model),
        version=options.vllm_version,
        world_size=options.tensor_parallel_size,
        transfer_backend=json.loads(options.weight_transfer_config)["backend"],
        settings={"speculative_config": options.speculative_config},
    )
    if options.speculative_config:
        engine.load_draft(options.speculative_config["model"])
    if directory := os.environ.get(DIRECTORY):
        engine.memory = SharedMemory(Path(directory), options.model)
        engine.memory.take()
    stub = StubServer(
        engine,
        served_model=options.served_model_name or options.model,
        faults={route: Fault.from_json(fault) for route, fault in faults.items()},
        api_key=os.environ.get("VLLM_API_KEY") or None,
        token_delay_s=options.token_delay_s,
    )
    stub.group.joins = joins
    stub.adapters.enabled = (
        options.enable_lora and os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") == "1"
    )
    stub.adapters.max_rank = options.max_lora_rank
    asgi: Any = stub.asgi
    for path in options.middleware:  # as vLLM loads them: the last sees a request first
        module, _, name = path.rpartition(".")
        asgi = getattr(importlib.import_module(module), name)(asgi)
    return _serve(asgi, options.host, options.port)


def _serve(asgi: Any, host: str, port: int) -> int:
    # neither uvicorn's command line nor WebSockets, which are a third of what it would import:
    # tests start this process by the hundred
    unused: Any = SimpleNamespace(Server=None, main=None, run=None)
    sys.modules.setdefault("uvicorn.main", unused)
    from uvicorn.config import STARTUP_FAILURE, Config
    from uvicorn.server import Server

    config = Config(
        asgi,
        host=host,
        port=port,
        lifespan="off",
        loop="asyncio",
        http="httptools",
        ws="none",
        timeout_graceful_shutdown=1,
    )
    server = Server(config)
    with suppress(KeyboardInterrupt):
        server.run()
    return 0 if server.started else STARTUP_FAILURE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
