"""What the workers of a real server say of their weights."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from pathlib import Path
from typing import Any

from skyctl.engines.vllm.server import VLLMServer
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.wire.messages import ROW_WIDTH, RowQuestion, row_number
from tests.integration.fleet_cli import FleetCli

REPOSITORY = Path(__file__).parents[2]

EVERYWHERE, EXPERT, DTYPE = range(3), 3, 4
"""Numbers of `corruptible.DAMAGES`."""

CORRUPTIBLE = {
    "args": {"worker-extension-cls": "tests.integration.corruptible.CorruptibleExtension"},
    "env": {"PYTHONPATH": str(REPOSITORY)},
}
"""Keys of a group of replicas in the fleet file."""


def assert_noticed(fleet: FleetCli, server: str, damage: int, checkpoint: Path) -> None:
    """`weights verify` names a server whose weights were damaged, and the next push mends it; a
    push is refused that damages what it brings."""
    ask(fleet, server, "skyctl_corrupt", damage=damage)
    told = fleet.json("weights", "verify", expect=None)
    assert not told["ok"] and server in told["error"]["message"], damage
    fleet.run("sync-weights", str(checkpoint))
    assert fleet.data("weights", "verify")["agree"] is True, damage
    ask(fleet, server, "skyctl_corrupt", damage=damage, in_push=True)
    failed = fleet.json("sync-weights", str(checkpoint), expect=None)
    assert failed["error"]["kind"] in ("PushError", "PartialFailure"), damage
    # the fleet is at it by itself, and may start the server anew: longer than a push waits for
    fleet.run("wait", "--timeout", "150", expect=None)
    fleet.run("sync-weights", str(checkpoint))
    assert fleet.data("weights", "verify")["agree"] is True, damage


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
