"""vLLM's API server: `python -m skyctl.engines.vllm.inside.serve ARGUMENTS`.

Its arguments are those of `python -m vllm.entrypoints.openai.api_server`. Importing vLLM makes
hundreds of thousands of objects, which Python's garbage collector would scan dozens of times. The
processes that vLLM spawns import this module again, in place of the whole API server.
"""

from __future__ import annotations

import gc
import runpy

gc.set_threshold(10_000)  # objects; 700 by default


def main() -> None:
    """Serve until told to stop."""
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__")


if __name__ == "__main__":
    main()
