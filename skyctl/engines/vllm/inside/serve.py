"""vLLM's API server: `python -m skyctl.engines.vllm.inside.serve ARGUMENTS`.

Its arguments are those of `python -m vllm.entrypoints.openai.api_server`. Most of a CPU server's
start is importing vLLM, once for each process. Importing makes hundreds of thousands of objects,
which Python's garbage collector would scan dozens of times; engine cores need not import anything
again; and workers import this module in place of the whole API server.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import runpy
import socket
from multiprocessing import resource_tracker
from pathlib import Path

gc.set_threshold(10_000)  # objects; 700 by default


def main() -> None:
    """Serve until told to stop."""
    _fork_engine_cores()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


def _fork_engine_cores() -> None:
    """Fork engine cores from the API server on CPU, as vLLM does on GPUs (`v1/engine/utils.py`).

    On CPU it spawns every process (`platforms/cpu.py`), for workers, whose OpenMP reads the
    environment that each of them is given. They are still spawned. A version that does not take
    this is left alone.
    """
    try:
        from vllm.platforms import current_platform
        from vllm.v1.engine import utils
    except ImportError:
        return
    if not current_platform.is_cpu() or not hasattr(utils, "get_mp_context"):
        return
    utils.get_mp_context = lambda: multiprocessing.get_context("fork")
    os.register_at_fork(after_in_child=give_up_ports)
    # a tracker below an engine core would be killed with it, and leave its shared memory behind
    resource_tracker.ensure_running()


def give_up_ports() -> None:
    """Close this process's copies of TCP sockets that listen, or will: at those of an API server
    that has died, clients would wait for an answer.
    """
    with contextlib.suppress(OSError), Path(os.devnull).open() as nothing:
        for number in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
            with contextlib.suppress(OSError):  # no socket
                with socket.socket(fileno=os.dup(number)) as listener:
                    network = listener.family in (socket.AF_INET, socket.AF_INET6)
                    ours = network and not _connected(listener)
                if ours:
                    os.dup2(nothing.fileno(), number)


def _connected(listener: socket.socket) -> bool:
    try:
        listener.getpeername()
    except OSError:
        return False
    return True


if __name__ == "__main__":
    main()
