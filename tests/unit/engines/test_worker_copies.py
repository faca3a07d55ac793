"""Weights from one worker into another: what is copied, and between which workers."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.usefixtures("vllm")

WIDTH, HEIGHT = 24, 40
KEY = "a copy"


class UnquantizedLinearMethod:
    """Like vLLM's on CPU: it packs the weight, and empties the parameter unless it `keeps` it."""

    def __init__(self, *, keeps: bool = False) -> None:
        self.keeps = keeps

    def process_weights_after_loading(self, layer: Any) -> None:
        packed = layer.weight.detach().clone()
        layer.cpu_linear = lambda x, _weight, bias: torch.nn.functional.linear(x, packed, bias)
        if not self.keeps:
            layer.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Fp8LinearMethod(UnquantizedLinearMethod):
    """Makes other tensors of the weight."""


def parameter(*shape: int) -> Any:
    return torch.nn.Parameter(torch.randn(shape), requires_grad=False)


def linear(weight: Any, method: Any) -> Any:
    layer = torch.nn.Module()
    layer.weight, layer.quant_method = weight, method
    layer.input_size_per_partition = weight.shape[1]
    method.process_weights_after_loading(layer)
    return layer


def worker(seed: int, *, height: int = HEIGHT, method: Any = None, **config: Any) -> Any:
    """A worker with an embedding, an output layer that shares its weight, a packed layer and a
    norm.
    """
    torch.manual_seed(seed)
    model = torch.nn.Module()
    model.embed = torch.nn.Module()
    model.embed.weight = parameter(HEIGHT, WIDTH)
    model.hidden = linear(parameter(height, WIDTH), method or UnquantizedLinearMethod())
    model.norm = torch.nn.Module()
    model.norm.weight = parameter(WIDTH)
    model.head = linear(model.embed.weight, UnquantizedLinearMethod(keeps=True))
    model.head.tie_weights = lambda _: None
    parallel = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1, "data_parallel_size": 1}
    parallel |= {"enable_expert_parallel": False, "rank": 0}
    settings = SimpleNamespace(
        parallel_config=SimpleNamespace(**{**parallel, **config}),
        model_config=SimpleNamespace(dtype=torch.float32, quantization=None),
        lora_config=None,
        device_config=SimpleNamespace(device_type="cpu"),
    )
    runner = SimpleNamespace(get_model=lambda: model, resets=0)
    runner.reset_lora_state = lambda: setattr(runner, "resets", runner.resets + 1)
    return SimpleNamespace(device=torch.device("cpu"), model_runner=runner, vllm_config=settings)


def digest(worker: Any) -> str:
    from skyctl.engines.vllm.inside.digest import digest_model

    return str(digest_model(worker.model_runner.get_model())["digest"])


@pytest.fixture
def copies() -> Callable[[Any], Any]:
    from skyctl.engines.vllm.inside.worker_copies import WorkerCopies

    return lambda worker: WorkerCopies(worker, cpu_buffer_bytes=1000)


def test_a_worker_computes_with_what_the_other_has(
    copies: Callable[[Any], Any], tmp_path: Path
) -> None:
    has, gets = worker(1), worker(2)
    before = digest(has)
    source, target = copies(has), copies(gets)
    offer = source.share(KEY, str(tmp_path), os.getpid())
    target.open(KEY, offer, os.getpid())
    chunks = -(-offer.total_bytes // offer.buffer_bytes)
    assert chunks > 2  # tensors are cut where a chunk ends
    for chunk in range(chunks):
        source.fill(KEY, chunk)
        target.copy(KEY, chunk, chunk + 1 == chunks)
    assert digest(gets) == before == digest(has)
    x = torch.randn(1, WIDTH)
    for name in ("hidden", "head"):
        layers = [getattr(w.model_runner.get_model(), name) for w in (has, gets)]
        first, second = (layer.cpu_linear(x, layer.weight, None) for layer in layers)
        assert first.equal(second), name
    assert gets.model_runner.get_model().hidden.weight.numel() == 0
    assert gets.model_runner.resets == 1


@pytest.mark.parametrize("other", [{"height": HEIGHT + 1}, {"rank": 1}])
def test_a_worker_with_other_tensors_copies_nothing(
    copies: Callable[[Any], Any], tmp_path: Path, other: dict[str, Any]
) -> None:
    gets = worker(2, **other)
    before = digest(gets)
    offer = copies(worker(1)).share(KEY, str(tmp_path), os.getpid())
    target = copies(gets)
    with pytest.raises(RuntimeError, match="its tensors differ"):
        target.open(KEY, offer, os.getpid())
    with pytest.raises(RuntimeError, match="given up"):
        target.copy(KEY, 0, True)
    assert digest(gets) == before


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data_parallel_size": 2}, "data-parallel"),
        ({"method": Fp8LinearMethod()}, "hidden: Fp8LinearMethod processes its weights"),
    ],
)
def test_weights_that_other_tensors_are_made_of_are_not_offered(
    copies: Callable[[Any], Any], tmp_path: Path, changes: dict[str, Any], reason: str
) -> None:
    offer = copies(worker(1, **changes)).share(KEY, str(tmp_path), os.getpid())
    assert reason in offer.reason and not offer.sources


def test_a_copy_ends_where_another_begins(copies: Callable[[Any], Any], tmp_path: Path) -> None:
    source = copies(worker(1))
    for key in (KEY, "another"):
        (tmp_path / key).mkdir()
        source.share(key, str(tmp_path / key), os.getpid())
    with pytest.raises(RuntimeError, match="given up"):
        source.fill(KEY, 0)
    source.fill("another", 0)


def test_the_end_of_a_process_ends_no_copy_that_another_drives(
    copies: Callable[[Any], Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from skyctl.engines.vllm.inside import worker_copies

    ended: dict[int, Callable[[], None]] = {}
    source = copies(worker(1))

    def watch(pids: list[int], act: Callable[[], None]) -> None:
        assert not source._buffers  # one that ended while they were taken could not be seen
        ended[pids[0]] = act

    monkeypatch.setattr(worker_copies, "when_ended", watch)
    for pid in (1, 2):
        (tmp_path / f"{pid}").mkdir()
        source.share(KEY, str(tmp_path / f"{pid}"), pid)
    ended[1]()
    source.fill(KEY, 0)
    ended[2]()
    with pytest.raises(RuntimeError, match="given up"):
        source.fill(KEY, 1)
