"""Servers that hold a model differently take one push: whole, split over ranks, in copies; tied."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli, greedy
from tests.integration.inside import CORRUPTIBLE, EVERYWHERE, ask, assert_holds
from tests.integration.reference import answered
from tests.integration.unlike import PROMPT, SPLIT, TOKENS, TRANSPORTS, WHOLE, answers, write_fleet
from tests.pids import abandoned, abandoned_since, segments
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.real

COPIES = {"name": "copies", "data_parallel_size": 2, **CORRUPTIBLE}
# vLLM on CPU makes the buffers between pipeline ranks as it warms up, which eager servers do not;
# these only warm up (those of test_span.py are compiled, too, which takes a minute of a processor)
LAYERS = {
    "name": "layers",
    "pipeline_parallel_size": 2,
    "args": {"enforce-eager": False, "compilation-config": {"mode": 2, "backend": "eager"}},
}


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Ranks on CPU share memory by files that vLLM leaves: whoever ends them removes those."""
    before = abandoned()
    yield
    assert abandoned_since(before) == set()


def digests(fleet: FleetCli, server: str) -> list[str]:
    """Of each data-parallel rank, in their order."""
    workers = ask(fleet, server, "skyctl_weight_digest")
    assert [worker["data_parallel_rank"] for worker in workers] == [0, 1]
    return [worker["digest"] for worker in workers]


def make_checkpoints(directory: Path) -> dict[str, Path]:
    pytest.importorskip("vllm")
    return {
        name: make_tiny_checkpoint(directory / name, seed=seed, tie_word_embeddings=True)
        for name, seed in (("a", 1), ("b", 2))
    }


def right_answers(made: dict[str, Path]) -> dict[str, list[int]]:
    found = {name: answered(checkpoint, PROMPT, TOKENS) for name, checkpoint in made.items()}
    assert found["a"] != found["b"]
    return found


def test_a_push_brings_what_the_checkpoint_answers(tmp_path: Path) -> None:
    made = make_checkpoints(tmp_path)
    right = right_answers(made)
    fleet = FleetCli(tmp_path / "fleet", tmp_path / "home")
    fleet.directory.mkdir()
    try:
        write_fleet(fleet, made["a"], WHOLE, SPLIT)
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        assert answers(fleet) == dict.fromkeys(("whole-0", "split-0"), right["a"])
        # not only back to "a": a layer that a reload leaves out would go unnoticed
        for transport in TRANSPORTS:
            for name in ("b", "a"):
                fleet.run("sync-weights", "--transport", transport, str(made[name]))
                found = answers(fleet)
                assert found == dict.fromkeys(("whole-0", "split-0"), right[name]), transport
                if name == "b":
                    assert_holds(fleet, "whole-0", made["b"])
                    assert_holds(fleet, "split-0", made["b"])
        pids = {row["name"]: row["pid"] for row in fleet.data("status")["replicas"]}
        split = psutil.Process(pids["split-0"])
        mapped = segments(*(process.pid for process in (split, *split.children(recursive=True))))
        shared = [path for path in mapped if "-tp:" in path.name and "-cpushm_" in path.name]
        # vLLM's ranks share memory where they compute with AVX-512; a killed one leaves none either
        assert shared or "avx512f" not in Path("/proc/cpuinfo").read_text()
        split.kill()
        fleet.run("wait", "--for", "ready", "--timeout", "200", timeout_s=UP_TIMEOUT_S)
        assert [path for path in shared if path.exists()] == []
        digests = {row["weights_digest"] for row in fleet.data("weights")["servers"]}
        assert len(digests) == 2
        assert any("-tp2-" in digest for digest in digests)
        assert fleet.data("weights", "verify")["agree"] is True
    finally:
        fleet.run("down", expect=None)


def test_pipeline_and_data_parallel_ranks_take_the_same_push(tmp_path: Path) -> None:
    made = make_checkpoints(tmp_path)
    right = right_answers(made)
    fleet = FleetCli(tmp_path / "fleet", tmp_path / "home")
    fleet.directory.mkdir()

    def answer() -> list[int]:
        """The same from the pipeline and from both copies."""
        urls, key = fleet.data("urls")["servers"], fleet.key
        (first, *others) = [
            greedy(urls[name], "unlike", PROMPT, TOKENS, key=key, rank=rank)
            for name, rank in (("layers-0", None), ("copies-0", 0), ("copies-0", 1))
        ]
        assert others == [first, first]
        return first

    try:
        write_fleet(fleet, made["a"], LAYERS, COPIES)
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        assert answer() == right["a"]
        for transport in TRANSPORTS:
            for name in ("b", "a"):
                fleet.run("sync-weights", "--transport", transport, str(made[name]))
                assert answer() == right[name], transport
        assert_holds(fleet, "layers-0", made["a"])
        assert_holds(fleet, "copies-0", made["a"])
        first, second = digests(fleet, "copies-0")
        assert first == second
        for damage in EVERYWHERE:
            ask(fleet, "copies-0", "skyctl_corrupt", damage=damage, rank=1)
            assert digests(fleet, "copies-0")[0] == first != digests(fleet, "copies-0")[1]
            told = fleet.json("weights", "verify", expect=None)["data"]["servers"]
            assert [row["ok"] for row in told] == [True, False]
            assert "data-parallel rank 1 holds other weights than rank 0" in told[1]["detail"]
            fleet.run("sync-weights", str(made["a"]))
            assert digests(fleet, "copies-0") == [first, first]
    finally:
        fleet.run("down", expect=None)
