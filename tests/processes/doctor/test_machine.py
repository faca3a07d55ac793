"""What the doctor asks other programs about a machine."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skyctl.doctor import machine
from skyctl.doctor.machine import (
    GpuFacts,
    Needs,
    check_machine,
    gather,
    read_gpus,
    read_packages,
)


def answering(text: str) -> list[str]:
    return [sys.executable, "-c", f"print({text!r})"]


def test_nvidia_smi_is_read_with_names_that_have_commas_and_with_unknowns() -> None:
    gpus, driver = read_gpus(
        answering("1, GH200, odd, 98304, 12, 580.65, [N/A]\n0, H100, 81559, 0, 580.65, 3\nnoise")
    )
    assert driver == "580.65"
    assert gpus == (
        GpuFacts(0, "H100", 81559 * 1024**2, 0, 3),
        GpuFacts(1, "GH200,odd", 98304 * 1024**2, 12 * 1024**2, 0),
    )
    assert read_gpus(["no-such-program-anywhere"]) == ((), None)


def test_packages_of_another_interpreter_are_those_it_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "PACKAGES", ("pydantic", "no-such-package"))
    assert list(read_packages(None)) == ["pydantic"]
    assert read_packages(sys.executable) == read_packages(None)
    link = tmp_path / "python"
    link.symlink_to(sys.executable)
    assert set(read_packages(str(link))) <= set(read_packages(None))
    assert read_packages(str(tmp_path / "missing")) == {}


def test_this_machine_can_be_looked_at(tmp_path: Path) -> None:
    facts = gather(None, tmp_path / "not" / "there")
    assert facts.state_free
    assert check_machine(facts, Needs())
