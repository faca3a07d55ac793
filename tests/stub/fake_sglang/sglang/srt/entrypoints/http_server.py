"""The stub in place of SGLang's HTTP server: what `serve` uses of it has the same names."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import requests
import uvicorn

from sglang.srt.entrypoints.openai.serving_base import OpenAIServingBase
from sglang.srt.server_args import ServerArgs
from tests.stub.sglang import SGLangEngine, SGLangStub

_stub = SGLangStub(SGLangEngine(), keeper=False, token_delay_s=0.004, serving=OpenAIServingBase)
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
        lora=server_args.lora_target_modules if server_args.enable_lora else None,
    )
    engine.starting, engine.on_death = True, lambda: os._exit(1)
    _stub.engine = engine
    for name, path in (one.split("=", 1) for one in server_args.lora_paths):
        asyncio.run(engine.load_adapter(name, path))
    threading.Thread(target=execute_warmup_func, args=(server_args,), daemon=True).start()
    uvicorn.run(app, host=server_args.host, port=server_args.port, timeout_graceful_shutdown=1)
