"""What starts SGLang, in an interpreter of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import skyctl.engines.sglang.inside.serve as serve
from skyctl.engines.guarding import ALONE
from tests.faults.stub_fleet import ROOT

HERE = str(Path(serve.__file__).parent)


def test_the_file_finds_its_layers_without_skyctl() -> None:
    code = (
        f"import runpy; told = runpy.run_path({serve.__file__!r}); print(told['Keeper'].__name__)"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-P", "-c", f"import sys; sys.path.insert(0, {HERE!r}); {code}"],
        env={"PYTHONPATH": str(ALONE)},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["Keeper"], done.stderr


def test_a_server_with_a_key_and_no_control_token_does_not_start() -> None:
    done = subprocess.run(
        [sys.executable, serve.__file__, "--model", "stub-model", "--port", "0"],
        env={"PYTHONPATH": f"{ROOT}/tests/stub/fake_sglang:{ROOT}", "SKYCTL_API_KEY": "k" * 32},
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    assert done.returncode and "holds no control token" in done.stderr
