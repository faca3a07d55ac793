"""`skyctl init`: write a first fleet file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyctl.cli import complete
from skyctl.cli.options import JsonOption


def init(
    directory: Annotated[
        Path,
        typer.Argument(help="Where to write fleet.yaml.", metavar="DIR", show_default="here"),
    ] = Path(),
    tiny: Annotated[
        bool,
        typer.Option("--tiny", help="Make two tiny checkpoints too, to try everything on a CPU."),
    ] = False,
    name: Annotated[
        str | None,
        typer.Option("--name", help="Fleet name (default: the directory's).", show_default=False),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            help="Checkpoint directory or hub model id.",
            autocompletion=complete.checkpoints,
            show_default=False,
        ),
    ] = None,
    replicas: Annotated[int, typer.Option("--replicas", min=1, max=512)] = 2,
    servers: Annotated[
        str | None,
        typer.Option(
            "--servers",
            metavar="URL,…",
            help="URLs of servers that already run, to control them only.",
            show_default=False,
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
    from rich.text import Text

    from skyctl import output
    from skyctl.core.scaffold import ScaffoldRequest, scaffold
    from skyctl.errors import UsageError

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
    import shlex

    commands = [] if directory.resolve() == Path.cwd() else [f"cd {shlex.quote(str(directory))}"]
    if attached:
        return [*commands, "skyctl status"]
    commands += ["skyctl up"] if tiny else ["skyctl validate", "skyctl up"]
    commands.append('skyctl generate "The fleet"')
    if tiny:
        commands.append("skyctl sync-weights checkpoints/b")
    return commands
