"""What other interpreters are asked before anything is spawned."""

from __future__ import annotations

from pathlib import Path

import pytest

from skyctl.core.check import check_plan
from tests.unit.core.plans import local_plan, problems, with_checkpoint


@pytest.fixture
def base_dir(tmp_path: Path) -> Path:
    return with_checkpoint(tmp_path)


@pytest.fixture
def interpreter(tmp_path: Path) -> str:
    """An interpreter that says every module is there, whatever is installed here."""
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    return str(script)


def test_an_interpreter_that_fails_is_reported(base_dir: Path, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.write_text("#!/bin/sh\nexit 3\n")
    broken.chmod(0o755)
    (message,) = problems(local_plan(base_dir, str(broken)))
    assert "cannot be run" in message


def test_packages_missing_from_another_interpreter_are_reported(
    base_dir: Path, tmp_path: Path
) -> None:
    bare = tmp_path / "bare"
    bare.write_text("#!/bin/sh\necho vllm skyctl\n")
    bare.chmod(0o755)
    found = check_plan(local_plan(base_dir, str(bare)))
    assert [problem.message for problem in found] == [
        f"vllm is not installed for {bare}",
        f"skyctl is not installed for {bare}",
    ]
    assert "scripts/setup.sh" in found[0].hint


def test_a_vllm_that_does_not_say_its_names_refuses_none(base_dir: Path, interpreter: str) -> None:
    assert problems(local_plan(base_dir, interpreter, args={"max-modle-len": 8})) == []
