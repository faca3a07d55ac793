"""`skyctl init`: write a first fleet file, and tiny checkpoints to try it with."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from skyctl import output
from skyctl.checkpoints.tiny import TINY_SEEDS, make_tiny_checkpoint, require_libraries
from skyctl.cli import complete
from skyctl.cli.options import JsonOption
from skyctl.errors import ConflictError, SkyctlError, UsageError

FLEET_FILE = "fleet.yaml"
TINY_MODEL = "./checkpoints/a"
# starts like a word or a path, so that YAML reads it as neither number nor date
_PLAIN = re.compile(r"(?:[A-Za-z_/]|\.{1,2}/)(?:[A-Za-z0-9./_:-]*[A-Za-z0-9./_-])?")
_YAML_WORDS = frozenset({"yes", "no", "on", "off", "true", "false", "null"})


def init(
    directory: Annotated[
        Path, typer.Argument(help="Where to write fleet.yaml.", metavar="DIR", show_default="here")
    ] = Path(),
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Make two tiny checkpoints too, to try everything on a CPU."),
    ] = False,
    name: Annotated[str | None, typer.Option(help="Fleet name (default: the directory's).")] = None,
    model: Annotated[
        str | None,
        typer.Option(
            help="Checkpoint directory or hub model id.", autocompletion=complete.checkpoints
        ),
    ] = None,
    replicas: Annotated[int, typer.Option(min=1, max=512)] = 2,
    servers: Annotated[
        str | None,
        typer.Option(
            metavar="URL,…", help="URLs of servers that already run, to control them only."
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Overwrite fleet.yaml.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Write a first fleet.yaml, and with --tiny the checkpoints for it.

    \b
    Examples:
      skyctl init --tiny demo
      skyctl init --model Qwen/Qwen3-0.6B --replicas 4
      skyctl init --servers http://127.0.0.1:8000,http://127.0.0.1:8001
    """
    urls = tuple(url.strip() for url in (servers or "").split(",") if url.strip())
    if servers is not None and not urls:  # a variable that is not set: no fleet to start
        raise UsageError("--servers names no URL", hint="such as: --servers http://127.0.0.1:8000")
    request = ScaffoldRequest(directory, name, model, replicas, urls, tiny, force)
    result = scaffold(request, note=output.note)
    lines = [f"wrote  {result.file}"]
    lines += [f"made   {path}" for path in result.made]
    lines += [f"kept   {path} (it was there)" for path in result.kept]
    commands = _next_commands(directory, tiny=tiny, attached=bool(urls))
    view = Text("\n".join([*lines, "", "next:", *(f"  {command}" for command in commands)]))
    output.emit({**result.to_json(), "next": commands}, view)


def _next_commands(directory: Path, *, tiny: bool, attached: bool) -> list[str]:
    commands = [] if directory.resolve() == Path.cwd() else [f"cd {shlex.quote(str(directory))}"]
    if attached:
        return [*commands, "skyctl status"]
    commands += ["skyctl up"] if tiny else ["skyctl validate", "skyctl up"]
    commands.append('skyctl generate "The fleet"')
    if tiny:
        commands.append("skyctl sync-weights checkpoints/b")
    return commands


@dataclass(frozen=True)
class ScaffoldRequest:
    """The arguments of `skyctl init`."""

    directory: Path
    """Where the file is written."""
    name: str | None = None
    """The fleet's name; None takes the directory's."""
    model: str | None = None
    """A directory or hub id; None is chosen for the machine."""
    replicas: int = 2
    """How many replicas the fleet has."""
    servers: tuple[str, ...] = ()
    """URLs of servers to attach; the file then starts none."""
    tiny: bool = False
    """Make a tiny model beside the file."""
    force: bool = False
    """Overwrite an existing file."""


@dataclass(frozen=True)
class ScaffoldResult:
    """What was written. `kept` are checkpoints that already existed."""

    name: str
    file: Path
    made: tuple[Path, ...] = ()
    kept: tuple[Path, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "name": self.name,
            "file": str(self.file),
            "made": [str(path) for path in self.made],
            "kept": [str(path) for path in self.kept],
        }


def scaffold(
    request: ScaffoldRequest, *, note: Callable[[str], None] = lambda line: None
) -> ScaffoldResult:
    """Write the fleet file, after the checkpoints it names. `note` receives what takes a while.

    Raises:
        UsageError: options that exclude each other, or an invalid name or URL.
        ConflictError: there is already a fleet file, and `force` is not set.
        SkyctlError: the directory cannot be written, or torch is missing for `tiny`.
    """
    from skyctl.fleetfile.load import parse_fleet

    if request.servers and (request.tiny or request.model):
        raise UsageError(
            "--servers is for servers that already run: it excludes --tiny and --model"
        )
    if request.tiny and request.model:
        raise UsageError("--tiny makes its own checkpoints: it excludes --model")
    file = request.directory / FLEET_FILE
    if file.exists() and not request.force:
        raise ConflictError(f"{file} exists already", hint="overwrite it with --force")
    name = request.name or name_for(request.directory)
    text = fleet_file_text(request, name)
    parse_fleet(text, file)  # a requested name or URL may be invalid
    if request.tiny:
        require_libraries()
    made: list[Path] = []
    kept: list[Path] = []
    try:
        request.directory.mkdir(parents=True, exist_ok=True)
        for checkpoint, seed in TINY_SEEDS.items() if request.tiny else ():
            directory = request.directory / "checkpoints" / checkpoint
            (made if _make_whole(directory, seed, note) else kept).append(directory)
        _write(file.resolve(), text)
    except OSError as error:
        raise SkyctlError(
            f"cannot write {file}: {error.strerror or error}", hint="give another directory"
        ) from error
    return ScaffoldResult(name, file, tuple(made), tuple(kept))


