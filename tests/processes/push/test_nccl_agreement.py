"""The sender's environment."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping

import psutil
import pytest

from skyctl.transfer.sender_client import SenderProcess


@pytest.mark.parametrize(
    ("settings", "algo", "proto"),
    [({"NCCL_PROTO": "Simple"}, None, "Simple"), ({}, None, None), (None, "tree", None)],
    ids=["the servers' own", "none", "not known"],
)
async def test_the_sender_starts_with_them_and_counts_gpus_as_we_do(
    monkeypatch: pytest.MonkeyPatch,
    settings: Mapping[str, str] | None,
    algo: str | None,
    proto: str | None,
) -> None:
    monkeypatch.setenv("NCCL_ALGO", "tree")
    monkeypatch.delenv("NCCL_PROTO", raising=False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,3")
    sender = await SenderProcess.spawn("", settings)
    try:
        while "PATH" not in (told := psutil.Process(sender.pid).environ()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the kernel shows it a moment after the process is there
    finally:
        await sender.close()
    assert (told.get("NCCL_ALGO"), told.get("NCCL_PROTO")) == (algo, proto)
    assert told["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID" and "CUDA_VISIBLE_DEVICES" not in told
    assert told["PATH"] == os.environ["PATH"]
