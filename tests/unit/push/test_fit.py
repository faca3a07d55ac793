"""A push asks servers what they compute by and what they load, before a byte is sent."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skyctl.errors import PreflightError
from skyctl.push import fit
from skyctl.push.layouts import LayoutChoice
from tests.unit.push.checkpoints import CONFIG, filled, tiny_tensors, write_checkpoint
from tests.unit.push.fleets import Stubs, pushed

YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}


def untouched(stubs: Stubs) -> bool:
    return all(engine.log == [] for engine in stubs.engines)


@pytest.mark.parametrize("extension", [True, False])
async def test_another_rope_is_refused_unless_it_is_allowed(stubs: Stubs, extension: bool) -> None:
    for engine in stubs.engines:
        engine.extension = extension
    write_checkpoint(stubs.new, tiny_tensors(50), config={**CONFIG, "rope_parameters": YARN})
    (stubs.new / "model.safetensors.index.json").unlink()
    for shard in stubs.new.glob("model-*"):
        shard.unlink()
    with pytest.raises(PreflightError, match=r"rope_type is yarn here, .* run default") as caught:
        await pushed(stubs, verify=extension)
    assert "--allow-config rope_parameters" in caught.value.hint
    assert untouched(stubs)
    assert await pushed(stubs, verify=extension, allow_config=("rope_parameters",))


async def test_arguments_of_the_servers_are_part_of_what_they_compute_by(stubs: Stubs) -> None:
    for engine in stubs.engines:
        engine.hf_overrides = {"rope_parameters": YARN}
    config = json.loads((stubs.new / "config.json").read_text())
    (stubs.new / "config.json").write_text(json.dumps({**config, "rope_parameters": YARN}))
    assert (await pushed(stubs, dry_run=True)).plan


async def test_a_launched_directory_that_was_overwritten_is_no_witness(stubs: Stubs) -> None:
    for directory in (stubs.base, stubs.new):
        (directory / "config.json").write_text(json.dumps({**CONFIG, "rms_norm_eps": 1e-5}))
    for engine in stubs.engines:
        engine.config = {**CONFIG, "rms_norm_eps": 1e-6}
    with pytest.raises(PreflightError, match="rms_norm_eps is 1e-05 here, the servers run 1e-06"):
        await pushed(stubs)
    assert untouched(stubs)


async def test_a_base_with_a_head_that_servers_never_load_takes_saves_without_it(
    tmp_path: Path,
) -> None:
    head = {"model.layers.2.eh_proj.weight": filled([8, 16], 3)}
    stubs = Stubs(tmp_path)
    write_checkpoint(stubs.base, {**tiny_tensors(), **head})
    with pytest.raises(PreflightError, match=r"eh_proj.weight is missing"):
        await pushed(stubs)
    for engine in stubs.engines:
        engine.ignored = frozenset(head)
    assert await pushed(stubs)


async def test_a_head_of_its_own_is_refused_where_servers_tie_it(stubs: Stubs) -> None:
    for engine in stubs.engines:
        engine.ties_output = True
    with pytest.raises(PreflightError, match=r"lm_head.weight differs from model.embed_tokens"):
        await pushed(stubs)
    assert untouched(stubs)


async def test_the_same_process_is_asked_the_same_once(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fit, "_answers", {})
    servers = tuple(replace(s, instance=f"{s.name}@1") for s in stubs.fleet.servers)
    stubs.fleet = replace(stubs.fleet, servers=servers)
    calls = []
    for _ in range(2):
        before = stubs.servers[0].asgi.calls["/collective_rpc"]
        await pushed(stubs, dry_run=True)
        calls.append(stubs.servers[0].asgi.calls["/collective_rpc"] - before)
    assert calls[1] == 0 < calls[0]


async def test_a_way_is_planned_knowing_whether_names_were_compared(
    stubs: Stubs, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared: list[bool] = []

    async def choose(*_: Any, names_compared: bool) -> LayoutChoice:
        compared.append(names_compared)
        return LayoutChoice()

    monkeypatch.setattr("skyctl.push.sender_way.choose_layout", choose)
    await pushed(stubs, dry_run=True)
    (stubs.base / "model.safetensors").unlink()  # as of servers that are started with dummy weights
    await pushed(stubs, dry_run=True)
    assert compared == [True, False]


async def test_what_clients_get_with_the_servers_files_is_noted(stubs: Stubs) -> None:
    for directory, token in ((stubs.base, 0), (stubs.new, 5)):
        text = json.dumps({"eos_token_id": token})
        (directory / "generation_config.json").write_text(text)
    for dry_run in (True, False):
        notes = (await pushed(stubs, dry_run=dry_run)).notes
        assert [note for note in notes if note.startswith("generation_config.json (stop tokens")]
