"""Check that this machine has what a plan needs, before anything is spawned."""

from __future__ import annotations

import difflib
import importlib.util
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path

from skyctl.checkpoints.checkpoint import (
    index_problem,
    locate,
    mistaken_for,
    read_checkpoint,
)
from skyctl.children import output_of
from skyctl.core import tinker
from skyctl.core.check_machines import check_machines
from skyctl.core.plan import FleetPlan, ServerSpec
from skyctl.core.planner import interpreter
from skyctl.engines import ENGINES
from skyctl.errors import SkyctlError
from skyctl.fleetfile.arguments import PlanWarning, flag_name, server_arguments
from skyctl.fleetfile.schema import FleetConfig
from skyctl.fleetfile.yaml_source import YamlSource
from skyctl.launch import HOSTS
from skyctl.launch.base import Gpu, Host
from skyctl.launch.local.devices import discover_gpus, visible_gpus
from skyctl.units import count_of, format_bytes

_IMPORT_TIMEOUT_S = 20.0
_ROOM = "lower `replicas` or the parallel sizes, allow more `gpus`, or set `share_gpus: true`"
_DEVICE = "correct `tinker: device`; cpu always works"


@dataclass(frozen=True)
class Problem:
    """Something that would make `up` fail. `hint` says what to change."""

    message: str
    hint: str = ""

    def to_json(self) -> dict[str, str]:
        return {"message": self.message, "hint": self.hint}


@dataclass(frozen=True)
class _Listener:
    """A listener in the plan, with its port."""

    owner: str
    key: str  # of the fleet file
    host: str
    port: int


def check_plan(
    plan: FleetPlan,
    *,
    own_ports: Collection[int] = (),
    source: YamlSource | None = None,
    discover: Callable[[], Sequence[Gpu]] | None = None,
    arguments: Callable[[str], Collection[str]] | None = None,
) -> list[Problem]:
    """All problems, not only the first. Ports in `own_ports` may be taken: by our own processes.

    With the `source` of the fleet file, a problem with a key names its line.
    """
    host = HOSTS[plan.config.launcher]
    return [
        *_check_model(plan),
        *_check_ports(plan, own_ports, host),
        *(_check_gpus(plan, discover or host.gpus) if plan.device == "cuda" else ()),
        *_check_interpreter(plan),
        *_check_arguments(plan, source, arguments),
        *_check_tinker(plan),
        *_check_trainer(plan, discover or discover_gpus),
        *(Problem(*problem) for problem in check_machines(plan, own_ports)),
    ]


def _check_model(plan: FleetPlan) -> Iterator[Problem]:
    written = plan.config.model or ""
    path = Path(plan.model_path)
    if not path.is_absolute() and not _looks_like_path(written, plan.base_dir):
        return  # a hub model id: the engine fetches it, and reports a model that does not exist
    if not path.is_absolute():
        path = plan.base_dir / path
    hint = "correct `model` (a path relative to the fleet file, or a hub model id)"
    if not path.exists():
        yield Problem(f"model {written!r}: {path} does not exist", hint)
    elif not path.is_dir():
        yield Problem(f"model {written!r}: {path} is a file, not a checkpoint directory", hint)
    elif not (path / "config.json").is_file():
        message, instead = mistaken_for(path)
        yield Problem(f"model {written!r}: {message}", instead)
    elif problem := index_problem(path):
        yield Problem(f"model {written!r}: {problem}", "copy or download it completely")


def model_advice(plan: FleetPlan) -> Iterator[PlanWarning]:
    """A model that is neither here nor in the hub's cache: a mistyped path looks like a hub id."""
    name = plan.model_path
    if Path(name).is_absolute() or locate(name, {**os.environ, **plan.config.env}) is not None:
        return
    if _looks_like_path(plan.config.model or "", plan.base_dir):
        return  # `check_plan` refuses it
    first, _, below = name.partition("/")
    beside = [entry.name for entry in plan.base_dir.glob("*/")]
    near = difflib.get_close_matches(first, beside, n=1, cutoff=0.8)
    if near:
        fix = f"did you mean {near[0]}{'/' if below else ''}{below}?"
    elif below:
        fix = f"download it first: hf download {name}"
    else:
        fix = f"write the hub id with its organisation (ORG/{name}), or the path as ./{name}"
    yield PlanWarning(
        f"model {name!r} is not a directory here, and not in the local hub cache: "
        f"the servers will ask the hub for it; {fix}",
        fix,
    )


def learn_arguments(
    config: FleetConfig, base_dir: Path, note: Callable[[str], None] = lambda line: None
) -> None:
    """Ask the fleet's engine for what `check_plan` needs to know; takes seconds the first time."""
    if config.check_args and any(server_arguments(config)):
        python = interpreter(config.python, base_dir) if config.python else sys.executable
        ENGINES[config.engine].arguments.names(python, note)


