"""What vLLM lacks for LoRA adapters that change under traffic, patched into vLLM's processes.

In the API server (vLLM 0.32, `openai/models/serving.py`):

- **A name for a version.** `/v1/load_lora_adapter` with the path `skyctl:NAME@7` gives the name to
  an adapter that was loaded as NAME@7: one assignment, between two requests. Running requests
  finish with the version they began with. vLLM's own `load_inplace` cannot do that: it keeps the
  adapter's id, so that running requests change weights amid their tokens, and the flag sticks, so
  that every step of the engine reads the files again.
- **What is in use.** `/v1/models` lists names as they are requested, and versions that can no
  longer be requested but still have running requests (`owned_by: in-flight`): their files must
  stay.
- **No prompt log-probabilities of adapters.** vLLM computes them with one row of LoRA indices per
  sequence where there is one row of logits per token; the engine dies (gh-29955).

In the workers of CPU servers:

- Rows without an adapter have the index -1, which torch takes for the last adapter: base requests
  beside adapters got its output (gh-48421). Their share is zero here.
- Prompt log-probabilities of base requests die beside adapters in the same way as those of
  adapters, so the output layer's LoRA is left out of them.
"""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import partial, wraps
from http import HTTPStatus
from typing import Any

NAMED = "skyctl:"
IN_FLIGHT = "in-flight"
SWITCH = "VLLM_ALLOW_RUNTIME_LORA_UPDATING"

_MARK = "_skyctl_adapters"
_OF_PROMPTS = (
    "_get_prompt_logprobs_dict",  # of the first model runner
    "compute_prompt_logprobs",  # of the second, the default on GPUs since 0.33
    "compute_prompt_token_id_logprobs",
)
_REFUSAL = (
    "prompt log-probabilities (prompt_logprobs, or echo with logprobs) of a LoRA adapter end "
    "vLLM's engine: ask the base model for them, or compute them in the trainer"
)


def serve_adapters() -> None:
    """Patch this vLLM process, where adapters may be loaded. May be called more than once. What a
    version lacks is left alone: a name cannot be given there, and skyctl says so.
    """
    if os.environ.get(SWITCH, "0").strip().lower() not in ("1", "true"):
        return
    serving = sys.modules.get("vllm.entrypoints.openai.models.serving")  # only in the API server
    with suppress(ImportError, AttributeError):
        if serving is not None:
            from vllm.exceptions import VLLMValidationError
            from vllm.v1.engine.input_processor import InputProcessor
            from vllm.v1.metrics.stats import LoRARequestStates

            refuse_prompt_logprobs(InputProcessor, VLLMValidationError)
            count_by_name(LoRARequestStates)
            give_names(
                serving.OpenAIServingModels, serving.create_error_response, serving.ModelCard
            )
        from vllm.lora.ops.torch_ops import lora_ops
        from vllm.lora.punica_wrapper import punica_cpu
        from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        leave_base_rows_alone(lora_ops, punica_cpu)
        leave_prompts_alone(punica_cpu.PunicaWrapperCPU, GPUModelRunner, PromptLogprobsWorker)


