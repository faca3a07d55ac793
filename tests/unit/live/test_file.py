"""Tensors out of memory become a checkpoint that says the same, or are refused."""

from __future__ import annotations

import resource
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import read_checkpoint
from skyctl.checkpoints.live import HEADER_BYTES, RunningModel, running_model
from skyctl.errors import PreflightError, SkyctlError, UsageError
from skyctl.live.blocks import Target
from skyctl.live.file import Window, lay_out, targets_of, write_tensors
from skyctl.live.model import dtype_name, read_pairs
from tests.unit.push.checkpoints import CONFIG, filled, write_checkpoint

torch = pytest.importorskip("torch")
ANY = RunningModel()


def model(dtype: Any = None) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(7)
    shapes = {"model.embed.weight": (16, 8), "model.norm.weight": (8,), "scale": ()}
    return {
        name: torch.randn(shape, generator=generator).to(dtype or torch.float32)
        for name, shape in shapes.items()
    }


async def written(tensors: Any, path: Path, running: RunningModel = ANY, dtype: Any = None) -> Path:
    path.mkdir(exist_ok=True)  # noqa: ASYNC240
    await write_tensors(tensors, path, running=running, dtype=dtype_name(dtype))
    return path


def running(tmp_path: Path, dtype: str = "F32") -> RunningModel:
    """What runs has the names and shapes of `model`."""
    tensors = {name: filled(list(tensor.shape), 3, dtype) for name, tensor in model().items()}
    return running_model(str(write_checkpoint(tmp_path / "running", tensors)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "int64", "bool"])
async def test_what_is_written_reads_back_the_same(tmp_path: Path, dtype: str) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    given = model(getattr(torch, dtype))
    path = await written(given, tmp_path / "ckpt")
    read = load_file(path / "model.safetensors")
    assert read.keys() == given.keys()
    for name, tensor in given.items():
        assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor)
    assert {t.name for t in read_checkpoint(str(path)).tensors} == given.keys()


async def test_views_and_gradients_are_written_by_value(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    parameter = torch.nn.Parameter(torch.arange(6.0).reshape(2, 3))
    path = await written(
        {
            "a": parameter,
            "b": parameter.t(),
            "e": torch.empty(0, 4),
            "one": parameter[1, 2].expand(1, 1),
            "rows": parameter[1].expand(4, 3),
        },
        tmp_path / "ckpt",
    )
    read = load_file(path / "model.safetensors")
    assert torch.equal(read["b"], parameter.detach().t()) and read["e"].shape == (0, 4)
    assert read["one"].tolist() == [[5.0]] and read["rows"].tolist() == [[3.0, 4.0, 5.0]] * 4


async def test_an_async_iterator_is_read_one_tensor_at_a_time(tmp_path: Path) -> None:
    buffer = torch.zeros(4)

    async def reused() -> AsyncIterator[tuple[str, Any]]:
        for number in range(3):
            buffer.fill_(number)  # what came before is written by now
            yield f"t{number}", buffer

    load_file = pytest.importorskip("safetensors.torch").load_file
    path = await written(reused(), tmp_path / "ckpt")
    read = load_file(path / "model.safetensors")
    assert [read[f"t{n}"][0].item() for n in range(3)] == [0, 1, 2]


@pytest.mark.parametrize("sizes", [[200_000], [1000], [1000, 200_000]])
async def test_a_disk_that_fills_up_at_any_point_is_said_to_be_full(
    tmp_path: Path, sizes: list[int]
) -> None:
    """Small tensors stay in the file's buffer until the end."""
    given = {f"w{size}": torch.zeros(size, dtype=torch.uint8) for size in sizes}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (HEADER_BYTES + 108, hard))
    try:
        with pytest.raises(SkyctlError, match="File too large") as raised:
            await written(given, tmp_path / "a")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "make room" in raised.value.hint


async def test_another_dtype_is_refused_and_the_hint_converts_it(tmp_path: Path) -> None:
    there = running(tmp_path, "BF16")
    with pytest.raises(PreflightError, match="float32 here, bfloat16") as caught:
        await written(model(), tmp_path / "a", there)
    assert 'dtype="match"' in caught.value.hint
    for dtype, expected in (("match", "BF16"), ("as-is", "F32"), (torch.float16, "F16")):
        path = await written(model(), tmp_path / expected, there, dtype)
        assert {t.dtype for t in read_checkpoint(str(path)).tensors} == {expected}


async def test_integers_are_left_alone_by_a_floating_point_dtype(tmp_path: Path) -> None:
    tensors = {"w": torch.ones(2), "steps": torch.ones(2, dtype=torch.int32)}
    path = await written(tensors, tmp_path / "ckpt", dtype="bfloat16")
    found = {t.name: t.dtype for t in read_checkpoint(str(path)).tensors}
    assert found == {"w": "BF16", "steps": "I32"}


async def test_names_with_a_wrapper_in_front_are_refused_with_the_prefix_to_strip(
    tmp_path: Path,
) -> None:
    wrapped = {f"module.{name}": tensor for name, tensor in model().items()}
    with pytest.raises(PreflightError, match=r"module\.model\.embed\.weight is not in") as caught:
        await written(wrapped, tmp_path / "ckpt", running(tmp_path))
    assert "removeprefix('module.')" in caught.value.hint


