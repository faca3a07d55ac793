"""A canary on real vLLM CPU servers behind the real router: each answer names the version that made
it, and is what a server that was started on that checkpoint answers.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.conftest import needs_vllm
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.integration.two_servers import write_two

pytestmark = [pytest.mark.real, needs_vllm]

REQUESTS = 40
BODY = {
    "prompt": [5, 9, 13, 17, 21],
    "max_tokens": 12,
    "temperature": 0,
    "ignore_eos": True,
    "return_token_ids": True,
}
Answer = tuple[str, tuple[int, ...]]
"""The version that it names, and its tokens."""


@contextmanager
def up(root: Path, model: Path, **more: Any) -> Iterator[FleetCli]:
    fleet = FleetCli(root, root / "home")
    root.mkdir()
    write_two(fleet, model, **more)
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        yield fleet
    finally:
        fleet.run("down", expect=None)


def answers(fleet: FleetCli, requests: int) -> list[Answer]:
    urls = fleet.data("urls")
    heard: list[Answer] = []
    headers = {"Authorization": f"Bearer {fleet.key}"}
    with httpx.Client(timeout=60.0, trust_env=False, headers=headers) as http:
        for _ in range(requests):
            answer = http.post(
                f"{urls['router']}/v1/completions", json={**BODY, "model": urls["model"]}
            )
            assert answer.status_code == 200, answer.text
            begin, end = (answer.headers[f"x-weight-version-{at}"] for at in ("begin", "end"))
            assert begin == end
            heard.append((begin, tuple(answer.json()["choices"][0]["token_ids"])))
    return heard


def test_answers_name_their_version_and_are_those_of_a_server_started_on_it(
    tmp_path: Path, checkpoints: dict[str, Path]
) -> None:
    with up(tmp_path / "alone", checkpoints["b"], name="alone", replicas=1) as alone:
        [(label, of_b)] = answers(alone, 1)
        assert label == "base"
    with up(tmp_path / "two", checkpoints["a"]) as fleet:
        [(_, of_a), *_] = before = answers(fleet, 4)
        assert set(before) == {("base", of_a)}
        assert of_a != of_b
        fleet.run(
            *("canary", "start", str(checkpoints["b"])),
            *("--share", "50%", "--weight-version", "step-b"),
        )
        beside = answers(fleet, REQUESTS)
        assert set(beside) == {("base", of_a), ("step-b", of_b)}
        assert beside.count(("step-b", of_b)) == REQUESTS / 2
        assert fleet.run("weights", "verify").returncode == 0
        canary, others = fleet.data("canary", "status")["versions"]
        for version in (canary, others):  # as vLLM counts
            assert (version["requests"], version["errors"]) == (REQUESTS / 2, 0)
            assert version["output_tokens"][0] > 5
            assert 0 < version["first_token_s"][0] <= version["latency_s"][0]
        fleet.run("canary", "rollback")
        assert set(answers(fleet, 8)) == {("base", of_a)}
        assert json.loads(fleet.run("status", "--json").stdout)["data"]["health"] == "healthy"