def _check_arguments(
    plan: FleetPlan,
    source: YamlSource | None,
    arguments: Callable[[str], Collection[str]] | None,
) -> Iterator[Problem]:
    """What the installed engine would refuse of `args` after minutes of loading."""
    engine = ENGINES[plan.config.engine]
    written = list(server_arguments(plan.config))
    if not plan.config.check_args or not written:
        return
    if arguments is None:
        accepted = engine.arguments.names(plan.python, lambda line: None)
    else:
        accepted = arguments(plan.python)
    if not accepted:
        return
    for location, value in written:
        problem = engine.arguments.problem(flag_name(str(location[-1])), value, accepted)
        if value is None or not problem:
            continue
        where = f"{source.place(location)}: " if source else ""
        section = ".".join(str(part) for part in location[:-1])
        yield Problem(
            f"{where}{section}: {problem}",
            "correct it, or leave it out; `check_args: false` passes everything on unchecked",
        )


def _looks_like_path(model: str, base_dir: Path) -> bool:
    """`checkpoints/a` next to a directory `checkpoints` is taken as a path, although it could be a
    hub id; a hub id has at most one slash.
    """
    first, *deeper = Path(model).parts or ("",)
    return len(deeper) > 1 or (bool(deeper) and (base_dir / first).is_dir())


def _check_ports(plan: FleetPlan, own_ports: Collection[int], launcher: Host) -> Iterator[Problem]:
    listeners = list(_listeners(plan))
    by_port: dict[int, list[_Listener]] = {}
    for listener in listeners:
        by_port.setdefault(listener.port, []).append(listener)
    for port, owners in by_port.items():
        if len(owners) > 1:
            names = " and ".join(owner.owner for owner in owners)
            yield Problem(f"port {port} is given to {names}", "give each its own port")
    for port, owners in by_port.items():
        host, key = owners[0].host, owners[0].key
        section, dot, _ = key.rpartition(".")
        if port in own_ports or section == "trainer":  # the supervisor reports what it cannot bind
            continue
        if (holder := launcher.port_holder(host, port)) is not None:
            yield Problem(
                f"{owners[0].owner}: port {port} is taken by {holder}",
                f"stop it, or change `{key}`"
                if section == "tinker"  # clients know the address: it never moves to a free port
                else f"stop it, change `{key}`, or leave it out for a free port",
            )
        elif (reason := launcher.bind_error(host, port)) is not None:
            yield Problem(
                f"{owners[0].owner}: cannot listen at {host}:{port}: {reason}",
                f"change `{section}{dot}host` or `{key}`",
            )


def _listeners(plan: FleetPlan) -> Iterator[_Listener]:
    for server in plan.servers:
        if server.node is None:
            yield _Listener(server.name, "ports", server.host, server.port)
    if plan.router is not None:
        router = plan.router
        yield _Listener("router", "router.port", router.host, router.port)
        yield _Listener("router metrics", "router.metrics_port", router.host, router.metrics_port)
    if plan.tinker is not None:
        yield _Listener("tinker", "tinker.port", plan.tinker.host, plan.tinker.port)
    if (trainer := plan.config.trainer) is not None:
        yield _Listener("trainer", "trainer.port", trainer.host, trainer.port)


def _check_gpus(plan: FleetPlan, discover: Callable[[], Sequence[Gpu]]) -> Iterator[Problem]:
    if any(server.node for server in plan.servers):  # `check_machines` knows their GPUs
        for server in plan.servers:
            if server.node is None or server.node.chosen:
                yield from _check_gpu_counts(server)
        return
    existing = {gpu.index for gpu in discover()}
    if not existing:
        yield Problem(
            "device is cuda, and this machine has no NVIDIA GPU (nvidia-smi lists none)",
            "set `device: cpu`, or run `nvidia-smi` to see why",
        )
        return
    listed = ", ".join(str(index) for index in sorted(existing))
    for index in plan.config.gpus or ():
        if index not in existing:
            yield Problem(f"GPU {index} does not exist; there are: {listed}", "correct `gpus`")
    users: dict[int, list[str]] = {}
    for server in plan.servers:
        for index in dict.fromkeys(server.gpus):
            users.setdefault(index, []).append(server.name)
            if index not in existing and index not in (plan.config.gpus or ()):
                yield Problem(
                    f"{server.name}: GPU {index} does not exist; there are: {listed}",
                    "correct `gpus` of its group",
                )
        yield from _check_gpu_count(server.name, server.gpus, server.world_size)
    if not plan.config.share_gpus:
        for index, names in users.items():
            if len(names) > 1:
                yield Problem(
                    f"GPU {index} is given to {' and '.join(names)}",
                    "give each its own, or set `share_gpus: true`",
                )


def _check_gpu_counts(server: ServerSpec) -> Iterator[Problem]:
    """Of each machine that it runs on."""
    each = server.world_size // (1 + len(server.followers))
    hint = "lower `replicas` or the parallel sizes, add machines, or write `nodes_per_replica`"
    yield from _check_gpu_count(server.name, server.gpus, each, hint)
    for follower in server.followers:
        yield from _check_gpu_count(
            f"{server.name} on {follower.node.target}", follower.gpus, each, hint
        )