def give_names(models: Any, refuse: Callable[..., Any], card: Any) -> None:
    """Teach `models`, vLLM's registry of names, to move a name to another adapter."""
    load, listed = models.load_lora_adapter, models.show_available_models
    if hasattr(load, _MARK):
        return

    @wraps(load)
    async def load_or_name(self: Any, request: Any, *args: Any, **named: Any) -> Any:
        name, version = request.lora_name, request.lora_path.removeprefix(NAMED)
        if version == request.lora_path:
            return await load(self, request, *args, **named)
        loaded = self.lora_requests.get(name)
        if loaded is None or loaded.lora_name != version:
            if not name or self.is_base_model(name) or version not in self.lora_requests:
                return refuse(
                    message=f"{name!r} cannot be a name of {version!r}, which is not loaded",
                    err_type="NotFoundError",
                    status_code=HTTPStatus.NOT_FOUND,
                )
            self.lora_requests[name] = self.lora_requests.pop(version)
        return f"Success: LoRA adapter '{name}' is {version}."

    @wraps(listed)
    async def all_names(self: Any) -> Any:
        served = await listed(self)
        paths = {adapter.lora_path for adapter in self.lora_requests.values()}
        parent = self.base_model_paths[0].name
        served.data = [adapter for adapter in served.data if adapter.root not in paths]
        for name, adapter in self.lora_requests.items():
            served.data.append(card(id=name, root=adapter.lora_path, parent=parent))
        states = self.engine_client.output_processor.request_states.values()
        running = {s.lora_request.lora_path: s.lora_request for s in states if s.lora_request}
        for path in running.keys() - paths:
            name = running[path].lora_name
            served.data.append(card(id=name, root=path, parent=parent, owned_by=IN_FLIGHT))
        return served

    setattr(load_or_name, _MARK, True)
    models.load_lora_adapter, models.show_available_models = load_or_name, all_names


def refuse_prompt_logprobs(processor: Any, refusal: Callable[[str], Exception]) -> None:
    """Make `processor`, which receives every request, refuse what would end the engine."""
    process = processor.process_inputs
    if hasattr(process, _MARK):
        return
    signature = inspect.signature(process)

    @wraps(process)
    def process_or_refuse(*args: Any, **named: Any) -> Any:
        arguments = signature.bind(*args, **named).arguments
        # the second for given tokens, new in 0.33
        names = ("prompt_logprobs", "prompt_logprob_token_ids")
        requested = any(getattr(arguments.get("params"), x, None) is not None for x in names)
        if requested and arguments.get("lora_request") is not None:
            raise refusal(_REFUSAL)
        return process(*args, **named)

    setattr(process_or_refuse, _MARK, True)
    processor.process_inputs = process_or_refuse


def count_by_name(states: Any) -> None:
    """Make vLLM's adapter metric use names without versions: it never drops a label's series."""
    update = states._request_update
    if hasattr(update, _MARK):
        return

    @wraps(update)
    def update_by_name(self: Any, request: str, adapter: str | None, *args: Any, **how: Any) -> Any:
        return update(self, request, adapter and adapter.partition("@")[0], *args, **how)

    setattr(update_by_name, _MARK, True)
    states._request_update = update_by_name


def leave_base_rows_alone(*modules: Any) -> None:
    """Make torch's LoRA operations add nothing to rows of the index -1."""
    for name in ("bgmv_expand", "bgmv_expand_slice"):
        expand = getattr(modules[0], name)
        if hasattr(expand, _MARK):
            return
        masked = _masked(expand)
        for module in modules:
            setattr(module, name, masked)


def _masked(expand: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(expand)
    def masked(inputs: Any, weights: Any, into: Any, indices: Any, *args: Any, **named: Any) -> Any:
        own = (indices >= 0)[: inputs.shape[0], None]
        return expand(inputs.where(own, 0), weights, into, indices, *args, **named)

    setattr(masked, _MARK, True)
    return masked


def leave_prompts_alone(wrapper: Any, *runners: Any) -> None:
    """Leave LoRA out of prompt logits, which only base requests ask for."""
    add = wrapper.add_lora_logits
    if hasattr(add, _MARK):
        return
    of_prompts: list[bool] = []

    @wraps(add)
    def add_to_samples(*args: Any, **named: Any) -> Any:
        return None if of_prompts else add(*args, **named)

    for runner in runners:
        for name in filter(partial(hasattr, runner), _OF_PROMPTS):
            setattr(runner, name, _noting(getattr(runner, name), of_prompts))
    setattr(add_to_samples, _MARK, True)
    wrapper.add_lora_logits = add_to_samples


def _noting(prompts: Callable[..., Any], of_prompts: list[bool]) -> Callable[..., Any]:
    @wraps(prompts)
    def noting(*args: Any, **named: Any) -> Any:
        of_prompts.append(True)
        try:
            return prompts(*args, **named)
        finally:
            of_prompts.pop()

    return noting
