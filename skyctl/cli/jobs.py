"""Placeholder."""

import typer

app = typer.Typer(help="Placeholder.")


@app.command("list")
def _list() -> None:
    raise NotImplementedError
