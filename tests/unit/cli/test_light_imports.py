"""Commands of the light install import nothing heavy, whatever they are asked."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HEAVY = {"torch", "vllm", "vllm_router", "transformers", "numpy"}


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["validate"], ["status"], ["pause"], ["resume"]],
    ids=" ".join,
)
def test_a_light_command_imports_nothing_heavy(arguments: list[str], tmp_path: Path) -> None:
    # a server that nobody listens for: every step up to the connection is taken
    (tmp_path / "fleet.yaml").write_text("name: far\nservers: [http://127.0.0.1:9]\n")
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "skyctl", *arguments],
        cwd=tmp_path,
        env={**os.environ, "SKYCTL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    lines = [line for line in done.stderr.splitlines() if line.startswith("import time:")]
    imported = {line.rsplit("|", 1)[1].strip().split(".")[0] for line in lines}
    assert "skyctl" in imported
    assert not HEAVY & imported
