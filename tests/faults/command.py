"""The real `skyctl` command in a process of its own, on a fleet file that attaches to stubs."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from skyctl.http.target import ServerTarget


async def skyctl(*arguments: str, home: Path, file: Path) -> tuple[int, dict[str, Any]]:
    """The real command in a process of its own; its exit code and JSON envelope."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "skyctl", *arguments, "--file", str(file), "--json"),
        env={"SKYCTL_HOME": str(home), "PATH": "", "HOME": str(home)},
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(60):
            stdout, stderr = await process.communicate()
    except TimeoutError:
        process.kill()
        raise
    assert process.returncode is not None
    assert stdout, stderr.decode()
    envelope: dict[str, Any] = json.loads(stdout)
    return process.returncode, envelope


def attached(tmp_path: Path, targets: list[ServerTarget]) -> Path:
    file = tmp_path / "fleet.yaml"
    urls = "".join(f"  - {target.url}\n" for target in targets)
    file.write_text(f"name: eight\nservers:\n{urls}control_timeout_s: 1\n")
    return file