def _write(file: Path, text: str) -> None:
    """Write a file as a whole: a full disk leaves the old one."""
    beside = file.with_name(f".{file.name}.partial")
    try:
        beside.write_text(text, encoding="utf-8")
        beside.replace(file)
    finally:
        beside.unlink(missing_ok=True)


def _make_whole(directory: Path, seed: int, note: Callable[[str], None]) -> bool:
    """Make a tiny checkpoint completely or not at all; False if it already exists."""
    if (directory / "config.json").exists():
        return False
    note(f"making {directory} …")
    partial = directory.with_name(f".{directory.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    try:
        make_tiny_checkpoint(partial, seed=seed)
        partial.rename(directory)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return True


def name_for(directory: Path) -> str:
    """A valid fleet name from a directory's name: `My Fleet` → `my-fleet`."""
    words = re.findall(r"[a-z0-9]+", directory.absolute().name.lower())
    return "-".join(words)[:40].strip("-") or "fleet"


def fleet_file_text(request: ScaffoldRequest, name: str) -> str:
    """The text of the fleet file, with comments that say what can be changed."""
    header = (
        "# A fleet of vLLM servers, run by skyctl.\n"
        "# check it: skyctl validate    see what it starts: skyctl plan    start it: skyctl up\n"
        "# every key, with its default: skyctl schema\n\n"
    )
    if request.servers:
        return header + _attached(name, request.servers)
    if request.tiny:
        return header + _tiny(name, request.replicas)
    return header + _started(name, _model(request), request.replicas)


def _attached(name: str, servers: Sequence[str]) -> str:
    lines = "\n".join(f"  - {_scalar(url)}" for url in servers)
    return f"""\
name: {_scalar(name)}

# Servers that skyctl did not start: every verb but up, down, restart and scale works on them.
# Control calls need VLLM_SERVER_DEV_MODE=1 in the servers' environment.
servers:
{lines}

# router: http://127.0.0.1:30000       # a running router in front of them, for `skyctl generate`
# api_key_env: MY_API_KEY              # the environment variable that holds the servers' key
# control_token_env: MY_CONTROL_TOKEN  # and their control token, where another skyctl runs them
"""


def _model(request: ScaffoldRequest) -> str:
    """As the file names it: a directory from where the file is."""
    model = request.model or "Qwen/Qwen3-0.6B"
    if Path(model).is_absolute() or not Path(model).is_dir():
        return model
    relative = os.path.relpath(model, request.directory)
    return relative if relative.startswith("..") else f"./{relative}"


def _started(name: str, model: str, replicas: int) -> str:
    return f"""\
name: {_scalar(name)}
model: {_scalar(model)}
                    # a checkpoint directory (relative to this file) or a hub model id
replicas: {replicas}
device: auto        # cuda where there is a GPU, else cpu

# gpus: [0, 1]              # GPUs the fleet may use; all by default
# tensor_parallel_size: 1   # GPUs per replica
# ports: [8000, 8001]       # one per replica; free ones by default

# Any vLLM argument: dashes or underscores; true is a bare flag, false is --no-flag.
args:
  max-model-len: 4096
  # enable-scale-out: true    # for trainers that roll out by token ids, such as SkyRL

# Environment of every server. ${{VAR:-default}} is expanded anywhere in this file.
env: {{}}

router:
  policy: cache_aware       # round_robin, power_of_two, consistent_hash, sticky_least_loaded, …
  # port: 30000

weight_transfer:
  transport: auto           # how `skyctl sync-weights` moves tensors
  chunk_size: 256MiB

auth: all                   # every route asks for a token; `skyctl urls` says where clients find it
# api_key_env: MY_API_KEY   # the environment variable that holds the servers' key
"""


def _tiny(name: str, replicas: int) -> str:
    return f"""\
name: {_scalar(name)}
model: {TINY_MODEL}      # made by `skyctl init --tiny`; ./checkpoints/b has other weights
replicas: {replicas}
device: cpu

args:
  max-model-len: 2048
  enforce-eager: true       # no compilation: ready in under a minute
  max-num-seqs: 16
  num-gpu-blocks-override: 512    # of 128 tokens: 64 MiB of KV cache, in place of 1 GiB

router:
  policy: round_robin       # so that every replica is seen to answer

weight_transfer:
  transport: auto           # shm on CPU; gloo and disk work too
  chunk_size: 1MiB          # about two chunks for this model, so that a push shows its steps
"""


def _scalar(text: str) -> str:
    """`text` as a YAML scalar that the loader reads back unchanged."""
    plain = _PLAIN.fullmatch(text) and text.lower() not in _YAML_WORDS
    return text if plain else json.dumps(text.replace("${", "$${"))
