"""`skyctl doctor` from the command line: what it prints, and its exit code by severity."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from skyctl import output
from skyctl.cli.doctor import _lines
from skyctl.core import check
from skyctl.core.findings import Severity
from skyctl.doctor import machine
from skyctl.doctor.check_line import CheckLine
from tests.unit.cli.commands import run


@pytest.fixture
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SKYCTL_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SKYCTL_FILE", raising=False)
    monkeypatch.delenv("SKYCTL_FLEET", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    (tmp_path / "python").touch(mode=0o755)
    # what other programs say: it has everything, and there is no GPU
    monkeypatch.setattr(check, "_missing_in", lambda python, modules: [])
    monkeypatch.setattr(machine, "read_packages", lambda python: {})
    monkeypatch.setattr(machine, "read_gpus", lambda: ((), None))
    return tmp_path


def write(directory: Path, more: str = "") -> None:
    text = f"name: f\nmodel: ./model\npython: ./python\ndevice: cpu\n{more}"
    (directory / "fleet.yaml").write_text(text)


def test_exit_code_and_words_follow_the_severity(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(directory)
    code, out, _ = run(monkeypatch, capsys, "doctor")
    assert code == 0 and "fleet f is not running" in out
    write(directory, "router: {host: 0.0.0.0}\n")
    code, out, _ = run(monkeypatch, capsys, "doctor")
    assert code == 0 and "! router.host 0.0.0.0" in out and "→ " in out
    code, _, err = run(monkeypatch, capsys, "doctor", "--strict")
    assert code == 1 and "1 warning" in err
    write(directory, "ports: [1]\nreplicas: 2\nrouter: {port: 1}\n")
    code, out, err = run(monkeypatch, capsys, "doctor")
    assert code == 1 and "✗ port 1 is given to" in out and "error" in err


def test_a_file_that_does_not_load_is_a_finding_and_the_machine_is_examined_all_the_same(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(directory, "replcas: 2\n")
    code, out, _ = run(monkeypatch, capsys, "doctor", "--json")
    findings = json.loads(out)["data"]["findings"]
    assert code == 1
    assert "replicas" in findings[-1]["message"] + findings[-1]["fix"]
    assert {finding["section"] for finding in findings} == {"machine", "fleet-file"}


def test_without_a_fleet_the_machine_is_examined_but_a_named_one_must_exist(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run(monkeypatch, capsys, "doctor")
    assert code == 0 and "Machine" in out and "no fleet file" in err
    code, _, _ = run(monkeypatch, capsys, "doctor", "--fleet", "nope")
    assert code == 4


def test_quiet_prints_only_what_is_wrong(
    directory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write(directory, "router: {host: 0.0.0.0}\n")
    _, out, _ = run(monkeypatch, capsys, "-q", "doctor")
    assert "✓" not in out and "!" in out


def test_a_long_finding_is_cut_between_words_on_a_terminal_and_whole_in_a_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    finding = CheckLine("machine", "gpus", Severity.WARNING, "word " * 20 + "end", "the fix")
    assert len(_lines([finding])) == 4  # title, finding, fix, blank
    monkeypatch.setattr(output, "out", Console(force_terminal=True, width=40))
    lines = [line.plain for line in _lines([finding])]
    assert max(map(len, lines)) <= 40
    assert lines[1].startswith("! word") and all(line.startswith("  word") for line in lines[2:4])