def _check_gpu_count(
    name: str,
    gpus: Sequence[int],
    world_size: int,
    hint: str = _ROOM,
) -> Iterator[Problem]:
    repeated = [index for index, count in Counter(gpus).items() if count > 1]
    if repeated:
        yield Problem(f"{name}: GPU {repeated[0]} is listed twice", "correct `gpus` of its group")
    elif len(gpus) < world_size:
        yield Problem(
            f"{name}: not enough GPUs: it needs {world_size}, and {len(gpus)} of them can be had",
            hint,
        )
    elif len(gpus) > world_size:
        yield Problem(
            f"{name}: {count_of(len(gpus), 'GPU')} for {count_of(world_size, 'worker')}",
            "its parallel sizes multiplied must equal the number of its GPUs",
        )


def _check_interpreter(plan: FleetPlan) -> Iterator[Problem]:
    engine, backend = ENGINES[plan.config.engine], plan.servers[0].backend
    modules = engine.modules(plan.device, plan.router is not None, backend, plan.config.pairs)
    if plan.servers[0].node is not None:  # only the router runs here
        servers = engine.modules(plan.device, False, backend, False)
        modules = {name: hint for name, hint in modules.items() if name not in servers}
    if plan.python == sys.executable:
        missing = [name for name in modules if importlib.util.find_spec(name) is None]
    else:
        if shutil.which(plan.python) is None:
            yield Problem(f"python {plan.python!r}: no such interpreter", "correct `python`")
            return
        result = _missing_in(plan.python, list(modules))
        if isinstance(result, Problem):
            yield result
            return
        missing = result
    for name in missing:
        yield Problem(f"{name} is not installed for {plan.python}", modules[name])


def _check_tinker(plan: FleetPlan) -> Iterator[Problem]:
    """The API runs on skyctl's own interpreter, whichever the servers use."""
    if plan.tinker is None:
        return
    missing = [name for name in tinker.MODULES if not _installed(name)]
    if missing:
        yield Problem(f"the Tinker API needs {', '.join(missing)}", tinker.INSTALL)
    if plan.router is None and len(plan.servers) > 1:
        yield Problem(
            "the Tinker API needs a router in front of several servers",
            "leave out what turns it off: --no-router, or `router: {enabled: false}`",
        )
    if tinker.longest(plan.config.args) is None:
        try:
            tinker.context_of(str(locate(plan.base) or plan.model_path))
        except SkyctlError as error:
            yield Problem(error.message, error.hint)


def _check_trainer(plan: FleetPlan, discover: Callable[[], Sequence[Gpu]]) -> Iterator[Problem]:
    """What a trainer on this machine needs of it, wherever the servers are."""
    section = plan.config.tinker
    if section is None or not section.gpus or section.machine is not None:
        return
    visible = visible_gpus(discover(), os.environ)
    shares = 1 if section.shard_base is False else len(section.ranks)
    needed = _base_bytes(plan.base or plan.model_path, section.dtype) // shares
    count, holder = len(visible), "the base" if shares == 1 else "a rank's share of the base"
    for device, gpu in zip(section.ranks, section.gpus, strict=True):
        if gpu < count and visible[gpu].memory_bytes < needed:
            yield Problem(
                f"tinker.device {device}: {holder} takes {format_bytes(needed)} in "
                f"{section.dtype}, the GPU has {format_bytes(visible[gpu].memory_bytes)}",
                "list more GPUs in `tinker: devices`, which shard the base; train a smaller one; "
                "or write `tinker: {dtype: bfloat16}`",
            )
        if gpu >= count:
            available = f"cuda:0 to cuda:{count - 1}" if count else "none (nvidia-smi)"
            yield Problem(
                f"tinker.device {device}: this machine has no such GPU; there are: {available}",
                _DEVICE,
            )
    if _installed("torch") and version("torch").endswith("+cpu"):
        yield Problem(
            f"tinker.device {section.ranks[0]}: the installed torch {version('torch')} is for CPUs",
            _DEVICE,
        )


def _base_bytes(base: str, dtype: str) -> int:
    """What the trainer needs for the base's weights alone; 0 if that is not known."""
    with suppress(SkyctlError, OSError):
        elements = sum(prod(tensor.shape) for tensor in read_checkpoint(base).tensors)
        return elements * (2 if dtype == "bfloat16" else 4)
    return 0


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is missing altogether
        return False


def _missing_in(python: str, modules: Sequence[str]) -> list[str] | Problem:
    """Which of `modules` another interpreter lacks. Finds them without importing them."""
    script = (
        "import importlib.util, sys; "
        "print(*[m for m in sys.argv[1:] if importlib.util.find_spec(m) is None])"
    )
    try:
        return output_of(python, script, modules, timeout_s=_IMPORT_TIMEOUT_S).split()
    except (OSError, subprocess.SubprocessError) as error:
        return Problem(f"python {python!r} cannot be run: {error}", "correct `python`")
