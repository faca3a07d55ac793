"""The guard in an interpreter that has no skyctl."""

from __future__ import annotations

import subprocess
import sys

from skyctl.engines.guarding import ALONE


def test_the_guard_loads_alone_in_an_interpreter_without_skyctl() -> None:
    code = (
        "import sys, skyctl_guard; print(skyctl_guard.Guard.__name__, 'skyctl' in sys.modules, "
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
    assert done.stdout.split() == ["Guard", "False", "False"]
