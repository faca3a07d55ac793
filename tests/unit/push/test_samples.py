"""Tensors whose bytes are compared end to end."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.engines.vllm.server import VLLMServer
from skyctl.errors import ServerError
from skyctl.http.target import ServerTarget
from skyctl.push.samples import differing, number_of, read_samples
from skyctl.push.verify import weights_digest
from tests.unit.push.checkpoints import write_checkpoint

SAMPLES = {"norm.weight": ("float32", (4,), 7)}


class Answering(VLLMServer):
    """A server whose worker says what it is told to."""

    def __init__(self, samples: dict[str, Any]) -> None:
        self.target = ServerTarget("demo-0", "http://127.0.0.1:1")
        self._samples = samples

    async def collective_rpc(self, method: str, *_: Any, **__: Any) -> list[Any]:
        return [{"digest": "ab", "samples": self._samples}]


@pytest.mark.parametrize(
    ("answered", "wrong"),
    [
        ({"norm.weight": ["float32", [4], 7]}, []),
        ({"norm.weight": ["float32", [4], 8]}, ["norm.weight"]),
        ({"norm.weight": ["bfloat16", [4], 8]}, []),  # the server casts
        ({"norm.weight": ["float32", [2], 8]}, []),  # it holds a shard
        ({}, []),  # fused away
    ],
)
def test_only_tensors_in_the_same_form_are_compared(
    answered: dict[str, Any], wrong: list[str]
) -> None:
    assert differing(SAMPLES, answered) == wrong


async def test_a_server_that_holds_other_bytes_fails_the_verification() -> None:
    with pytest.raises(ServerError, match=r"norm\.weight is not what was sent"):
        await weights_digest(
            Answering({"norm.weight": ["float32", [4], 8]}), timeout_s=5, samples=SAMPLES
        )
    good = Answering({"norm.weight": ["float32", [4], 7]})
    assert (await weights_digest(good, timeout_s=5, samples=SAMPLES))[0]


def test_samples_are_the_bytes_on_disk(tmp_path: Path) -> None:
    checkpoint = read_checkpoint(str(write_checkpoint(tmp_path / "c")))
    samples = read_samples(checkpoint)
    assert samples
    for tensor in checkpoint.tensors:
        if tensor.name in samples:
            data = Path(checkpoint.shards[tensor.shard].path).read_bytes()
            assert samples[tensor.name][2] == number_of(data[tensor.begin :][: tensor.nbytes])


def test_one_changed_bit_changes_the_number() -> None:
    data = bytes(range(256)) * 3 + b"tail"
    for place in (0, 300, len(data) - 1):
        changed = bytearray(data)
        changed[place] ^= 1
        assert number_of(bytes(changed)) != number_of(data)
