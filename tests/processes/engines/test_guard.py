"""The guard, the gate and the versions in an interpreter that has no skyctl."""

from __future__ import annotations

import subprocess
import sys

import pytest

from skyctl.engines.guarding import ALONE


@pytest.mark.parametrize(
    "path",
    ["skyctl_inside.guard.Guard", "skyctl_inside.gate.Gate", "skyctl_inside.versions.Versioned"],
)
def test_each_loads_alone_in_an_interpreter_without_skyctl(path: str) -> None:
    module, _, name = path.rpartition(".")
    code = (
        f"import sys, {module}; print({path}.__name__, 'skyctl' in sys.modules, "
        "'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", code],
        env={"PYTHONPATH": str(ALONE)},
        cwd="/",
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [name, "False", "False"]
