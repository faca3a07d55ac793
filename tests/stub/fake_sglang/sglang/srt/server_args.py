"""SGLang's own flags, those that the stub has a use for."""

from __future__ import annotations

import argparse
from dataclasses import dataclass


@dataclass(frozen=True)  # from 0.5.16 on nothing can be assigned
class ServerArgs:
    model_path: str
    served_model_name: str
    host: str
    port: int
    radix_cache: bool
    memory_saver: bool
    cpu_backup: bool
    enable_lora: bool = False
    lora_target_modules: tuple[str, ...] = ()
    lora_paths: tuple[str, ...] = ()
    api_key: str | None = None

    def url(self) -> str:
        return f"http://{self.host}:{self.port}"


def prepare_server_args(argv: list[str]) -> ServerArgs:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--model", "--model-path")
    parser.add_argument("--served-model-name")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--disable-radix-cache", action="store_true")
    parser.add_argument("--enable-memory-saver", action="store_true")
    parser.add_argument("--enable-weights-cpu-backup", action="store_true")
    parser.add_argument("--enable-lora", action="store_true")
    parser.add_argument("--lora-target-modules", nargs="*", default=())
    parser.add_argument("--lora-paths", nargs="*", default=())
    told, _ignored = parser.parse_known_args(argv)
    return ServerArgs(
        told.model,
        told.served_model_name or told.model,
        told.host,
        told.port,
        not told.disable_radix_cache,
        told.enable_memory_saver,
        told.enable_weights_cpu_backup,
        told.enable_lora,
        tuple(told.lora_target_modules),
        tuple(told.lora_paths),
    )
