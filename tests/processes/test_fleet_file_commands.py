"""init, validate, plan, schema and urls as a user runs them."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.forking import command


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """A directory with a valid two-replica fleet file whose interpreter 'has' everything."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a/config.json").write_text("{}")
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\n")
    python.chmod(0o755)
    (tmp_path / "fleet.yaml").write_text(
        "name: demo\nmodel: ./a\nreplicas: 2\ndevice: cpu\npython: ./python\n"
    )
    return tmp_path


def skyctl(
    cwd: Path, *arguments: str, interpreter: tuple[str, ...] = (), **environ: str
) -> subprocess.CompletedProcess[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith(("SKYCTL_", "COLUMNS"))}
    env |= {"SKYCTL_HOME": str(cwd / ".state"), "COLUMNS": "80", **environ}
    # what is imported is decided already where commands are forked
    start = subprocess.Popen[str] if interpreter else command
    process = start(
        [sys.executable, *interpreter, "-m", "skyctl", *arguments],
        cwd=cwd,
        env=env,
        text=True,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(arguments, process.returncode, stdout, stderr)


def envelope(result: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    loaded = json.loads(result.stdout)
    assert loaded["exit_code"] == result.returncode
    return dict(loaded)


def test_validate_says_what_the_fleet_is(here: Path) -> None:
    for arguments in (("validate",), ("validate", "fleet.yaml"), ("validate", "-f", "fleet.yaml")):
        result = skyctl(here, *arguments)
        assert (result.returncode, result.stderr) == (0, "")
        assert result.stdout == "fleet demo: valid, 2 replicas of a on cpu\n"


def test_validate_imports_neither_torch_nor_vllm(here: Path) -> None:
    (here / "fleet.yaml").write_text("name: demo\nmodel: ./a\nreplicas: 2\ndevice: cpu\n")
    result = skyctl(here, "validate", interpreter=("-X", "importtime"))
    imported = {line.rsplit("|", 1)[-1].strip() for line in result.stderr.splitlines()}
    assert "skyctl.core.check" in imported
    assert not {"torch", "vllm", "vllm_router", "transformers", "numpy"} & imported


def test_validate_lists_all_problems_and_fails(here: Path) -> None:
    (here / "fleet.yaml").write_text(
        "name: demo\nmodel: ./b\ndevice: cpu\npython: ./nowhere\nports: [23]\nhost: 192.0.2.1\n"
    )
    result = skyctl(here, "validate")
    assert result.returncode == 1
    assert result.stdout.count("✗") == 3
    assert "error: fleet demo: 3 problems" in result.stderr
    data = envelope(skyctl(here, "validate", "--json"))["data"]
    assert len(data["problems"]) == 3
    assert "host 192.0.2.1: tokens cross the network" in data["warnings"][0]
    assert skyctl(here, "validate", "--offline").returncode == 0


def test_validate_offline_needs_no_key_and_no_gpu(here: Path) -> None:
    (here / "fleet.yaml").write_text(
        "name: demo\nmodel: ./a\napi_key_env: NO_SUCH_KEY\nweight_transfer: {transport: nccl}\n"
    )
    result = skyctl(here, "validate", "--offline")
    assert (result.returncode, result.stderr) == (0, "")


def test_a_wrong_file_is_one_line_per_problem_and_exit_code_2(here: Path) -> None:
    (here / "fleet.yaml").write_text("name: demo\nmodel: ./a\nreplcias: 2\nports: x\n")
    result = skyctl(here, "validate")
    assert result.returncode == 2
    assert result.stderr.splitlines()[:2] == [
        "error: fleet.yaml:3: unknown key 'replcias'; did you mean 'replicas'?",
        "fleet.yaml:4: ports: expected a list, got 'x'",
    ]
    failed = envelope(skyctl(here, "validate", "--json"))
    assert failed["error"]["kind"] == "FleetFileError"
    assert [problem["line"] for problem in failed["data"]["problems"]] == [3, 4]


def test_a_missing_file_is_named_with_what_to_type(here: Path) -> None:
    result = skyctl(here, "plan", "nope.yaml")
    assert result.returncode == 2
    assert "error: nope.yaml: no such file" in result.stderr
    assert "skyctl init" in result.stderr


def test_two_different_files_are_refused(here: Path) -> None:
    result = skyctl(here, "plan", "one.yaml", "-f", "two.yaml")
    assert result.returncode == 2
    assert "one.yaml and two.yaml" in result.stderr


def test_plan_prints_commands_that_a_shell_reads_back(here: Path) -> None:
    text = skyctl(here, "plan").stdout
    data = envelope(skyctl(here, "plan", "--json"))["data"]
    assert [server["name"] for server in data["servers"]] == ["demo-0", "demo-1"]
    _, _, command = text.partition("# demo-1\n")
    words = shlex.split(command.partition("\n\n")[0].replace("\\\n", ""))
    argv = words[[word.endswith("python") for word in words].index(True) :]
    # free ports differ from one run to the next
    expected = data["servers"][1]["argv"]
    port = expected.index("--port") + 1
    assert argv[:port] + argv[port + 1 :] == expected[:port] + expected[port + 1 :]
    for key, value in data["servers"][1]["env"].items():
        assert f"{key}={value}" in words


def test_plan_fits_a_narrow_terminal_without_losing_commands(here: Path) -> None:
    narrow = skyctl(here, "plan", COLUMNS="40").stdout
    assert "skyctl.engines.vllm.inside.worker.SkyctlWorkerExtension" in narrow


def test_plan_masks_secrets(here: Path) -> None:
    with (here / "fleet.yaml").open("a") as file:
        file.write("api_key_env: DEMO_KEY\nenv: {HF_TOKEN: hf_secret}\n")
    for arguments in (("plan",), ("plan", "--json")):
        result = skyctl(here, *arguments, DEMO_KEY="s3cret")
        assert result.returncode == 0
        assert "***" in result.stdout
        assert "s3cret" not in result.stdout and "hf_secret" not in result.stdout


def test_plan_and_validate_of_an_attached_fleet_start_nothing(here: Path) -> None:
    (here / "fleet.yaml").write_text("name: demo\nservers: ['http://h:1']\nrouter: http://h:2\n")
    result = skyctl(here, "plan")
    assert result.returncode == 0
    assert "nothing to start" in result.stdout and "http://h:1" in result.stdout
    assert envelope(skyctl(here, "plan", "--json"))["data"]["attached"] == ["http://h:1"]
    assert "1 server that skyctl did not start" in skyctl(here, "validate").stdout


def test_neither_validate_nor_plan_leaves_a_trace(here: Path) -> None:
    before = sorted(here.rglob("*"))
    skyctl(here, "validate")
    skyctl(here, "plan")
    assert sorted(here.rglob("*")) == before


def test_schema_prints_plain_json(here: Path) -> None:
    schema = json.loads(skyctl(here, "schema", COLUMNS="40").stdout)
    assert schema["title"] == "skyctl fleet file"
    assert schema["properties"]["replicas"]["anyOf"][0]["minimum"] == 1
    assert envelope(skyctl(here, "schema", "--json"))["data"] == schema


def test_init_writes_a_file_and_prints_what_to_do_next(tmp_path: Path) -> None:
    result = skyctl(tmp_path, "init", "my fleet", "--model", "org/model", "--replicas", "3")
    assert (result.returncode, result.stderr) == (0, "")
    assert "cd 'my fleet'\n  skyctl validate\n  skyctl up" in result.stdout
    assert "name: my-fleet" in (tmp_path / "my fleet/fleet.yaml").read_text()
    again = skyctl(tmp_path, "init", "my fleet")
    assert again.returncode == 1
    assert "--force" in again.stderr


def test_init_here_does_not_tell_to_change_directory(tmp_path: Path) -> None:
    result = skyctl(tmp_path, "init", "--servers", "http://h:1, http://h:2", "--name", "far")
    assert result.returncode == 0
    assert "cd " not in result.stdout
    assert "skyctl status" in result.stdout
