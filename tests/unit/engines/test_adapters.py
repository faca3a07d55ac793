"""What skyctl puts into vLLM for adapters, on stand-ins and against the installed vLLM."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.engines.vllm.inside import adapters as inside
from skyctl.engines.vllm.inside.adapters import (
    IN_FLIGHT,
    count_by_name,
    give_names,
    leave_base_rows_alone,
    leave_prompts_alone,
    refuse_prompt_logprobs,
    serve_adapters,
)


def request(name: str, path: str) -> Any:
    return SimpleNamespace(lora_name=name, lora_path=path)


def models_class() -> Any:
    """Like vLLM's registry of names."""

    class Models:
        def __init__(self) -> None:
            self.base_model_paths = [SimpleNamespace(name="base")]
            self.lora_requests: dict[str, Any] = {}
            states: dict[str, Any] = {}
            processor = SimpleNamespace(request_states=states)
            self.engine_client = SimpleNamespace(output_processor=processor)

        def is_base_model(self, name: str) -> bool:
            return name == "base"

        async def load_lora_adapter(self, asked: Any, base_model_name: str | None = None) -> str:
            self.lora_requests[asked.lora_name] = asked
            return "loaded"

        async def show_available_models(self) -> Any:
            cards = [SimpleNamespace(id="base", root="/base", owned_by="vllm")]
            cards += [
                SimpleNamespace(id=one.lora_name, root=one.lora_path, owned_by="vllm")
                for one in self.lora_requests.values()
            ]
            return SimpleNamespace(data=cards)

    def card(*, id: str, root: str, parent: str, owned_by: str = "vllm") -> Any:
        return SimpleNamespace(id=id, root=root, owned_by=owned_by)

    def refused(**error: Any) -> str:
        return f"refused: {error['message']}"

    give_names(Models, refused, card)
    give_names(Models, refused, card)
    return Models


def test_a_name_goes_from_version_to_version_and_requests_keep_theirs() -> None:
    models = models_class()()

    def tell(name: str, path: str) -> str:
        return str(asyncio.run(models.load_lora_adapter(request(name, path))))

    def listed() -> list[tuple[str, str, str]]:
        found = asyncio.run(models.show_available_models())
        return [(one.id, one.root, one.owned_by) for one in found.data]

    tell("x@1", "/1")
    assert tell("x", "skyctl:x@1") == "Success: LoRA adapter 'x' is x@1."
    first = models.lora_requests["x"]
    assert set(models.lora_requests) == {"x"}
    models.engine_client.output_processor.request_states["r"] = SimpleNamespace(lora_request=first)
    models.engine_client.output_processor.request_states["b"] = SimpleNamespace(lora_request=None)
    tell("x@2", "/2")
    for _ in range(2):  # a repeated call finds it done
        assert tell("x", "skyctl:x@2").startswith("Success")
    assert listed() == [
        ("base", "/base", "vllm"),
        ("x", "/2", "vllm"),
        ("x@1", "/1", IN_FLIGHT),
    ]
    assert (first.lora_name, first.lora_path) == ("x@1", "/1")
    for name, version in (("x", "x@9"), ("base", "x"), ("", "x")):
        assert tell(name, f"skyctl:{version}").startswith("refused")


def test_prompt_log_probabilities_of_adapters_are_refused_and_of_the_base_are_not() -> None:
    class Processor:
        def process_inputs(
            self, request_id: str, prompt: Any, params: Any, lora_request: Any = None
        ) -> str:
            return "taken"

    refuse_prompt_logprobs(Processor, ValueError)
    refuse_prompt_logprobs(Processor, ValueError)
    wanted, plain = SimpleNamespace(prompt_logprobs=0), SimpleNamespace(prompt_logprobs=None)
    take = Processor().process_inputs
    assert take("r", [1], wanted) == take("r", [1], plain, lora_request="x") == "taken"
    assert take("r", [1], SimpleNamespace(), "x") == "taken"  # pooling has none
    of_tokens = SimpleNamespace(prompt_logprobs=None, prompt_logprob_token_ids=[[1]])
    assert take("r", [1], of_tokens) == "taken"
    for asked in (
        lambda: take("r", [1], of_tokens, "x"),
        lambda: take("r", [1], wanted, "x"),
        lambda: take("r", [1], params=wanted, lora_request="x"),
    ):
        with pytest.raises(ValueError, match="compute them in the trainer"):
            asked()


