"""The `skyctl` command: the table of all verbs, and the one place where errors are printed."""

from __future__ import annotations

import contextlib
import errno
import importlib
import inspect
import os
import sys
import traceback
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

import typer

from skyctl import __version__, startup
from skyctl.cli.arguments import command_name, given, options_first
from skyctl.cli.plain_values import spare_validators
from skyctl.errors import (
    ExitCode,
    InternalError,
    Interrupted,
    PreflightError,
    SkyctlError,
    UsageError,
)
from skyctl.output_mode import configure, discard_stdout, mode
from skyctl.sanitize import sanitized
from skyctl.store.unrecorded import LOST


class Verb(NamedTuple):
    """One command: `module` under skyctl.cli holds a function of name `function`."""

    name: str
    module: str
    function: str
    panel: str


FLEET, FREEZE, WEIGHTS = "Fleet", "Freeze and thaw", "Weights"
TRAFFIC, SETUP, CHECKS = "Traffic", "Fleet file", "Checks and help"
REMOTE = "A fleet of another machine"

VERBS = [
    Verb("init", "init", "init", SETUP),
    Verb("validate", "validate", "validate", SETUP),
    Verb("plan", "plan", "plan", SETUP),
    Verb("schema", "schema", "schema", SETUP),
    Verb("up", "up", "up", FLEET),
    Verb("rollout", "rollout", "app", FLEET),
    Verb("drain", "drain", "drain", FLEET),
    Verb("down", "up", "down", FLEET),
    Verb("status", "status", "status", FLEET),
    Verb("ls", "ls", "ls", FLEET),
    Verb("top", "top", "top", FLEET),
    Verb("wait", "wait", "wait", FLEET),
    Verb("logs", "logs", "logs", FLEET),
    Verb("events", "events", "events", FLEET),
    Verb("restart", "replicas", "restart", FLEET),
    Verb("recover", "recover", "recover", FLEET),
    Verb("scale", "replicas", "scale", FLEET),
    Verb("pause", "freeze", "pause", FREEZE),
    Verb("resume", "freeze", "resume", FREEZE),
    Verb("sleep", "freeze", "sleep", FREEZE),
    Verb("wake", "freeze", "wake", FREEZE),
    Verb("switch", "switch", "switch", FREEZE),
    Verb("sync-weights", "sync_weights", "sync_weights", WEIGHTS),
    Verb("canary", "canary", "app", WEIGHTS),
    Verb("jobs", "jobs", "app", WEIGHTS),
    Verb("weights", "weights", "app", WEIGHTS),
    Verb("adapters", "adapters", "app", WEIGHTS),
    Verb("tinker", "tinker", "app", WEIGHTS),
    Verb("generate", "generate", "generate", TRAFFIC),
    Verb("urls", "urls", "urls", TRAFFIC),
    Verb("doctor", "doctor", "doctor", CHECKS),
    Verb("smoke", "smoke", "smoke", CHECKS),
    Verb("help", "help", "help_", CHECKS),
]

_ADVICE = {
    errno.ENOSPC: "free space where it is written",
    errno.EDQUOT: "free space where it is written",
    errno.ENAMETOOLONG: "give a shorter path",
}
_LOOKS = ("status", "top", "wait", "logs", "events")
_registered: list[Verb] = []

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
    quiet: bool = typer.Option(
        False, "-q", "--quiet", help="Print results only, no progress (with any command)."
    ),
    no_color: bool = typer.Option(False, "--no-color", help="No colours (with any command)."),
    debug: bool = typer.Option(
        False, "--debug", envvar="SKYCTL_DEBUG", help="Show a traceback with an error."
    ),
    token_file: str | None = typer.Option(
        None,
        metavar="FILE",
        envvar="SKYCTL_TOKEN_FILE",
        help="Copy of its supervisor.token (with --fleet https://…).",
        rich_help_panel=REMOTE,
    ),
    ca: str | None = typer.Option(
        None,
        metavar="FILE",
        envvar="SKYCTL_CA",
        help="Copy of its supervisor.pem (with --fleet https://…).",
        rich_help_panel=REMOTE,
    ),
) -> None:
    """Declares them for --help and the parser; `main` reads them from the command line."""
    for variable, path in (("SKYCTL_TOKEN_FILE", token_file), ("SKYCTL_CA", ca)):
        if path is not None:
            os.environ[variable] = path


def register(verbs: Sequence[Verb]) -> None:
    """Put these rows of the table into the app, once. Command modules import their heavy parts
    inside functions."""
    for verb in verbs:
        if verb in _registered:
            continue
        _registered.append(verb)
        command = getattr(importlib.import_module(f"skyctl.cli.{verb.module}"), verb.function)
        if isinstance(command, typer.Typer):
            for below in command.registered_commands:
                below.help = flowing(below.callback.__doc__ if below.callback else None)
            alone = command.registered_callback
            app.add_typer(
                command,
                name=verb.name,
                help=flowing(alone.callback.__doc__ if alone and alone.callback else None),
                short_help=command.info.help,
                rich_help_panel=verb.panel,
            )
        else:
            text = flowing(command.__doc__)
            app.command(verb.name, help=text, rich_help_panel=verb.panel)(command)


