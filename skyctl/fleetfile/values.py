"""Types of single values in a fleet file: numbers, sizes, names, URLs."""

from __future__ import annotations

import ipaddress
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    WithJsonSchema,
)
from pydantic_core import PydanticCustomError

from skyctl.errors import UsageError
from skyctl.plugins import Plugins
from skyctl.store.paths import expanded
from skyctl.units import LEAST_STAGE_RATE, parse_bytes


def whole_number(value: Any) -> Any:
    """Refuse booleans: YAML reads `yes` and `on` as true, and Python counts true as 1."""
    if isinstance(value, bool):
        raise PydanticCustomError("int_type", "Input should be a whole number")
    return value


def real_number(value: Any) -> Any:
    if isinstance(value, bool):
        raise PydanticCustomError("float_type", "Input should be a number")
    return value


def available_in(plugins: Plugins[Any]) -> AfterValidator:
    def check_available(name: str) -> str:
        try:
            plugins[name]
        except UsageError as error:
            message = f"{error.message}; {error.hint}" if error.hint else error.message
            raise ValueError(message) from error
        return name

    return AfterValidator(check_available)


def _url(text: str) -> str:
    """`text`, if it can be taken apart: the pattern lets through ports and hosts that cannot."""
    try:
        parts = urlsplit(text)
        port = parts.port  # parsed only when asked for
    except ValueError as error:
        raise ValueError(f"{text!r} is not a URL: {error}") from error
    if not parts.hostname or port == 0:
        raise ValueError(f"{text!r} is not the URL of a server: a host or a port is missing")
    refuse_password(text)
    refuse_route(text)
    return text


def refuse_route(url: str) -> None:
    """Raise ValueError for the URL of a route, as clients of the OpenAI API are given it."""
    path = urlsplit(url).path
    if path.split("/")[1:2] == ["v1"]:
        base = url.removesuffix(path)
        raise ValueError(f"control calls go to the server itself, not to /v1: write {base}")


def refuse_password(url: str) -> None:
    """Raise ValueError for a URL with a password: skyctl sends none, and shows URLs everywhere."""
    if "@" in urlsplit(url).netloc:
        raise ValueError("a URL takes no user or password: name a key with `api_key_env`")


# The constraint stands before the validator: the other way round the JSON Schema loses it.
Port = Annotated[int, Field(ge=1, le=65535), BeforeValidator(whole_number)]
Count = Annotated[int, Field(ge=0), BeforeValidator(whole_number)]
Size = Annotated[int, Field(ge=1), BeforeValidator(whole_number)]
MOST_REPLICAS = 512
Replicas = Annotated[int, Field(ge=1, le=MOST_REPLICAS), BeforeValidator(whole_number)]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False), BeforeValidator(real_number)]
ByteSize = Annotated[
    int,
    Field(gt=0),
    BeforeValidator(parse_bytes),
    WithJsonSchema({"type": ["integer", "string"], "examples": ["256MiB", 268435456]}),
]
StageRate = Annotated[
    int,
    Field(ge=LEAST_STAGE_RATE),
    BeforeValidator(parse_bytes),
    WithJsonSchema({"type": ["integer", "string"], "examples": ["2GB"]}),
]
Name = Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?$")]
BackendName = Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
AdapterName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}$")]
Url = Annotated[str, Field(pattern=r"^https?://[^\s/]+(/\S*)?$"), AfterValidator(_url)]
VariableName = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
ArgValue = str | int | float | bool | None | list[str | int | float] | dict[str, Any]
# In the file an environment value may be any scalar: the loader keeps its text as written.
EnvValue = Annotated[str, WithJsonSchema({"type": ["string", "number", "boolean"]})]

Transport = Literal["auto", "nccl", "ipc", "gloo", "shm", "disk"]
RouterPolicy = Literal[
    "random",
    "round_robin",
    "cache_aware",
    "kv_aware",
    "power_of_two",
    "consistent_hash",
    "sticky_least_loaded",
]


def is_loopback(host: str) -> bool:
    """True when only this machine can reach what listens at `host`. A name counts by its text."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def resolve_relative(path: str, base: Path) -> str:
    """`path` made absolute against `base` when it exists there or is written like a path.

    A hub model id such as `Qwen/Qwen3-0.6B` stays as it is.
    """
    candidate = expanded(path)
    if candidate.is_absolute():
        return str(candidate)
    if path.startswith((".", "~")) or (base / candidate).exists():
        return str((base / candidate).resolve())
    return path
