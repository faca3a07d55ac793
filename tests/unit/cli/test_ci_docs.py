"""The workflow in docs/ci.md is YAML that GitHub would take, and calls skyctl as it is."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml

from skyctl.cli import app as app_module

DOCUMENT = (Path(__file__).parents[3] / "docs" / "ci.md").read_text()


def workflow() -> dict[str, Any]:
    match = re.search(r"```yaml\n(.*?)```", DOCUMENT, re.DOTALL)
    assert match is not None
    parsed: dict[str, Any] = yaml.safe_load(match[1])
    return parsed


def command_lines() -> list[str]:
    """Every skyctl command of the document, continued lines joined, comments left out."""
    runs = [step["run"] for step in workflow()["jobs"]["smoke"]["steps"] if "run" in step]
    consoles = re.findall(r"```console\n(.*?)```", DOCUMENT, re.DOTALL)
    shown = [line[2:] for block in consoles for line in block.splitlines() if line[:2] == "$ "]
    lines = [line for run in runs for line in run.replace("\\\n", " ").splitlines()] + shown
    commands = [part for line in lines for part in line.split("#")[0].split("&&")]
    return [command.strip() for command in commands if command.strip().startswith("skyctl ")]


def test_the_workflow_has_a_bounded_job_whose_steps_run_or_use_something() -> None:
    job = workflow()["jobs"]["smoke"]
    assert job["timeout-minutes"] <= 30
    assert all(("run" in step) != ("uses" in step) for step in job["steps"])
    keep = job["steps"][-1]
    assert keep["if"] == "always()" and "fleet/logs" in keep["with"]["path"]


@pytest.mark.parametrize("line", command_lines())
def test_every_command_line_is_one_that_skyctl_parses(line: str) -> None:
    _, name, *arguments = shlex.split(line)
    app_module.register(app_module.VERBS)
    group = typer.main.get_command(app_module.app)
    command = group.commands[name]  # type: ignore[attr-defined]
    command.make_context(name, arguments)  # raises for what it does not know


def test_the_document_shows_the_commands_it_is_about() -> None:
    names = {shlex.split(line)[1] for line in command_lines()}
    assert names == {"init", "doctor", "smoke", "status", "wait"}
