"""NaN and infinity in a checkpoint, by type."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from skyctl.checkpoints import finite
from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.finite import first_not_finite, refuse_not_finite
from skyctl.errors import PreflightError, PushError
from skyctl.push.request import PushRequest
from skyctl.push.transaction import push
from tests.unit.checkpoints.extremes import BAD, LARGEST, NAN
from tests.unit.push.checkpoints import tiny_tensors, write_checkpoint
from tests.unit.push.fleets import Recorder, Stubs


def scan(tmp_path: Path, dtype: str, *elements: bytes) -> None:
    tensor = (dtype, [len(elements)], b"".join(elements))
    refuse_not_finite(read_checkpoint(str(write_checkpoint(tmp_path / "c", {"w": tensor}))))


@pytest.mark.parametrize("dtype", LARGEST)
def test_the_largest_number_of_a_type_is_finite(tmp_path: Path, dtype: str) -> None:
    scan(tmp_path, dtype, *[LARGEST[dtype]] * 5)


@pytest.mark.parametrize(("dtype", "bad"), BAD)
def test_file_tensor_and_element_are_named(tmp_path: Path, dtype: str, bad: bytes) -> None:
    good = LARGEST[dtype]
    with pytest.raises(PreflightError, match=r"safetensors: w holds NaN .*element 3\)"):
        scan(tmp_path, dtype, good, good, good, bad, good)


def test_an_element_beyond_the_first_piece_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(finite, "_READ_BYTES", 16)
    with pytest.raises(PreflightError, match="element 9"):
        scan(tmp_path, "F32", *[LARGEST["F32"]] * 9, NAN["F32"])


@pytest.mark.parametrize("place", [0, 1, 131071, 131072, 199999])
def test_every_place_of_a_large_tensor_is_looked_at(place: int) -> None:
    good, bad = LARGEST["BF16"], NAN["BF16"]
    assert first_not_finite(good * 200000, "BF16", 0, 400000) is None
    data = good * place + bad + good * (199999 - place)
    assert first_not_finite(data, "BF16", 0, 400000) == place
    around = bad + data + bad
    assert first_not_finite(around, "BF16", 2, 400000) == place
    assert first_not_finite(around, "BF16", 2, place * 2) is None


def test_integers_of_the_same_bits_are_passed_over(tmp_path: Path) -> None:
    scan(tmp_path, "I32", NAN["F32"])


def spoiled(tmp_path: Path, name: str) -> Path:
    tensors = tiny_tensors()
    _, shape, data = tensors[name]
    tensors[name] = ("F32", shape, data[:-4] + NAN["F32"])
    return write_checkpoint(tmp_path / "bad", tensors)


@pytest.mark.parametrize(
    ("asked", "transport"),
    [(None, "shm"), (True, "shm"), (None, "disk"), (False, "shm"), (False, "disk")],
)
async def test_a_push_refuses_nan_unless_told_not_to(
    tmp_path: Path, asked: bool | None, transport: str
) -> None:
    stubs = Stubs(tmp_path)
    request = PushRequest(
        str(spoiled(tmp_path, "model.norm.weight")),
        transport=transport,
        scan_nan=asked,
        stage="host" if transport == "shm" else "auto",
    )
    async with stubs.client() as client:
        if asked is not False:
            with pytest.raises(PreflightError, match=r"model\.norm\.weight holds NaN") as caught:
                await push(request, stubs.fleet, client=client, observer=Recorder())
            assert "safetensors" in caught.value.message and "--no-scan" in caught.value.hint
            assert caught.value.kind == "PreflightError"
            assert all("pause keep" not in engine.log for engine in stubs.engines)
        else:
            await push(request, stubs.fleet, client=client, observer=Recorder())


async def test_nan_that_is_met_in_the_middle_quarantines_and_is_not_sent_again(
    tmp_path: Path,
) -> None:
    stubs = Stubs(tmp_path)
    request = PushRequest(str(spoiled(tmp_path, "lm_head.weight")), chunk_size=300, stage="stream")
    async with stubs.client() as client:
        with pytest.raises(PushError, match=r"lm_head\.weight holds NaN") as caught:
            await push(request, stubs.fleet, client=client, observer=Recorder())
    assert [row["state"] for row in caught.value.details["servers"]] == ["quarantined"] * 2
    assert [(engine.paused, engine.log.count("init")) for engine in stubs.engines] == [
        (True, 1)
    ] * 2


async def test_a_dry_run_reads_no_values_unless_asked(tmp_path: Path) -> None:
    stubs = Stubs(tmp_path)
    request = PushRequest(str(spoiled(tmp_path, "lm_head.weight")), dry_run=True)
    async with stubs.client() as client:
        await push(request, stubs.fleet, client=client, observer=Recorder())
        with pytest.raises(PreflightError, match="holds NaN"):
            await push(
                replace(request, scan_nan=True), stubs.fleet, client=client, observer=Recorder()
            )
