"""What was typed reaches a command as Typer would give it, or Typer says what is wrong with it."""

from __future__ import annotations

import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperArgument, TyperOption
from typer.testing import CliRunner

from skyctl.cli.plain_values import spare_validators


class _Way(StrEnum):
    SHM = "shm"
    DISK = "disk"


@pytest.mark.parametrize(
    "typed",
    [
        [],
        ["ckpt", "--way", "disk"],
        ["Gewichte-ß", "--server", "a", "--server", "b", "--count", "2", "--file", "x"],
        ["ckpt", "--way", "tape"],
        ["ckpt", "--count", "two"],
        ["\udcff"],
    ],
    ids=ascii,
)
def test_a_value_is_the_same_without_a_validator(
    typed: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = _given(typed)
    for kind in (TyperArgument, TyperOption):
        monkeypatch.setattr(kind, "process_value", kind.process_value)  # put back at the end
    spare_validators()
    assert _given(typed) == expected


def test_plain_values_are_taken_without_pydantic(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (TyperArgument, TyperOption):
        monkeypatch.setattr(kind, "process_value", kind.process_value)
    spare_validators()
    monkeypatch.setitem(sys.modules, "typer._adapters", None)  # an import of it fails
    assert _given(["ckpt", "--way", "disk"])["way"] is _Way.DISK


def _given(typed: list[str]) -> dict[str, Any]:
    """What a command is called with, or what Typer says."""
    app, received = typer.Typer(), dict[str, Any]()

    @app.command()
    def command(
        checkpoint: Annotated[str | None, typer.Argument()] = None,
        way: Annotated[_Way, typer.Option()] = _Way.SHM,
        server: Annotated[list[str] | None, typer.Option()] = None,
        count: Annotated[int | None, typer.Option()] = None,
        file: Annotated[Path | None, typer.Option()] = None,
        json: Annotated[bool, typer.Option("--json")] = False,
    ) -> None:
        received.update(locals())

    result = CliRunner().invoke(app, typed)
    return {key: received[key] for key in received if key != "received"} | {"says": result.output}
