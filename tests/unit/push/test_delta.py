"""Only what servers lack is sent; where they hold something else after all, everything is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.push.delta import checksums, content_digest, held_tensors
from skyctl.push.request import PushRequest, PushResult
from skyctl.push.rows import layer_of
from skyctl.push.transaction import push
from skyctl.store.contents import Content, known_content, remember_content
from skyctl.store.expected import Expectations, ExpectedDigest
from tests.faults.attached_fleet import attached_fleet
from tests.stub import rows
from tests.stub.app import StubServer
from tests.stub.state import digest_of_checkpoint
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.push.fleets import Recorder, Stubs

LAYERS = {layer_of(name) for name in tiny_tensors()}
LAYER_0 = {name for name in tiny_tensors() if ".layers.0." in name}


def step(directory: Path, *changed: str, seed: int = 1) -> Path:
    """A checkpoint like that of `seed`, but for the tensors whose name has one of these parts."""
    other = tiny_tensors(seed + 100)
    tensors = {
        name: other[name] if any(part in name for part in changed) else tensor
        for name, tensor in tiny_tensors(seed).items()
    }
    return write_checkpoint(directory, tensors)


def test_a_layer_is_sent_as_a_whole_and_something_is_always_sent(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(step(tmp_path / "a")))
    before = checksums(checkpoint)

    def left_out(*changed: str) -> set[str]:
        after = {n: c + any(part in n for part in changed) for n, c in before.items()}
        return set(held_tensors(checkpoint.tensors, after, before))

    everything = set(before)
    assert left_out("layers.1.mlp.up_proj") == {n for n in everything if "layers.1." not in n}
    assert left_out("lm_head") == {n for n in everything if ".layers." in n}
    assert left_out() in ({n for n in everything if layer_of(n) != layer} for layer in LAYERS)
    assert not left_out("layers", "norm")
    gone = {**before, "model.layers.1.self_attn.q_proj.bias": 7}  # servers hold it still
    assert not any(".layers.1." in n for n in held_tensors(checkpoint.tensors, before, gone))
    assert layer_of("visual.blocks.3.attn.qkv.weight") == "visual.blocks.3"
    assert content_digest(checkpoint.tensors, {}) == ""


async def test_what_servers_hold_is_not_sent_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = step(tmp_path / "old"), step(tmp_path / "new", "layers.1.", "norm")
    stubs = [StubServer(), StubServer()]
    async with attached_fleet(tmp_path / "home", monkeypatch, stubs) as fleet:

        async def pushed(checkpoint: Path) -> PushResult:
            asked = PushRequest(str(checkpoint), transport="shm", delta=True)
            job = await fleet.wait_job(await fleet.start_push(asked), timeout_s=60)
            assert job.result is not None, job.error
            return PushResult.from_json(job.result)

        first = await pushed(old)
        assert first.skipped == {"tensors": 0, "bytes": 0}
        assert "not known by tensor" in str(first.notes)
        second = await pushed(new)
        size = sum(len(tiny_tensors()[name][2]) for name in LAYER_0)
        assert second.skipped == {"tensors": len(LAYER_0), "bytes": size}
        sent = {n for u in stubs[0].engine.update_infos[-second.chunks :] for n in u["names"]}
        assert sent == set(tiny_tensors()) - LAYER_0
        for stub in stubs:
            assert stub.engine.digest == digest_of_checkpoint(str(new))
        # what was verified of all of it is what a whole push comes to
        assert (await pushed(new)).content_digest == second.content_digest
        stubs[1].engine.digest = "what somebody else pushed"
        again = await pushed(old)
        assert again.skipped == {"tensors": 0, "bytes": 0} and "far-1" in str(again.notes)
        assert {stub.engine.digest for stub in stubs} == {digest_of_checkpoint(str(old))}


async def test_a_server_that_lost_its_weights_meanwhile_gets_all_of_them(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path)
    old, new = step(tmp_path / "old"), step(tmp_path / "step", "layers.1.")
    async with stubs.client() as client:
        first = await push(PushRequest(str(old)), stubs.fleet, client=client, observer=Recorder())
        assert first.content is not None and first.learned is not None
        known = tuple(ExpectedDigest(**one) for one in first.learned["digests"])
        fleet = replace(stubs.fleet, expected=Expectations(known), content=first.content)
        observer = Recorder()

        def lose(stage: str) -> None:
            if stage == "pause":
                stubs.engines[1]._held, stubs.engines[1].digest = [], "base"
                stubs.engines[1].contents = rows.of_checkpoint(str(stubs.base))

        observer.on_stage = lose
        asked = PushRequest(str(new), delta=True)
        result = await push(asked, fleet, client=client, observer=observer)
    assert all(server.ok for server in result.servers)
    assert "recover" in observer.stages and "pushing again" in str(result.notes)
    assert len({engine.digest for engine in stubs.engines}) == 1
    assert stubs.engines[1].contents == rows.of_checkpoint(str(new))


async def test_without_verification_nothing_is_left_out(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path)
    asked = PushRequest(str(step(tmp_path / "step", "layers.1.")), delta=True, verify=False)
    async with stubs.client() as client:
        result = await push(asked, stubs.fleet, client=client, observer=Recorder())
    assert result.skipped == {"tensors": 0, "bytes": 0} and result.content is not None
    assert "without verification" in str(result.notes)


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"digest": "d", "crc32": [1]}', b"\xff"])
def test_a_content_that_cannot_be_read_is_not_known(tmp_path: Path, text: bytes) -> None:
    remember_content(tmp_path, Content("d", {"a": 1}))
    assert known_content(tmp_path) == Content("d", {"a": 1})
    (tmp_path / "content.json").write_bytes(text)
    assert known_content(tmp_path) is None
    remember_content(tmp_path / "nowhere", Content("d", {}))
