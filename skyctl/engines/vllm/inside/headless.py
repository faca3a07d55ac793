"""A part of a vLLM server that answers no request: `python -m skyctl.engines.vllm.inside.headless`.

Its arguments are those of `vllm serve --headless`. vLLM's own command looks for a package named
`vllm`, and on CPU the package has another name.
"""

from __future__ import annotations

import gc
import os
import sys

gc.set_threshold(10_000)  # as in `serve`


def main() -> None:
    """Run the workers of this machine until one of them ends."""
    os.environ.setdefault("VLLM_WORKER_MULTIPROC_METHOD", "spawn")  # as vLLM's command does
    from vllm.entrypoints.cli.serve import ServeSubcommand
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    parser, serve = FlexibleArgumentParser(), ServeSubcommand()
    serve.subparser_init(parser.add_subparsers(dest="subparser"))
    arguments = parser.parse_args(["serve", *sys.argv[1:], "--headless"])
    serve.validate(arguments)
    serve.cmd(arguments)


if __name__ == "__main__":
    main()
