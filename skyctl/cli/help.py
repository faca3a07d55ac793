"""`skyctl help`: short texts for what the help of a single command has no room for."""

from __future__ import annotations

import io
from contextlib import redirect_stdout
from typing import Annotated

import typer
from rich.text import Text

from skyctl import output
from skyctl.cli import complete
from skyctl.cli.options import JsonOption


def help_(
    context: typer.Context,
    topic: Annotated[
        str | None,
        typer.Argument(
            metavar="TOPIC",
            help="What to explain (default: list the topics), or a command.",
            autocompletion=complete.topics,
        ),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Explain pause modes, sleep levels, transports, states, recovery or exit codes.

    \b
    Examples:
      skyctl help
      skyctl help pause-modes
      skyctl help sync-weights      # the same as skyctl sync-weights --help
    """
    from skyctl.help import text_of, topics

    if topic is None:
        titles = topics()
        width = max(len(name) for name in titles)
        lines = [f"  {name:<{width}}  {title.partition(': ')[2]}" for name, title in titles.items()]
        more = ["", "Read one: skyctl help TOPIC", "A command's own: skyctl COMMAND --help"]
        output.emit({"topics": titles}, Text("\n".join(["Topics", *lines, *more])))
        return
    if (page := _page_of(context, topic)) is not None:
        output.emit({"command": topic, "text": page}, Text.from_ansi(page.rstrip()))
        return
    text = text_of(topic)
    output.emit({"topic": topic, "text": text}, Text(text.rstrip()))


def _page_of(context: typer.Context, command: str) -> str | None:
    """The help page of a command, or None if there is none of this name."""
    assert context.parent is not None  # `help` is a command of a group
    group = context.parent.command
    page_command = group.get_command(context.parent, command)  # type: ignore[attr-defined]
    if page_command is None:
        return None
    with (
        page_command.make_context(
            command, [], parent=context.parent, resilient_parsing=True
        ) as inner,
        redirect_stdout(io.StringIO()) as printed,
    ):
        # with Rich it prints the page, without it returns it
        returned = page_command.get_help(inner)
    return printed.getvalue() or str(returned)
