"""Calls of commands to a fleet, and Ctrl-C in them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from skyctl import service
from skyctl.cli.fleet_calls import begun_and_followed
from skyctl.core.registry import select


@pytest.mark.parametrize(("interrupted", "hint"), [("begin", ""), ("follow", "recover-4 goes on")])
def test_ctrl_c_says_how_to_go_on_with_what_has_begun(
    interrupted: str,
    hint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    @asynccontextmanager
    async def connect(ref: Any) -> AsyncIterator[Any]:
        yield None

    async def begin(running: Any) -> int:
        if interrupted == "begin":
            raise KeyboardInterrupt
        return 4

    async def follow(running: Any, begun: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(service, "connect", connect)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fleet.yaml").write_text("name: a\nmodel: org/tiny\n")
    with pytest.raises(KeyboardInterrupt):
        begun_and_followed(
            select(None, None), begin, follow, lambda begun: f"recover-{begun} goes on"
        )
    assert capsys.readouterr().err == (f"warning: {hint}\n" if hint else "")
