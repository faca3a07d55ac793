"""`python -m tests.stub.url_trainer URL VERSION SEED`: a trainer that knows one URL of a fleet.

With `--dies-at CALL` it kills itself once that call is answered.
"""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

import httpx

from tests.stub.rows import trainers_update

CALLS = ("init_weight_transfer_engine", "start_weight_update", "update_weights",
         "finish_weight_update")  # fmt: skip
INIT = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 3}


def body(call: str, version: str, seed: int) -> dict[str, Any] | None:
    """What vLLM's own client sends."""
    return {
        "init_weight_transfer_engine": {"init_info": INIT},
        "update_weights": {"update_info": trainers_update(seed)},
        "finish_weight_update": {"weight_version": version},
    }.get(call)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("version")
    parser.add_argument("seed", type=int)
    parser.add_argument("--dies-at", default="")
    options = parser.parse_args()
    for call in CALLS:
        answer = httpx.post(
            f"{options.url}/{call}",
            json=body(call, options.version, options.seed),
            timeout=60,
            trust_env=False,
        )
        if answer.status_code != 200:
            raise SystemExit(answer.text)
        if call == options.dies_at:
            os.kill(os.getpid(), signal.SIGKILL)


if __name__ == "__main__":
    main()
