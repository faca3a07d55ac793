"""What each vLLM version is told in a push."""

from __future__ import annotations

import base64
import pickle

import pytest

from skyctl.engines.dialect import GroupJoin, PackedBuffers, Placement, TensorHeaders
from skyctl.engines.vllm.engine import VLLMDialect as Dialect
from skyctl.engines.vllm.engine import dialect_for
from skyctl.transfer.gpu.carrier import pickle_handles
from skyctl.transfer.transports.base import rank_offsets

TENSORS = TensorHeaders(["a", "b"], ["bfloat16", "float32"], [(2, 3), (4,)])
WIRE = {"names": ["a", "b"], "dtype_names": ["bfloat16", "float32"], "shapes": [[2, 3], [4]]}
BUFFERS = PackedBuffers(1024, 3)
PACKED = {"packed": True, "packed_buffer_size_bytes": 1024, "packed_num_buffers": 3}
RENDEZVOUS = {
    "master_address": "127.0.0.1",
    "master_port": 5000,
    "rank_offset": 3,
    "world_size": 5,
}


def nccl_init(dialect: Dialect, buffers: PackedBuffers | None) -> dict[str, object]:
    return dialect.nccl_init_info(GroupJoin(**RENDEZVOUS), buffers=buffers)


@pytest.mark.parametrize("version", ["0.26.0", "0.27.1"])
def test_older_servers_get_the_nccl_geometry_with_every_update(version: str) -> None:
    dialect = dialect_for(version)
    assert nccl_init(dialect, BUFFERS) == RENDEZVOUS
    assert dialect.nccl_update_info(TENSORS, buffers=BUFFERS) == {**WIRE, **PACKED}
    assert dialect.nccl_update_info(TENSORS, buffers=None) == {**WIRE, "packed": False}


@pytest.mark.parametrize("version", ["0.28.0", "0.31.2", "0.32.1+cu130", "0.33.0"])
def test_newer_servers_get_the_nccl_geometry_once_at_init(version: str) -> None:
    dialect = dialect_for(version)
    assert nccl_init(dialect, BUFFERS) == {**RENDEZVOUS, **PACKED}
    assert nccl_init(dialect, None) == {**RENDEZVOUS, "packed": False}
    assert dialect.nccl_update_info(TENSORS, buffers=BUFFERS) == WIRE


def test_a_group_over_machines_meets_by_nccls_unique_id() -> None:
    ranks = {"rank_offset": 3, "world_size": 5}
    join = GroupJoin(**ranks, unique_id="QUJD")
    told = dialect_for("0.32.0").nccl_init_info(join, buffers=None)
    assert told == {"nccl_unique_id_b64": "QUJD", **ranks, "packed": False}
    assert dialect_for("0.32.0").joins_by_id and not dialect_for("0.31.2").joins_by_id


def test_ipc_says_packed_in_each_update_to_026_and_at_init_from_027_on() -> None:
    handles = pickle_handles({"GPU-1": (1, 2)})
    old, new = dialect_for("0.26.0"), dialect_for("0.27.0")
    assert old.ipc_init_info(packed=True) == {}
    assert new.ipc_init_info(packed=True) == {"packed": True}
    assert old.ipc_update_info(TENSORS, handles, Placement([0, 12], [12, 16]))["packed"] is True
    assert "packed" not in new.ipc_update_info(TENSORS, handles, Placement([0, 12], [12, 16]))


def test_a_trainers_own_engine_is_told_where_to_meet() -> None:
    old, new = dialect_for("0.26.0"), dialect_for("0.32.0")
    join = GroupJoin(**RENDEZVOUS)
    for backend in ("nccl", "sparse_nccl"):
        assert old.trainer_init_info(backend, join) == RENDEZVOUS
        assert new.trainer_init_info(backend, join) == {**RENDEZVOUS, "packed": False}
    assert new.trainer_init_info("ipc", join) == {"packed": False}
    assert new.trainer_init_info("sharded_rdt", join) is None


def test_ipc_handles_travel_pickled_in_base64() -> None:
    handles = {"GPU-1": ("storage", 7)}
    info = dialect_for("0.32.0").ipc_update_info(
        TENSORS, pickle_handles(handles), Placement([0, 12], [12, 16])
    )
    assert pickle.loads(base64.b64decode(info["ipc_handles_pickled"])) == handles
    assert info["tensor_sizes"] == [12, 16]
    assert "ipc_handles" not in info


def test_payloads_that_contradict_themselves_are_refused() -> None:
    dialect = dialect_for("0.32.0")
    with pytest.raises(ValueError, match="1 sizes for 2 tensors"):
        dialect.ipc_update_info(TENSORS, pickle_handles({"GPU-1": 1}), Placement([0], [12]))
    with pytest.raises(ValueError, match="2 names, 1 dtypes"):
        TensorHeaders(["a", "b"], ["float32"], [(1,), (2,)])


def test_only_releases_between_two_routes_label_weights_as_an_update_ends() -> None:
    versions = ("0.26.0", "0.27.0", "0.31.0", "0.32.0")
    assert [dialect_for(version).labels_at_finish for version in versions] == [
        *(False, True, True, False)
    ]


@pytest.mark.parametrize("version", ["0.34.0rc1", "1.0.0", "0.1.dev1+gabc", "main", ""])
def test_a_version_we_have_not_read_gets_the_newest_dialect_and_a_note(version: str) -> None:
    dialect = dialect_for(version)
    assert dialect.name == "0.33"
    assert dialect.note


def test_versions_we_have_read_come_without_a_note_and_older_ones_with_one() -> None:
    assert dialect_for("0.33.0").note == ""
    assert dialect_for("0.29.3").note == ""
    assert "older" in dialect_for("0.19.0").note


def test_ranks_follow_the_sender_server_by_server() -> None:
    assert rank_offsets([2, 1, 4]) == ([1, 3, 4], 8)
    with pytest.raises(ValueError, match="at least one worker"):
        rank_offsets([1, 0])