def test_the_metric_names_adapters_without_versions() -> None:
    class States:
        def _request_update(self, request: str, adapter: str | None, *, waiting: bool) -> Any:
            return adapter

    count_by_name(States)
    count_by_name(States)
    assert States()._request_update("r", "x@17", waiting=True) == "x"  # type: ignore[comparison-overlap]
    assert States()._request_update("r", None, waiting=True) is None


def test_rows_without_an_adapter_get_nothing_of_the_last_one() -> None:
    torch = pytest.importorskip("torch")
    ops = SimpleNamespace(bgmv_expand=None, bgmv_expand_slice=None)
    weights = torch.tensor(
        [[[2.0], [2.0]], [[7.0], [5.0]]]  # 2 adapters, 2 outputs, rank 1
    )

    def expand(inputs: Any, stacked: Any, into: Any, indices: Any, add_inputs: bool = True) -> None:
        into += torch.einsum("bi,boi->bo", inputs, stacked[indices])

    ops.bgmv_expand = ops.bgmv_expand_slice = expand
    users = SimpleNamespace()
    leave_base_rows_alone(ops, users)
    leave_base_rows_alone(ops, users)
    assert users.bgmv_expand is ops.bgmv_expand
    into = torch.zeros(3, 2)
    users.bgmv_expand(torch.ones(3, 1), weights, into, torch.tensor([0, -1, 1]), add_inputs=True)
    assert into.tolist() == [[2.0, 2.0], [0.0, 0.0], [7.0, 5.0]]


def test_lora_is_left_out_of_the_logits_of_prompts_alone() -> None:
    class Wrapper:
        def add_lora_logits(self) -> str:
            return "added"

    class First:
        def _get_prompt_logprobs_dict(self, wrapper: Wrapper) -> Any:
            return wrapper.add_lora_logits()

    class Second:
        def compute_prompt_logprobs(self, wrapper: Wrapper) -> Any:
            return wrapper.add_lora_logits()

        compute_prompt_token_id_logprobs = compute_prompt_logprobs

    for _ in range(2):
        leave_prompts_alone(Wrapper, First, Second)
    wrapper = Wrapper()
    assert First()._get_prompt_logprobs_dict(wrapper) is None
    assert Second().compute_prompt_logprobs(wrapper) is None
    assert Second().compute_prompt_token_id_logprobs(wrapper) is None
    assert wrapper.add_lora_logits() == "added"


def test_nothing_is_changed_where_adapters_are_not_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(inside.SWITCH, raising=False)
    monkeypatch.setattr(inside, "suppress", None)  # it would be called
    serve_adapters()


@pytest.mark.usefixtures("vllm")
def test_the_installed_vllm_has_what_is_replaced() -> None:
    import inspect

    from vllm.entrypoints.openai.models import serving
    from vllm.exceptions import VLLMValidationError
    from vllm.lora.ops.torch_ops import lora_ops
    from vllm.lora.punica_wrapper import punica_cpu
    from vllm.v1.core.kv_cache_utils import _gen_lora_extra_hash_keys
    from vllm.v1.engine.input_processor import InputProcessor
    from vllm.v1.engine.output_processor import OutputProcessor, RequestState
    from vllm.v1.metrics.stats import LoRARequestStates
    from vllm.v1.worker.gpu.sample.prompt_logprob import PromptLogprobsWorker
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    assert {"params", "lora_request"} <= set(
        inspect.signature(InputProcessor.process_inputs).parameters
    )
    assert "lora_request" in inspect.signature(RequestState).parameters
    assert "self.request_states" in inspect.getsource(OutputProcessor)
    assert list(inspect.signature(LoRARequestStates._request_update).parameters)[2] == "lora_name"
    assert hasattr(GPUModelRunner, "_get_prompt_logprobs_dict")
    assert hasattr(PromptLogprobsWorker, "compute_prompt_logprobs")
    assert hasattr(punica_cpu.PunicaWrapperCPU, "add_lora_logits")
    assert issubclass(VLLMValidationError, Exception)
    assert {"create_error_response", "ModelCard", "OpenAIServingModels"} <= set(dir(serving))
    for name in ("bgmv_expand", "bgmv_expand_slice"):
        first = list(inspect.signature(getattr(lora_ops, name)).parameters)[:4]
        assert first[0] == "inputs" and "indices" in first[3]
        assert hasattr(punica_cpu, name)
    asked = SimpleNamespace(lora_request=SimpleNamespace(lora_name="x@1", lora_path="/1"))
    assert _gen_lora_extra_hash_keys(asked) == [("lora", "x@1", "/1")]  # type: ignore[arg-type]
