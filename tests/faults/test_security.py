"""A fleet of stubs as another user of the machine meets it, and where its secrets are not."""

from __future__ import annotations

import json
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.faults.stub_fleet import StubFleet
from tests.pids import kill

CONTROL = ("/pause", "/resume", "/sleep", "/collective_rpc", "/update_weights", "/new")
DATA = ("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[StubFleet]:
    fleet = StubFleet(tmp_path)
    fleet.write()
    yield fleet
    fleet.run("down", "--drain-timeout", "0")


def secret(fleet: StubFleet, name: str) -> str:
    return (fleet.directory / "home" / "fleets" / "stubs" / name).read_text().strip()


def status(url: str, path: str, given: str | None = None) -> int:
    headers = {} if given is None else {"Authorization": f"Bearer {given}"}
    return httpx.post(url + path, json={}, headers=headers, timeout=10).status_code


def test_who_has_no_token_is_refused_by_every_server_and_through_the_router(
    fleet: StubFleet,
) -> None:
    fleet.run("up")
    urls = fleet.json("urls")["data"]
    token, key = secret(fleet, "control.token"), secret(fleet, "api.key")
    assert status(urls["router"], "/v1/completions") == 401
    assert status(urls["router"], "/v1/completions", key) != 401
    for url in urls["servers"].values():
        for path in (*DATA, *CONTROL):  # requests to a paused server would wait
            assert status(url, path) == 401, path
            assert status(url, path, "wrong" * 12) == 401, path
            assert status(url, path, token) != 401, path
            assert (status(url, path, key) != 401) is (path in DATA), path
        assert httpx.get(url + "/health").status_code == 200
        assert httpx.get(url + "/metrics").status_code == 401
    # none of this was taken for the fleet's own doing
    fleet.run("wake")
    fleet.run("resume")
    assert fleet.json("status")["data"]["health"] == "healthy"


def test_secrets_are_in_their_files_alone_and_servers_that_restart_keep_them(
    fleet: StubFleet,
) -> None:
    fleet.run("up")
    secrets = [secret(fleet, "control.token"), secret(fleet, "api.key")]
    fleet.run("restart", "stubs-0")
    fleet.run("generate", "hi", "--max-tokens", "2")
    fleet.run("generate", "hi", "--max-tokens", "2", "--server", "stubs-0")
    assert [secret(fleet, "control.token"), secret(fleet, "api.key")] == secrets

    shown = [
        fleet.run(*command).stdout + fleet.run(*command).stderr
        for command in (
            ("plan",),
            ("plan", "--json"),
            ("status", "--json"),
            ("status",),
            ("urls",),
            ("urls", "--json"),
            ("urls", "--format", "env"),
            ("urls", "--format", "openai"),
            ("urls", "--format", "skyrl"),
            ("urls", "--format", "prime-rl"),
            ("jobs", "--json"),
            ("weights", "--json"),
            ("logs", "-n", "1000"),
            ("--debug", "pause", "stubs-0", "--json"),
            ("resume", "--json"),
        )
    ]
    traceback = fleet.run("--debug", "pause", "nobody", expect=1).stderr
    assert "Traceback" in traceback
    shown.append(traceback)
    shown += [" ".join(p.info["cmdline"] or ()) for p in psutil.process_iter(["cmdline"])]
    home = fleet.directory / "home"
    for path in home.rglob("*"):
        if path.is_file() and path.name not in ("control.token", "api.key"):
            shown.append(path.read_bytes().decode(errors="replace"))
    assert len(shown) > 20
    for found in secrets:
        assert not [text[:200] for text in shown if found in text]
    assert fleet.run("urls", "--show-key").stdout.strip() == secrets[1]
    open_to_others = [
        str(path) for path in (home, *home.rglob("*")) if path.lstat().st_mode & 0o077
    ]
    assert open_to_others == []
    assert all(stat.S_IMODE(p.lstat().st_mode) == 0o700 for p in home.rglob("*") if p.is_dir())


def test_the_key_is_printed_alone_or_not_at_all(fleet: StubFleet) -> None:
    fleet.run("up", "--no-router")
    refused: dict[str, Any] = fleet.json("urls", "--show-key", "--format", "env", expect=2)
    assert "--show-key" in refused["error"]["message"]


@pytest.mark.parametrize("auth", ["control", "none"])
def test_a_fleet_file_can_open_inference_or_everything(fleet: StubFleet, auth: str) -> None:
    fleet.write(replicas=1, extra=f"auth: {auth}")
    fleet.run("up", "--no-router")
    (url,) = fleet.json("urls")["data"]["servers"].values()
    assert status(url, "/v1/completions") != 401
    assert (status(url, "/resume") == 401) is (auth == "control")
    fleet.run("pause")
    fleet.run("resume")
    assert fleet.run("generate", "hi", "--max-tokens", "2").returncode == 0
    failed = fleet.json("urls", "--show-key", expect=4)
    assert "has no API key" in failed["error"]["message"]


def test_changing_auth_is_drift_that_up_ends(fleet: StubFleet) -> None:
    fleet.write(replicas=1, extra="auth: none")
    fleet.run("up", "--no-router")
    (url,) = fleet.json("urls")["data"]["servers"].values()
    fleet.write(replicas=1)
    fleet.run("up", "--no-router")
    assert status(url, "/resume") == 401


def test_servers_that_ask_for_a_token_are_adopted_though_the_file_no_longer_says_so(
    fleet: StubFleet,
) -> None:
    fleet.run("up", "--no-router")
    before = fleet.json("status")["data"]
    fleet.write(extra="auth: none")
    kill(before["supervisor_pid"])
    fleet.run("wait", "--for", "ready", "--timeout", "30")
    after = fleet.json("status")["data"]
    assert after["supervisor_pid"] != before["supervisor_pid"]
    assert [r["pid"] for r in after["replicas"]] == [r["pid"] for r in before["replicas"]]


def test_another_skyctls_fleet_is_attached_to_with_its_token_in_a_variable(
    fleet: StubFleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet.run("up")
    urls = fleet.json("urls")["data"]
    there = StubFleet(tmp_path / "there")
    there.directory.mkdir()
    text = f"name: far\nservers: {json.dumps(list(urls['servers'].values()))}\n"
    (there.directory / "fleet.yaml").write_text(text)
    refused = there.json("pause", expect=1)
    assert "control_token_env" in json.dumps(refused)
    (there.directory / "fleet.yaml").write_text(text + "control_token_env: FAR_TOKEN\n")
    monkeypatch.setenv("FAR_TOKEN", secret(fleet, "control.token"))
    assert {o["status"] for o in there.json("pause")["data"]["outcomes"]} == {"ok"}
    there.run("resume")
    there.run("generate", "hi", "--max-tokens", "2", "--server", "far-0")
    for path in (there.directory / "home").rglob("*"):
        if path.is_file():
            assert os.environ["FAR_TOKEN"] not in path.read_bytes().decode(errors="replace")
