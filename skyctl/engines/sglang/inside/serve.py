"""`python -m skyctl.engines.sglang.inside.serve ARGUMENTS`: SGLang's server behind skyctl's guard.

Takes the arguments of `sglang serve`. If the interpreter does not have skyctl, this file is run by
its path. What it uses of SGLang was read in 0.5.14 (`entrypoints/http_server.py`): the application
`app`, `launch_server(execute_warmup_func=)`, and the front end in `get_global_state()`.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from skyctl.engines.inside.guard import TOKEN_VARIABLE, Guard, Routes
    from skyctl.engines.sglang.inside.keeper import Keeper
except ImportError:  # run by path: the import path has this directory
    sys.path.append(str(Path(__file__).parents[2] / "inside" / "alone"))
    from keeper import Keeper  # type: ignore[import-not-found,no-redef]
    from skyctl_guard import TOKEN_VARIABLE, Guard, Routes  # type: ignore[import-not-found,no-redef]

ROUTES = Routes(
    "SKYCTL_API_KEY",
    data=frozenset(
        {
            "/classify",
            "/encode",
            "/generate",
            "/get_model_info",
            "/get_server_info",
            "/metrics",
            "/model_info",
            "/server_info",
            "/v1/audio/transcriptions",
            "/v1/chat/completions",
            "/v1/classify",
            "/v1/completions",
            "/v1/detokenize",
            "/v1/embeddings",
            "/v1/loads",
            "/v1/messages",
            "/v1/messages/count_tokens",
            "/v1/models",
            "/v1/models/{}",
            "/v1/models/{}/{}",
            "/v1/realtime",
            "/v1/rerank",
            "/v1/responses",
            "/v1/responses/{}",
            "/v1/responses/{}/cancel",
            "/v1/score",
            "/v1/tokenize",
        }
    ),
)
"""SGLang's routes of the level `normal` (`utils/auth.py`) that take requests or report."""


def main(arguments: Sequence[str]) -> None:
    """Serve until told to stop."""
    from sglang.srt.entrypoints import http_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    token = os.environ.get(TOKEN_VARIABLE)

    def manager() -> Any:
        return http_server.get_global_state().tokenizer_manager

    def warm_up(server_args: Any) -> Any:
        """SGLang's own warm-up, which goes over HTTP and so needs the token."""
        asking = copy.copy(server_args)
        asking.api_key = token
        return http_server._execute_server_warmup(asking)

    load_plugins()
    http_server.app.add_middleware(Keeper, manager=manager)
    if {TOKEN_VARIABLE, ROUTES.key_variable} & os.environ.keys():
        Guard(http_server.app, routes=ROUTES)  # without a token it ends here, not at a request
        http_server.app.add_middleware(Guard, routes=ROUTES)  # the middleware added last runs first
    try:
        http_server.launch_server(prepare_server_args(list(arguments)), execute_warmup_func=warm_up)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


if __name__ == "__main__":
    main(sys.argv[1:])