def flowing(docstring: str | None) -> str:
    """Paragraphs on one line each; blocks that begin with `\\b` keep their lines."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(
        text if text.startswith("\b") else " ".join(text.split()) for text in paragraphs
    )


def verbs_to_register(arguments: Sequence[str]) -> Sequence[Verb]:
    """The command that was typed; all of them if it is unclear which.

    Each registered command costs some milliseconds: its module and its parser.
    """
    typed = command_name(arguments, {})
    matching = [verb for verb in VERBS if verb.name == typed]
    # `help` shows the pages of others; a shell asks for completions without arguments
    return (
        VERBS if not matching or typed == "help" or "_SKYCTL_COMPLETE" in os.environ else matching
    )


def main() -> None:
    """Entry point: run one command, print one error, exit with its documented code."""
    arguments = sys.argv[1:]
    spare_validators()
    register(verbs_to_register(arguments))
    configure(
        command=command_name(arguments, _groups()),
        json=given("--json", arguments),
        quiet=given("-q", arguments) or given("--quiet", arguments),
        color=not given("--no-color", arguments),
    )
    try:
        _run(arguments)
    except BrokenPipeError:
        # the reader of our output has closed it: there is nothing to report
        discard_stdout()
        sys.exit(int(ExitCode.OK))
    except OSError as error:
        _fail_on_disk(error)
    finally:
        with contextlib.suppress(OSError):
            for path in {lost.path for lost in LOST}:
                from skyctl import output

                of_it = [lost for lost in LOST if lost.path == path]
                output.print_warning(str(of_it[-1].with_all(of_it)))


def _run(arguments: Sequence[str]) -> NoReturn:
    startup.repeat_lost_interrupts()
    try:
        startup.hold_interrupts(False)
        code = app(args=options_first(arguments), standalone_mode=False)
        if code == ExitCode.INTERRUPTED:  # Typer's own answer to Ctrl-C
            _fail(_interrupted())
        sys.stdout.flush()
        sys.exit(code if isinstance(code, int) else int(ExitCode.OK))
    except SkyctlError as error:
        if given("--debug", arguments) or os.environ.get("SKYCTL_DEBUG"):
            raise
        _fail(error)
    except (KeyboardInterrupt, typer.Abort):
        _fail(_interrupted())
    except OSError as error:
        if given("--debug", arguments) or not _of_the_disk(error):
            _fail_unexpectedly(error)
        raise
    except SystemExit as ended:
        if isinstance(ended.__context__, BrokenPipeError):  # Click makes an exit with 1 of it
            raise ended.__context__ from None
        raise
    except Exception as error:
        _fail_unexpectedly(error)


def _of_the_disk(error: OSError) -> bool:
    """Whether a file, a disk or stdout failed, rather than skyctl."""
    full = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO)
    return error.filename is not None or error.errno in full


def _fail_on_disk(error: OSError) -> NoReturn:
    """Report a file that cannot be used, or a stdout that cannot be written."""
    from skyctl import output

    place = f"{error.filename}" if error.filename is not None else "cannot write"
    hint = _ADVICE.get(error.errno or 0, "") if error.filename is not None else ""
    failure = SkyctlError(f"{place}: {error.strerror or error}", hint=hint)
    try:
        sys.stdout.flush()
        _fail(failure)
    except OSError:
        discard_stdout()
        with contextlib.suppress(OSError):  # stderr may be full, too
            output.print_error(failure)
        sys.exit(int(failure.exit_code))


def _interrupted() -> Interrupted:
    """The error of Ctrl-C; what the command began may go on in the supervisor."""
    verb = mode.command.split()[0]
    acts = any(row.name == verb and row.panel in (FLEET, FREEZE, WEIGHTS) for row in VERBS)
    hint = "what it began may go on: skyctl status" if acts and verb not in _LOOKS else ""
    return Interrupted("interrupted", hint=hint)


def _fail(error: SkyctlError) -> NoReturn:
    startup.hold_interrupts(True)
    from skyctl import output

    if isinstance(error, UsageError) and not error.hint:
        error.hint = f"how it is typed: skyctl {mode.command} --help"
    if isinstance(error, PreflightError) and not error.hint:
        error.hint = "nothing was touched: repair it, then run this again"
    try:
        output.emit_error(error)
    except BrokenPipeError:
        discard_stdout()
    sys.exit(int(error.exit_code))


def _of_an_interrupt(error: BaseException | None) -> bool:
    """Whether Ctrl-C caused `error`.

    Python turns KeyboardInterrupt in a class body into a RuntimeError, pydantic into a SchemaError
    whose text ends with its name.
    """
    while error is not None:
        if isinstance(error, KeyboardInterrupt) or str(error).endswith("KeyboardInterrupt: "):
            return True
        error = error.__cause__ or error.__context__
    return False


def _fail_unexpectedly(error: Exception) -> NoReturn:
    """Report a command line that the parser refused, Ctrl-C during an import, or a bug."""
    if _of_an_interrupt(error):
        _fail(_interrupted())
    show = getattr(error, "show", None)
    if show is None:
        sys.stderr.write(sanitized(traceback.format_exc()))
        _fail(InternalError(f"a bug in skyctl: {error!r}", hint="report it with the lines above"))
    command = mode.command
    is_verb = command.split()[0] in {verb.name for verb in VERBS}
    from skyctl.cli.mistyped import explain

    text: str = getattr(error, "format_message", error.__str__)()
    message, hint = explain(text, command if is_verb else "")
    _fail(UsageError(message, hint=hint))


def _groups() -> dict[str, set[str]]:
    """The commands of each group of commands."""
    return {
        group.name: {
            below.name or str(getattr(below.callback, "__name__", ""))
            for below in group.typer_instance.registered_commands
        }
        for group in app.registered_groups
        if group.name and group.typer_instance
    }
