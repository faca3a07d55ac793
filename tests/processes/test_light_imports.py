"""Commands of the light install import nothing heavy, whatever they are asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from skyctl.cli.app import VERBS, verbs_to_register

HEAVY = {"torch", "vllm", "vllm_router", "transformers", "numpy"}
# what generation and the supervisor's own server need, and a client's command does not
ELSEWHERE = {"httpx", "anyio", "starlette", "uvicorn"}


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
    assert not (HEAVY | ELSEWHERE) & imported
    if arguments[0] == "pause":
        assert "skyctl.cli.up" not in done.stderr, "only the command that was typed is loaded"


def test_a_push_is_asked_for_before_what_carries_it_out_is_imported(tmp_path: Path) -> None:
    """The command loads neither the push, nor what looks at servers, nor what reads and shows the
    result: half its time went into that."""
    asked = (
        "import os, sys\n"
        "from skyctl.core import registry\n"
        "registry.supervisor_running = lambda paths: True\n"
        "from skyctl.service import supervised\n"
        "async def ask(self, verb, asked, result):\n"
        "    print(verb.name, *sys.modules, sep='\\n', flush=True)\n"
        "    os._exit(0)\n"
        "supervised.RemoteFleet._ask = ask\n"
        "sys.argv = ['skyctl', 'sync-weights', '.', '--transport', 'shm']\n"
        "from skyctl.cli.app import main\n"
        "main()\n"
    )
    file, directory = tmp_path / "fleet.yaml", tmp_path / "home" / "fleets" / "here"
    directory.mkdir(parents=True)  # of a fleet that is up from this file
    for path in (file, directory / "fleet.yaml"):
        path.write_text("name: here\nmodel: ./m\n")
    origin = {"file": str(file), "kind": "supervised"}
    (directory / "origin.json").write_text(json.dumps(origin))
    done = subprocess.run(
        [sys.executable, "-c", asked],
        cwd=tmp_path,
        env={**os.environ, "SKYCTL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    verb, *modules = done.stdout.splitlines()
    assert verb == "start_push"
    late = ("push.transaction", "push.preflight", "push.trial", "core.observation", "core.jobs")
    late += ("engines.vllm.server", "engines.prometheus", "transfer.plan", "core.plan")
    late += ("core.following", "core.status", "store.state", "output")
    # Typer and the wire need pydantic for other values than these, and its import is the longest
    assert not {"pydantic", "rich", "sqlite3", *(f"skyctl.{name}" for name in late)} & set(modules)


@pytest.mark.parametrize(
    ("typed", "registered"),
    [
        (["pause", "--mode", "keep"], {"pause"}),
        (["-q", "jobs", "show", "push-1"], {"jobs"}),
        (["puse"], None),
        (["help", "pause-modes"], None),
        (["--help", "--no-color"], None),
        ([], None),
    ],
)
def test_all_commands_are_there_unless_one_was_plainly_typed(
    typed: list[str], registered: set[str] | None
) -> None:
    found = {verb.name for verb in verbs_to_register(typed)}
    assert found == (registered or {verb.name for verb in VERBS})


def test_a_shell_that_asks_for_completions_sees_all_commands(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("_SKYCTL_COMPLETE", "complete_bash")
    assert verbs_to_register(["pause"]) == VERBS
