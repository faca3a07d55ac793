"""The stub in place of SGLang's HTTP server: what `serve` uses of it has the same names."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import requests
import uvicorn

from sglang.srt.server_args import ServerArgs
from tests.stub.sglang import SGLangEngine, SGLangStub

_stub = SGLangStub(SGLangEngine(), keeper=False, token_delay_s=0.004)
_stub.engine.starting = True
app = _stub.app


def get_global_state() -> Any:
    return SimpleNamespace(tokenizer_manager=_stub.engine)


def _execute_server_warmup(server_args: ServerArgs) -> bool:
    url = server_args.url()
    headers = {"Authorization": f"Bearer {server_args.api_key}"} if server_args.api_key else {}
    for _ in range(100):
        time.sleep(0.05)
        try:
            if requests.get(url + "/model_info", headers=headers).status_code == 200:
                break
        except requests.exceptions.RequestException:
            continue
    body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 1}}
    answer = requests.post(url + "/generate", json=body, headers=headers)
    if answer.status_code != 200:
        os._exit(1)  # as SGLang, whose warm-up has failed
    _stub.engine.starting = False
    return True


def launch_server(
    server_args: ServerArgs,
    execute_warmup_func: Callable[[ServerArgs], bool] = _execute_server_warmup,
) -> None:
    engine = SGLangEngine(
        model=server_args.model_path,
        served_model_name=server_args.served_model_name,
        radix_cache=server_args.radix_cache,
        memory_saver=server_args.memory_saver,
        cpu_backup=server_args.cpu_backup,
    )
    engine.starting, engine.on_death = True, lambda: os._exit(1)
    _stub.engine = engine
    threading.Thread(target=execute_warmup_func, args=(server_args,), daemon=True).start()
    uvicorn.run(app, host=server_args.host, port=server_args.port, timeout_graceful_shutdown=1)
