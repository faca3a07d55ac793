"""`python -m skyctl.engines.sglang.inside.serve ARGUMENTS`: SGLang's server behind skyctl's guard.

Takes the arguments of `sglang serve`. If the interpreter does not have skyctl, this file is run by
its path. What it uses of SGLang was read in 0.5.14 to 0.5.23 (`entrypoints/http_server.py`): the
application `app`, `launch_server`, the front end in `get_global_state()`, and the module `requests`
by which the front end warms itself up; `OpenAIServingBase._resolve_lora_path`, by which every route
of a model's name chooses an adapter.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

try:
    from skyctl.engines.inside.guard import TOKEN_VARIABLE, Guard, Routes
    from skyctl.engines.sglang.inside.adapters import choose_by_model
    from skyctl.engines.sglang.inside.keeper import Keeper
except ImportError:  # run by path: the import path has this directory
    sys.path.append(str(Path(__file__).parents[2] / "inside" / "alone"))
    from adapters import choose_by_model  # type: ignore[import-not-found,no-redef]
    from keeper import Keeper  # type: ignore[import-not-found,no-redef]
    from skyctl_inside.guard import TOKEN_VARIABLE, Guard, Routes  # type: ignore[import-not-found,no-redef]

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
            "/ready",
            "/v1/classify",
            "/v1/completions",
            "/v1/decisions",
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
            "/v1/systemone",
            "/v1/tokenize",
        }
    ),
    pauses=frozenset({"/pause_generation"}),
    thaws=frozenset({"/continue_generation"}),
    reports=frozenset({"/skyctl/state"}),
)
"""SGLang's routes of the level `normal` (`utils/auth.py`) that take requests or report."""


def main(arguments: Sequence[str]) -> None:
    """Serve until told to stop."""
    from fastapi import HTTPException
    from sglang.srt.entrypoints import http_server
    from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
    from sglang.srt.managers.io_struct import UnloadLoRAAdapterReqInput
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    def manager() -> Any:
        return http_server.get_global_state().tokenizer_manager

    load_plugins()
    choose_by_model(OpenAIServingBase, HTTPException)
    http_server.app.add_middleware(Keeper, manager=manager, unload=UnloadLoRAAdapterReqInput)
    if {TOKEN_VARIABLE, ROUTES.key_variable} & os.environ.keys():
        Guard(http_server.app, routes=ROUTES)  # without a token it ends here, not at a request
        http_server.app.add_middleware(Guard, routes=ROUTES)  # the middleware added last runs first
    server_args = prepare_server_args(list(arguments))
    if token := os.environ.get(TOKEN_VARIABLE):
        http_server.requests = WithToken(http_server.requests, server_args.url(), token)
    try:
        http_server.launch_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


class WithToken:
    """The module `requests` for SGLang's front end, whose warm-up calls the server itself over
    HTTP, and so needs the token. From 0.5.16 on only SGLang can set the key that it sends.
    """

    def __init__(self, requests: Any, url: str, token: str) -> None:
        self._requests, self._url = requests, url
        self._headers = {"Authorization": f"Bearer {token}"}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._requests, name)

    def get(self, url: str, **arguments: Any) -> Any:
        return self._requests.get(url, **self._own(url, arguments))

    def post(self, url: str, **arguments: Any) -> Any:
        return self._requests.post(url, **self._own(url, arguments))

    def _own(self, url: str, arguments: dict[str, Any]) -> dict[str, Any]:
        own = url.startswith(f"{self._url}/")  # it also asks servers of its own at other ports
        return {**arguments, "headers": self._headers} if own else arguments


if __name__ == "__main__":
    main(sys.argv[1:])
