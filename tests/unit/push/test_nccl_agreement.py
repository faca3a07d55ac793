"""Ranks of an NCCL group need the same settings: the sender takes over those of the servers."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from skyctl.engines.vllm.engine import dialect_for
from skyctl.errors import PreflightError
from skyctl.http.target import ServerTarget
from skyctl.launch.base import Node
from skyctl.push.request import PushServer
from skyctl.push.server_facts import (
    ProcessFacts,
    ServerFacts,
    common_nccl_settings,
    nccl_pace_notes,
    refuse_shared_gpus,
)
from skyctl.transfer.sender_client import applied_settings


def fact(name: str, settings: Mapping[str, str] | None) -> ServerFacts:
    return ServerFacts(
        name=name,
        url="http://127.0.0.1:1",
        dialect=dialect_for("0.32.0"),
        paused=False,
        sleep_level=0,
        weight_version=None,
        process=ProcessFacts(
            backend="nccl", vllm_version="0.32.0", ranks=(1, 1), nccl_settings=settings
        ),
    )


def test_what_servers_share_is_taken_and_what_is_their_own_is_not() -> None:
    one = {"NCCL_PROTO": "Simple", "NCCL_DEBUG": "INFO", "NCCL_NO_CACHE": "NCCL_PROTO"}
    other = {"NCCL_PROTO": "Simple", "NCCL_DEBUG_FILE": "/tmp/x", "NCCL_LAUNCH_MODE": "GROUP"}
    found = common_nccl_settings([fact("a", one), fact("silent", None), fact("b", other)])
    assert found == {"NCCL_PROTO": "Simple"}


@pytest.mark.parametrize(
    "name",
    ["NCCL_NET_PLUGIN", "NCCL_TUNER_PLUGIN", "NCCL_TOPO_DUMP_FILE", "NCCL_CONF_FILE", "NCCL_NET"],
)
def test_no_server_makes_the_sender_load_or_write_a_file(name: str) -> None:
    assert common_nccl_settings([fact("a", {name: "/tmp/theirs.so", "LD_PRELOAD": "x"})]) == {}
    assert common_nccl_settings([fact("a", {"NCCL_A=B": "x", "NCCL_ALGO": "a\0b"})]) == {}
    assert applied_settings({"NCCL_NET_PLUGIN": "ours"}, {}) == {"NCCL_NET_PLUGIN": "ours"}


def test_servers_without_any_ask_for_none() -> None:
    assert common_nccl_settings([fact("a", {}), fact("b", {})]) == {}


def test_nothing_is_known_of_servers_that_do_not_tell() -> None:
    assert common_nccl_settings([fact("a", None)]) is None


def test_servers_that_differ_are_refused_with_where() -> None:
    facts = [fact("a", {"NCCL_PROTO": "Simple"}), fact("b", {})]
    with pytest.raises(PreflightError, match=r"a and b differ in NCCL_PROTO \(Simple, not set\)"):
        common_nccl_settings(facts)


def test_an_environment_gets_these_settings_and_no_others() -> None:
    before = {"PATH": "/bin", "NCCL_ALGO": "tree", "NCCL_DEBUG": "WARN"}
    now = applied_settings(before, {"NCCL_PROTO": "Simple"})
    assert now == {"PATH": "/bin", "NCCL_DEBUG": "WARN", "NCCL_PROTO": "Simple"}


def test_a_push_says_when_servers_hold_nccl_to_few_channels() -> None:
    (said,) = nccl_pace_notes({"NCCL_MAX_NCHANNELS": "1", "NCCL_PROTO": "Simple"})
    assert said.startswith("servers hold NCCL to 1 channel (")
    for settings in ({}, {"NCCL_MAX_NCHANNELS": "32"}, {"NCCL_MAX_NCHANNELS": "many"}):
        assert nccl_pace_notes(settings) == []


def test_a_gpu_of_one_machine_is_not_that_of_another() -> None:
    nodes = [Node(name, name, "python", (), 60.0) for name in "ab"]
    on_each = [
        PushServer(ServerTarget(f"on-{node.target}", "http://x"), gpus=(0,), node=node)
        for node in nodes
    ]
    refuse_shared_gpus(on_each)
    beside = PushServer(ServerTarget("beside", "http://x"), gpus=(0,), node=nodes[1])
    with pytest.raises(PreflightError, match="on-b and beside share GPU 0"):
        refuse_shared_gpus([*on_each, beside])
