"""The `skyctl` command: the table of all verbs, and the one place where errors end."""

from __future__ import annotations

import importlib
import sys
from typing import NamedTuple

import typer

from skyctl import __version__
from skyctl.errors import ExitCode, SkyctlError, UsageError


class Verb(NamedTuple):
    """One command: `module` under skyctl.cli holds a function of name `function`."""

    name: str
    module: str
    function: str
    panel: str


FLEET, FREEZE, WEIGHTS, TRAFFIC, SETUP, CHECKS = (
    "Fleet",
    "Freeze and thaw",
    "Weights",
    "Traffic",
    "Fleet file",
    "Checks and help",
)

VERBS = [
    Verb("init", "init", "init", SETUP),
    Verb("validate", "validate", "validate", SETUP),
    Verb("plan", "plan", "plan", SETUP),
    Verb("schema", "schema", "schema", SETUP),
    Verb("up", "up", "up", FLEET),
    Verb("down", "down", "down", FLEET),
    Verb("status", "status", "status", FLEET),
    Verb("top", "top", "top", FLEET),
    Verb("wait", "wait", "wait", FLEET),
    Verb("logs", "logs", "logs", FLEET),
    Verb("restart", "restart", "restart", FLEET),
    Verb("scale", "scale", "scale", FLEET),
    Verb("pause", "pause", "pause", FREEZE),
    Verb("resume", "pause", "resume", FREEZE),
    Verb("sleep", "sleep", "sleep", FREEZE),
    Verb("wake", "sleep", "wake", FREEZE),
    Verb("sync-weights", "sync_weights", "sync_weights", WEIGHTS),
    Verb("jobs", "jobs", "app", WEIGHTS),
    Verb("weights", "weights", "app", WEIGHTS),
    Verb("generate", "generate", "generate", TRAFFIC),
    Verb("urls", "urls", "urls", TRAFFIC),
    Verb("doctor", "doctor", "doctor", CHECKS),
    Verb("smoke", "smoke", "smoke", CHECKS),
    Verb("help", "help", "help_", CHECKS),
]

app = typer.Typer(
    name="skyctl",
    help="Operate fleets of vLLM servers: launch, freeze, thaw, and push weights while they run.",
    epilog="Start here: skyctl init --tiny demo && cd demo && skyctl up",
    no_args_is_help=True,
    add_completion=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        typer.echo(f"skyctl {__version__}")
        raise typer.Exit()


@app.callback()
def _global_options(
    version: bool = typer.Option(
        False, "--version", callback=_print_version, is_eager=True, help="Print the version."
    ),
    quiet: bool = typer.Option(False, "-q", "--quiet", help="Print results only, no progress."),
    no_color: bool = typer.Option(False, "--no-color", help="No colours."),
    debug: bool = typer.Option(
        False, "--debug", envvar="SKYCTL_DEBUG", help="Show a traceback with an error."
    ),
) -> None:
    from skyctl import output

    output.configure(
        command=output.mode.command, json=output.mode.json, quiet=quiet, color=not no_color
    )


def register_all() -> None:
    """Fill the app from the table. Command modules import their heavy parts inside functions."""
    for verb in VERBS:
        command = getattr(importlib.import_module(f"skyctl.cli.{verb.module}"), verb.function)
        if isinstance(command, typer.Typer):
            app.add_typer(command, name=verb.name, rich_help_panel=verb.panel)
        else:
            app.command(verb.name, rich_help_panel=verb.panel)(command)


register_all()


def main() -> None:
    """Entry point: run one command, print one error, exit with its documented code."""
    from skyctl import output

    arguments = sys.argv[1:]
    words = [word for word in arguments if not word.startswith("-")]
    output.configure(command=words[0] if words else "skyctl", json="--json" in arguments)
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else int(ExitCode.OK))
    except SkyctlError as error:
        if "--debug" in arguments:
            raise
        output.emit_error(error)
        sys.exit(int(error.exit_code))
    except KeyboardInterrupt:
        output.err.print("interrupted")
        sys.exit(int(ExitCode.INTERRUPTED))
    except typer.Abort:
        sys.exit(int(ExitCode.INTERRUPTED))
    except Exception as error:
        # click's own usage errors know how to show themselves, with their usage line
        show = getattr(error, "show", None)
        if show is None:
            raise
        if output.mode.json:
            output.emit_error(UsageError(getattr(error, "message", str(error))))
        else:
            show()
        sys.exit(int(ExitCode.USAGE))
