"""What a vLLM CPU server takes to start by `skyctl.engines.vllm.inside.serve`, as skyctl starts it,
and by vLLM's own module, in turns.

    python -m benchmarks.server_start [--rounds 5]

Of a tiny checkpoint. Seconds until `/health` answers, and seconds of a processor that all its
processes have used by then; ratios are those of the medians. A round that only warms caches comes
before. Writes nothing.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.engines.launches import ServerLaunch
from skyctl.engines.vllm.command import server_command
from skyctl.launch.local.host import free_port
from skyctl.wire.messages import BACKEND

WAYS = {"skyctl's module": True, "vLLM's": False}
LIMIT_S = 300


def start(own: bool, model: Path) -> tuple[float, float]:
    """Wall and processor seconds until the server was ready. Raises SystemExit if it never was.
    `own`: by skyctl's module."""
    port = free_port("127.0.0.1")
    command = server_command(
        ServerLaunch(
            python=sys.executable,
            model_path=str(model),
            served_model_name="model",
            host="127.0.0.1",
            port=port,
            device="cpu",
            backend=BACKEND,
            args={"max-model-len": 512, "enforce-eager": True},
            env={},
            environ=os.environ,
            secret="",
            own_python=own,
            auth="none",
        )
    )
    began = time.perf_counter()
    server = subprocess.Popen(
        command.argv,
        env=os.environ | command.env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        while not ready(port):
            if server.poll() is not None or time.perf_counter() - began > LIMIT_S:
                raise SystemExit(f"{' '.join(command.argv)}: not ready ({server.poll()})")
            time.sleep(0.1)
        wall = time.perf_counter() - began
        top = psutil.Process(server.pid)
        times = [process.cpu_times() for process in (top, *top.children(recursive=True))]
        return wall, sum(used.user + used.system for used in times)
    finally:
        server.terminate()
        server.wait()


def ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=5).is_success
    except httpx.TransportError:
        return False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    found: dict[str, list[tuple[float, float]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as scratch:
        model = make_tiny_checkpoint(Path(scratch) / "model", seed=1)
        for counted in range(options.rounds + 1):
            for way in list(WAYS)[:: 1 if counted % 2 else -1]:
                wall, used = start(WAYS[way], model)
                print(f"{way}: {wall:.1f} s, {used:.1f} s of a processor", flush=True)
                if counted:
                    found[way].append((wall, used))
    for index, what in enumerate(("ready after", "of a processor")):
        ours, theirs = (statistics.median(run[index] for run in runs) for runs in found.values())
        print(f"{what}: {ours:.1f} s over {theirs:.1f} s = {ours / theirs:.2f}")


if __name__ == "__main__":
    main()