async def test_a_wrong_shape_is_refused_at_the_tensor_that_has_it(tmp_path: Path) -> None:
    seen = []

    def tensors() -> Any:
        for name, tensor in model().items():
            seen.append(name)
            yield name, tensor.reshape(-1)

    with pytest.raises(PreflightError, match=r"\[128\] here, the servers run \[16, 8\]"):
        await written(tensors(), tmp_path / "ckpt", running(tmp_path))
    assert seen == ["model.embed.weight"]


@pytest.mark.parametrize(
    ("tensors", "error", "words"),
    [
        ({}, PreflightError, "empty"),
        ([("a", 1.0)], UsageError, "torch.Tensor"),
        ([(1, "a")], UsageError, "torch.Tensor"),
        ([("a", "twice"), ("a", "twice")], UsageError, "torch.Tensor"),
        ([("", torch.ones(1))], PreflightError, "cannot be"),
        ([("a", torch.ones(1)), ("a", torch.ones(1))], PreflightError, "twice"),
        ([("a", torch.ones(1, device="meta"))], UsageError, "meta"),
        ([("a", torch.ones(2, 2).to_sparse())], UsageError, "sparse"),
    ],
)
async def test_what_is_no_weight_is_refused(
    tmp_path: Path, tensors: Any, error: type[Exception], words: str
) -> None:
    with pytest.raises(error, match=words):
        await written(tensors, tmp_path / "ckpt")


async def test_names_that_do_not_fit_the_header_are_refused(tmp_path: Path) -> None:
    names = [f"{number:0100000}" for number in range(84)]
    with pytest.raises(PreflightError, match="the names of 84 tensors are too long"):
        await written(dict.fromkeys(names, torch.zeros(1)), tmp_path / "ckpt")


def fill(window: Window, model: Any, places: dict[str, int], scan: bool = True) -> str:
    pairs = read_pairs(model, [], dtype="as-is")
    return window.write([(block, places[block.tensor], local) for block, local in pairs], scan=scan)


def test_a_file_is_laid_out_once_and_written_again_at_each_step(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    model = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(3, 5), "c": torch.ones(())}
    targets = [
        Target("a", "bfloat16", (3,)),
        Target("b", "float32", (3, 5)),
        Target("c", "float32", ()),
    ]
    with lay_out(tmp_path, targets, CONFIG) as file:
        window = Window(file.path)
        digests = set()
        for step in range(3):
            file.invalidate()
            with pytest.raises(PreflightError):
                read_checkpoint(str(tmp_path))
            stepped = {name: tensor * step for name, tensor in model.items()}
            assert fill(window, stepped, file.places) == ""
            file.finish()
            read = load_file(file.path)
            assert all(torch.equal(read[name], stepped[name]) for name in model)
            digests.add(read_checkpoint(str(tmp_path)).identity_digest)
        assert len(digests) == 3, "a version that was overwritten is not taken for what it was"


class OnGpu(torch.Tensor):
    """As one of another device."""

    device = torch.device("cuda:1")


@pytest.mark.parametrize("by", ["a window", "a state dict"])
async def test_what_a_step_still_computes_on_another_stream_is_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, by: str
) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    memory, waits = {name: torch.zeros(2) for name in "ab"}, []

    def synchronize(device: Any) -> None:
        waits.append(device)
        for tensor in memory.values():
            tensor.fill_(1)

    monkeypatch.setattr(torch.cuda, "synchronize", synchronize)
    model = {name: tensor.as_subclass(OnGpu) for name, tensor in memory.items()}
    if by == "a window":
        with lay_out(tmp_path, [Target(name, "float32", (2,)) for name in model], CONFIG) as file:
            fill(Window(file.path), model, file.places)
            file.finish()
    else:
        await written(model, tmp_path)
    read = load_file(tmp_path / "model.safetensors")
    assert [read[name].tolist() for name in model] == [[1.0, 1.0]] * 2
    assert waits == [OnGpu.device]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_nan_and_infinity_are_named_as_they_would_be_sent(tmp_path: Path, value: float) -> None:
    model = {"a": torch.ones(3), "b": torch.tensor([1.0, value])}
    targets = [Target("a", "float32", (3,)), Target("b", "float32", (2,))]
    with lay_out(tmp_path, targets, CONFIG) as file:
        window = Window(file.path)
        assert fill(window, model, file.places) == "b"
        assert fill(window, model, file.places, scan=False) == ""


def test_a_master_that_is_too_large_for_what_is_sent_is_named(tmp_path: Path) -> None:
    sent = [Target("b", "float16", (2,))]
    with lay_out(tmp_path, sent, CONFIG) as file:
        pairs = read_pairs({"b": torch.tensor([1.0, 1e5])}, sent)
        rows = [(block, file.places[block.tensor], local) for block, local in pairs]
        assert Window(file.path).write(rows, scan=True) == "b"


def test_a_file_without_room_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**20, hard))
    try:
        with pytest.raises(SkyctlError, match="File too large"):
            lay_out(tmp_path, [Target("a", "float32", (2**20,))], CONFIG)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_unknown_dtype_is_refused() -> None:
    with pytest.raises(UsageError, match="not a dtype of torch"):
        dtype_name("nn")


def test_the_config_of_what_runs_is_kept(tmp_path: Path) -> None:
    assert running(tmp_path).config == CONFIG
    assert {target.dtype for target in targets_of(running(tmp_path))} == {"float32"}
    assert running_model(None) == RunningModel() == running_model("org/not-here")
