"""What the workers of a real server say of their weights."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyctl.engines.vllm.inside.wire import ROW_WIDTH, RowQuestion, row_number
from skyctl.engines.vllm.inside.worker import SkyctlWorkerExtension
from skyctl.engines.vllm.server import VLLMServer
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from tests.integration.fleet_cli import FleetCli

REPOSITORY = Path(__file__).parents[2]


def _first(model: Any, word: str, attribute: str = "weight") -> Any:
    """The first layer with `word` in its name that has such a parameter."""
    return next(
        layer
        for name, layer in model.named_modules()
        if word in name and attribute in layer._parameters
    )


def _repacked(layer: Any, change: Callable[[Any], Any]) -> None:
    """Change the weight that a packed linear layer computes with."""
    import torch
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    from skyctl.engines.vllm.inside.digest import input_size

    width, dtype = input_size(layer), layer.weight.dtype
    with torch.inference_mode():
        weight = layer.cpu_linear(torch.eye(width, dtype=dtype), layer.weight, None).T
        changed = change(weight.contiguous().clone())
    layer.weight = torch.nn.Parameter(changed.clone(), requires_grad=False)
    dispatch_cpu_unquantized_gemm(layer, remove_weight=True)


def _one_element_of_a_norm(model: Any) -> None:
    _first(model, "norm").weight.data[0] += 1


def _one_element_of_an_expert(model: Any) -> None:
    weight = _first(model, "experts", "w13_weight").w13_weight
    weight.data.view(-1)[weight.numel() // 2] += 1


def _two_rows_of_qkv(model: Any) -> None:
    def exchanged(weight: Any) -> Any:
        return weight[[1, 0, *range(2, len(weight))]]

    _repacked(_first(model, "qkv_proj"), exchanged)


def _rounded_through_another_dtype(model: Any) -> None:
    def rounded(weight: Any) -> Any:
        return weight.bfloat16().to(weight.dtype)

    _repacked(_first(model, "o_proj"), rounded)


def _a_parameter_of_another_dtype(model: Any) -> None:
    layer = _first(model, "norm")
    layer.weight.data = layer.weight.data.bfloat16()  # ones: the same numbers


DAMAGES = (
    _one_element_of_a_norm,
    _two_rows_of_qkv,
    _rounded_through_another_dtype,
    _one_element_of_an_expert,
    _a_parameter_of_another_dtype,
)
"""What a worker's weights can suffer: in every model, where there are experts, and what no push
mends, since it fills the parameters that are there."""
EVERYWHERE, EXPERT, DTYPE = range(3), 3, 4


class CorruptibleExtension(SkyctlWorkerExtension):
    """Also damages the weights of a worker: at once, or when a push has filled them."""

    _to_come = -1

    def skyctl_corrupt(self, damage: int, rank: int = 0, in_push: bool = False) -> None:
        if self.vllm_config.parallel_config.data_parallel_index == rank:
            if in_push:
                self._to_come = damage
            else:
                DAMAGES[damage](self.model_runner.get_model())

    def skyctl_weight_digest(
        self, rows: Sequence[dict[str, Any]] = (), numbered: Sequence[Sequence[str]] = ()
    ) -> dict[str, Any]:
        if rows and self._to_come >= 0:  # a push asks for rows once everything was sent
            DAMAGES[self._to_come](self.model_runner.get_model())
            self._to_come = -1
        return super().skyctl_weight_digest(rows, numbered)


CORRUPTIBLE = {
    "args": {"worker-extension-cls": f"{__name__}.{CorruptibleExtension.__name__}"},
    "env": {"PYTHONPATH": str(REPOSITORY)},
}
"""Keys of a group of replicas in the fleet file."""


def assert_noticed(fleet: FleetCli, server: str, damage: int, checkpoint: Path) -> None:
    """`weights verify` names a server whose weights were damaged, and the next push mends it; a
    push is refused that damages what it brings."""
    name = DAMAGES[damage].__name__
    ask(fleet, server, "skyctl_corrupt", damage=damage)
    told = fleet.json("weights", "verify", expect=None)
    assert not told["ok"] and server in told["error"]["message"], name
    fleet.run("sync-weights", str(checkpoint))
    assert fleet.data("weights", "verify")["agree"] is True, name
    ask(fleet, server, "skyctl_corrupt", damage=damage, in_push=True)
    failed = fleet.json("sync-weights", str(checkpoint), expect=None)
    assert failed["error"]["kind"] in ("PushError", "PartialFailure"), name
    # the fleet is at it by itself, and may start the server anew: longer than a push waits for
    fleet.run("wait", "--timeout", "150", expect=None)
    fleet.run("sync-weights", str(checkpoint))
    assert fleet.data("weights", "verify")["agree"] is True, name


def ask(fleet: FleetCli, server: str, method: str, **kwargs: Any) -> list[Any]:
    """Answers of all workers of all data-parallel ranks."""
    target = ServerTarget(server, fleet.data("urls")["servers"][server], fleet.control_token)

    async def asking() -> list[Any]:
        async with ControlClient() as client:
            return await VLLMServer(client, target).ask_workers(method, kwargs)

    return asyncio.run(asking())


def questions_of(checkpoint: Path) -> dict[str, tuple[RowQuestion, dict[tuple[int, int], bytes]]]:
    """For every tensor of a tiny checkpoint a question, and the bytes by row and column."""
    from safetensors import safe_open
    from torch import uint8

    found = {}
    with safe_open(checkpoint / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118 (a file, no mapping)
            tensor = file.get_tensor(name)
            matrix = tensor.reshape(1, -1) if tensor.dim() == 1 else tensor
            height, width = matrix.shape
            rows, begin = sorted({0, height // 2, height - 1}), max(0, (width - ROW_WIDTH) // 2)
            dtype = str(tensor.dtype).removeprefix("torch.")
            end = min(width, begin + ROW_WIDTH)
            question = RowQuestion(name, dtype, list(tensor.shape), rows, begin, end)
            values = {
                (row, column): bytes(matrix[row, column : column + 1].view(uint8).numpy())
                for row in rows
                for column in range(begin, end)
            }
            found[name] = (question, values)
    return found


def assert_holds(fleet: FleetCli, server: str, checkpoint: Path) -> None:
    """Every asked row of every tensor of the checkpoint is what the server's workers hold."""
    questions = questions_of(checkpoint)
    rows = [asdict(question) for question, _ in questions.values()]
    workers = ask(fleet, server, "skyctl_weight_digest", rows=rows)
    for number, (question, values) in enumerate(questions.values()):
        seen = set()
        for worker in workers:
            answer = worker["rows"][number]
            assert answer["name"] == question.name
            assert not answer["reason"], answer
            for row, begin, end, found in answer["pieces"]:
                data = b"".join(values[row, column] for column in range(begin, end))
                assert found == row_number(data, question.dtype), (server, question)
                seen |= {(row, column) for column in range(begin, end)}
        assert seen == set(values), (server, question)
