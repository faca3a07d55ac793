"""Whether servers apply all of an adapter: engines leave out modules that they do not wrap for
LoRA, without an error.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyctl.checkpoints.header import Tensor
from skyctl.engines.base import Server, lacks_method
from skyctl.errors import ServerError
from skyctl.wire.worker import WorkerMethod

_FIRST_PARTS = (".lora_A.weight", ".lora_embedding_A")
_SHOWN = 3
_FUSED = ({"q_proj", "k_proj", "v_proj", "qkv_proj"}, {"gate_proj", "up_proj", "gate_up_proj"})
"""Modules that vLLM wraps together."""


async def adapter_problem(
    server: Server, config: Mapping[str, Any], tensors: Sequence[Tensor]
) -> str:
    """What a server would leave out of an adapter; "" if it applies all of it.

    Raises:
        ServerError: it does not answer.
    """
    names = [tensor.name for tensor in tensors if tensor.name.endswith(_FIRST_PARTS)]
    question = {"config": dict(config), "names": names}
    try:
        answers = await server.ask_workers(WorkerMethod.ADAPTER_FIT, question)
    except ServerError as error:
        if not lacks_method(error):
            raise
        targets = (await server.started_with()).lora_targets
        left_out = [name for name in names if targets and not _is_target(name, targets)]
        return _sentence(left_out)
    try:
        unread = {key for answer in answers for key in answer["unread"]}
        # pipeline stages have some each, and what one applies is applied
        left_out = [n for n in names if all(n in answer["unapplied"] for answer in answers)]
    except (LookupError, TypeError) as error:
        raise ServerError(f"{server.target.name}: its workers answered {error!r}") from error
    if unread:
        return f"it does not read {' and '.join(sorted(unread))}"
    return _sentence(left_out)


def _is_target(name: str, targets: Sequence[str]) -> bool:
    module = name.removeprefix("base_model.model.").partition(".lora_")[0]
    last = module.rpartition(".")[2]
    together = next((group for group in _FUSED if last in group), {last})
    return module in targets or not together.isdisjoint(targets)


def _sentence(left_out: Sequence[str]) -> str:
    modules = [name.removeprefix("base_model.model.").partition(".lora_")[0] for name in left_out]
    if not modules:
        return ""
    more = f" and {len(modules) - _SHOWN} more" if len(modules) > _SHOWN else ""
    return f"it would change nothing in {', '.join(modules[:_SHOWN])}{more}"
