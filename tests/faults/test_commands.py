"""generate, sleep and wake as their user types them, against stub servers."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from pathlib import Path

import pytest

from tests.faults.command import attached, skyctl
from tests.stub.app import StubServer
from tests.stub.faults import Fault
from tests.stub.generation import next_token
from tests.stub.running import running


def prompts(tmp_path: Path, *lines: object) -> str:
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return str(file)


async def test_generate_writes_results_in_input_order(tmp_path: Path) -> None:
    stub = StubServer()
    source = prompts(tmp_path, *({"prompt": f"p{n}", "id": f"row-{n}"} for n in range(5)))
    target = tmp_path / "answers.jsonl"
    async with running([stub]) as targets:
        code, envelope = await skyctl(
            *("generate", "--input", source, "--output", str(target), "--max-tokens", "3"),
            home=tmp_path / "home",
            file=attached(tmp_path, targets),
        )
    assert code == 0
    rows = [json.loads(line) for line in target.read_text().splitlines()]
    assert [row["id"] for row in rows] == [f"row-{n}" for n in range(5)]
    first = next_token(stub.engine.digest, [ord("p"), ord("0")])
    assert rows[0]["token_ids"][0] == first
    assert rows[0]["text"][0] == chr(first)
    assert rows == envelope["data"]["results"]


async def test_generate_overwrites_neither_its_prompts_nor_what_it_may_not(tmp_path: Path) -> None:
    source = prompts(tmp_path, {"prompt": "a"})
    async with running([StubServer()]) as targets:
        asked = {"home": tmp_path / "home", "file": attached(tmp_path, targets)}
        same = await skyctl("generate", "--input", source, "--output", source, **asked)
        away = await skyctl("generate", "a", "--output", str(tmp_path / "no" / "where"), **asked)
    assert [code for code, _ in (same, away)] == [2, 2]
    assert "would be overwritten" in same[1]["error"]["message"]
    assert "cannot write" in away[1]["error"]["message"]
    assert json.loads((tmp_path / "prompts.jsonl").read_text()) == {"prompt": "a"}


@pytest.mark.parametrize("named", [True, False])
async def test_a_server_that_hangs_does_not_keep_generate_from_beginning(
    tmp_path: Path, named: bool
) -> None:
    """Whatever the router would have asked it."""
    hangs = {"/v1/models": Fault("hang")}
    stubs = [StubServer(faults=hangs), StubServer(faults=hangs if named else {})]
    async with running(stubs) as targets:
        file = attached(tmp_path, targets)
        text = f"router: {targets[0].url}\n" + ("served_model_name: stub\n" * named)
        file.write_text(file.read_text() + text)
        code, envelope = await skyctl(
            *("generate", "hi", "--max-tokens", "2", "--timeout", "20"),
            home=tmp_path / "home",
            file=file,
        )
    assert code == 0, envelope
    assert len(envelope["data"]["results"][0]["token_ids"]) == 2


async def test_the_deadline_of_generate_includes_what_it_looks_up_first(tmp_path: Path) -> None:
    async with running([StubServer(faults={"/v1/models": Fault("hang")})]) as targets:
        code, envelope = await skyctl(
            *("generate", "hi", "--timeout", "0.5"),
            home=tmp_path / "home",
            file=attached(tmp_path, targets),
        )
    assert code == 124
    assert envelope["error"]["message"] == "where requests go was not known after 0.5 s"


async def test_generate_says_partial_when_some_requests_fail(tmp_path: Path) -> None:
    stub = StubServer(faults={"/v1/completions": Fault("status", status=400, calls=(1,))})
    source = prompts(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    async with running([stub]) as targets:
        code, envelope = await skyctl(
            *("generate", "--input", source, "--concurrency", "1"),
            home=tmp_path / "home",
            file=attached(tmp_path, targets),
        )
    assert code == 3
    assert ["error" in row for row in envelope["data"]["results"]] == [True, False]
    assert "injected fault" in envelope["error"]["message"]


@pytest.mark.parametrize("answered", [0, 1])
async def test_ctrl_c_leaves_no_output_that_could_be_taken_for_whole(
    tmp_path: Path, answered: int
) -> None:
    """What was answered until then is beside it."""
    stub = StubServer(faults={"/v1/completions": Fault("hang", calls=(1 + answered,))})
    source = prompts(tmp_path, {"prompt": "a"}, {"prompt": "b"})
    target = tmp_path / "answers.jsonl"
    async with running([stub]) as targets:
        file = attached(tmp_path, targets)
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "skyctl", "generate", "--file", str(file), "--input", source),
            *("--output", str(target), "--max-tokens", "2", "--concurrency", "1"),
            env={"SKYCTL_HOME": str(tmp_path / "home"), "PATH": "", "HOME": str(tmp_path)},
            stderr=asyncio.subprocess.DEVNULL,
        )
        async with asyncio.timeout(30):
            await stub.asgi.until("/v1/completions", calls=1 + answered)
            process.send_signal(signal.SIGINT)
            assert await process.wait() == 130
    assert not target.exists()
    partial = tmp_path / "answers.jsonl.partial"
    assert partial.exists() == bool(answered)


async def test_a_bad_line_is_named_before_anything_is_sent(tmp_path: Path) -> None:
    stub = StubServer()
    source = prompts(tmp_path, {"prompt": "fine"}, {"promt": "typo"})
    async with running([stub]) as targets:
        code, envelope = await skyctl(
            *("generate", "--input", source),
            home=tmp_path / "home",
            file=attached(tmp_path, targets),
        )
    assert code == 2
    assert envelope["error"]["message"].startswith(f"{source}:2: ")
    assert not stub.asgi.calls


async def test_an_unknown_server_is_not_found_and_the_known_ones_are_listed(
    tmp_path: Path,
) -> None:
    async with running([StubServer(), StubServer()]) as targets:
        file = attached(tmp_path, targets)
        for command in ("pause nonesuch", "generate hello --server nonesuch"):
            code, envelope = await skyctl(*command.split(), home=tmp_path / "home", file=file)
            assert code == 4
            assert "eight-0, eight-1" in envelope["error"]["hint"]
        code, envelope = await skyctl("generate", "hello", home=tmp_path / "home", file=file)
        assert code == 2
        assert "--server eight-0" in envelope["error"]["hint"]


async def test_waking_what_level_2_discarded_is_refused_and_says_what_to_type(
    tmp_path: Path,
) -> None:
    stub = StubServer()
    async with running([stub]) as targets:
        file, home = attached(tmp_path, targets), tmp_path / "home"
        code, _ = await skyctl("sleep", "--level", "2", home=home, file=file)
        assert code == 0
        for tags in ([], ["--tags", "kv_cache"], ["--tags", "weights,kv_cache"]):
            code, envelope = await skyctl("wake", *tags, home=home, file=file)
            assert code == 1
            hint = envelope["error"]["hint"]
            assert hint.index("wake --tags weights") < hint.index("sync-weights")
            assert hint.index("sync-weights") < hint.index("wake --tags kv_cache")
        code, envelope = await skyctl("wake", "--tags", "weights", home=home, file=file)
        assert code == 0
        assert "awake in part" in envelope["data"]["outcomes"][0]["detail"]
    assert stub.engine.log == ["pause abort", "sleep 2", "wake weights"]


async def test_a_tag_that_is_none_is_a_usage_error(tmp_path: Path) -> None:
    async with running([StubServer()]) as targets:
        code, envelope = await skyctl(
            *("wake", "--tags", "wieghts"),
            home=tmp_path / "home",
            file=attached(tmp_path, targets),
        )
    assert code == 2
    assert envelope["error"]["hint"] == "tags are: weights, kv_cache"


async def test_a_generation_waits_through_a_pause_and_resume_of_the_fleet(tmp_path: Path) -> None:
    stub = StubServer()
    stub.gate.hold()
    async with running([stub]) as targets:
        file, home = attached(tmp_path, targets), tmp_path / "home"
        generating = asyncio.create_task(
            skyctl("generate", "hello", "--max-tokens", "4", home=home, file=file)
        )
        async with asyncio.timeout(60):
            await stub.asgi.until("/v1/completions")
            stub.gate.grant(2)
            assert (await skyctl("pause", "--mode", "keep", home=home, file=file))[0] == 0
            stub.gate.grant(2)
            assert not generating.done()
            code, envelope = await skyctl("resume", home=home, file=file)
            assert code == 0
            code, envelope = await generating
    assert code == 0
    (row,) = envelope["data"]["results"]
    assert (len(row["token_ids"]), row["retries"]) == (4, 0)
