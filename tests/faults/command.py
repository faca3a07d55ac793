"""The real `skyctl` command in a process of its own, on a fleet file that attaches to stubs."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from skyctl.http.target import ServerTarget
from tests.forking import command


async def skyctl(*arguments: str, home: Path, file: Path) -> tuple[int, dict[str, Any]]:
    """The real command in a process of its own; its exit code and JSON envelope."""
    process = command(
        [sys.executable, "-m", "skyctl", *arguments, "--file", str(file), "--json"],
        cwd=Path.cwd(),
        env={"SKYCTL_HOME": str(home), "PATH": "", "HOME": str(home)},
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    try:
        stdout, stderr = await asyncio.to_thread(process.communicate, timeout=60)
    except BaseException:
        process.kill()
        raise
    assert stdout, stderr
    envelope: dict[str, Any] = json.loads(stdout)
    return process.returncode, envelope


def attached(tmp_path: Path, targets: list[ServerTarget]) -> Path:
    file = tmp_path / "fleet.yaml"
    urls = "".join(f"  - {target.url}\n" for target in targets)
    file.write_text(f"name: eight\nservers:\n{urls}control_timeout_s: 1\n")
    return file
