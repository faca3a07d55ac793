"""Every public method of the SDK's clients does what docs/how-to/tinker.md says of it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

tinker = pytest.importorskip("tinker")
from tinker import types  # noqa: E402

from tests.pages import documented  # noqa: E402
from tests.processes.tinker.serving import BASE, KEY, ServingProcess  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")


def test_every_method_does_what_the_page_says(
    serving: ServingProcess, tiny_base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setenv("TINKER_PROJECT_ID", "p")
    monkeypatch.chdir(tiny_base)  # the tokenizer is found here under the model's name
    service = tinker.ServiceClient(base_url=serving.url, api_key=KEY)
    trainer = service.create_lora_training_client(base_model=BASE, rank=4).result()
    datum = types.Datum(
        model_input=types.ModelInput.from_ints([5, 6]), loss_fn_inputs={"target_tokens": [6, 7]}
    )
    saved = trainer.save_state("one").result().path
    path = trainer.save_weights_for_sampler("one").result().path
    sampler = service.create_sampling_client(model_path=path).result()
    rest = service.create_rest_client()
    prompt, params = types.ModelInput.from_ints([65]), types.SamplingParams(max_tokens=1)
    session = trainer.model_id.split(":")[0]
    own, external = sampler.get_sampler_handle(), f"tinker://{trainer.model_id}/external_weights/x"

    def custom(data: Any, logprobs: Any) -> Any:
        return -logprobs[0].sum(), {}

    def mean(logprobs: Any) -> Any:
        return logprobs.mean(), {}

    calls: dict[str, dict[str, Callable[[], Any]]] = {
        "ServiceClient": {
            "get_server_capabilities": service.get_server_capabilities,
            "create_lora_training_client": lambda: trainer,
            "create_training_client_from_state": lambda: service.create_training_client_from_state(
                saved
            ).result(),
            "create_training_client_from_state_with_optimizer": lambda: (
                service.create_training_client_from_state_with_optimizer(saved).result()
            ),
            "create_sampling_client": lambda: sampler,
            "create_rest_client": lambda: rest,
            "get_telemetry": service.get_telemetry,
            "get_console_url": service.get_console_url,
            "holder": lambda: service.holder,
            "copy_weights": lambda: service.copy_weights(saved).result(),
            "create_custom_loss": lambda: service.create_custom_loss(
                mean, {"logprobs": 1}
            ).result(),
            "close": lambda: None,
        },
        "TrainingClient": {
            "forward": lambda: trainer.forward([datum], "cross_entropy").result(),
            "forward_backward": lambda: trainer.forward_backward([datum], "cross_entropy").result(),
            "forward_backward_custom": lambda: trainer.forward_backward_custom(
                [datum], custom
            ).result(),
            "optim_step": lambda: trainer.optim_step(types.AdamParams()).result(),
            "save_state": lambda: trainer.save_state("two").result(),
            "load_state": lambda: trainer.load_state(saved).result(),
            "load_state_with_optimizer": lambda: trainer.load_state_with_optimizer(saved).result(),
            "save_weights_for_sampler": lambda: trainer.save_weights_for_sampler("two").result(),
            "save_weights_and_get_sampling_client": lambda: (
                trainer.save_weights_and_get_sampling_client().result()
            ),
            "create_sampling_client": lambda: trainer.create_sampling_client(path).result(),
            "get_info": trainer.get_info,
            "get_tokenizer": trainer.get_tokenizer,
            "get_telemetry": trainer.get_telemetry,
            "get_console_url": trainer.get_console_url,
            "save_weights_external": lambda: trainer.save_weights_external("x").result(),
        },
        "SamplingClient": {
            "create": lambda: tinker.SamplingClient.create(
                service.holder, base_model=BASE
            ).result(),
            "sample": lambda: sampler.sample(prompt, 1, params).result(),
            "compute_logprobs": lambda: sampler.compute_logprobs(prompt).result(),
            "get_tokenizer": sampler.get_tokenizer,
            "get_base_model": sampler.get_base_model,
            "get_sampler_handle": lambda: own,
            "from_sampler_handle": lambda: (
                tinker.SamplingClient.from_sampler_handle(own, api_key=KEY)
                .sample(prompt, 1, params)
                .result()
            ),
            "get_telemetry": sampler.get_telemetry,
            "on_queue_state_change": lambda: None,
        },
        "RestClient": {
            "get_server_capabilities": lambda: rest.get_server_capabilities().result(),
            "get_training_run": lambda: rest.get_training_run(trainer.model_id).result(),
            "get_training_run_by_tinker_path": lambda: rest.get_training_run_by_tinker_path(
                saved
            ).result(),
            "get_weights_info_by_tinker_path": lambda: rest.get_weights_info_by_tinker_path(
                saved
            ).result(),
            "list_training_runs": lambda: rest.list_training_runs().result(),
            "list_checkpoints": lambda: rest.list_checkpoints(trainer.model_id).result(),
            "list_user_checkpoints": lambda: rest.list_user_checkpoints().result(),
            "publish_checkpoint_from_tinker_path": lambda: rest.publish_checkpoint_from_tinker_path(
                saved
            ).result(),
            "unpublish_checkpoint_from_tinker_path": lambda: (
                rest.unpublish_checkpoint_from_tinker_path(saved).result()
            ),
            "set_checkpoint_ttl_from_tinker_path": lambda: rest.set_checkpoint_ttl_from_tinker_path(
                saved, 3600
            ).result(),
            "get_session": lambda: rest.get_session(session).result(),
            "list_sessions": lambda: rest.list_sessions().result(),
            "get_sampler": lambda: rest.get_sampler(f"{session}:sample:0").result(),
            "get_telemetry": rest.get_telemetry,
            "delete_checkpoint": lambda: rest.delete_checkpoint(
                trainer.model_id, "weights/one"
            ).result(),
            "delete_checkpoint_from_tinker_path": lambda: rest.delete_checkpoint_from_tinker_path(
                path
            ).result(),
            "get_external_weights_urls": lambda: rest.get_external_weights_urls(external).result(),
            "copy_weights": lambda: rest.copy_weights(saved).result(),
            "get_audit_log": lambda: rest.get_audit_log().result(),
            "assign_session_project": lambda: rest.assign_session_project(session, "p").result(),
            "export_session_trace": lambda: rest.export_session_trace(session).result(),
            "whoami": lambda: rest.whoami().result(),
            "get_billing_usage": lambda: rest.get_billing_usage(
                "2026-01-01", "2026-02-01"
            ).result(),
            "get_current_checkpoint_storage_usage": lambda: (
                rest.get_current_checkpoint_storage_usage().result()
            ),
            "search_sessions": lambda: rest.search_sessions(types.SessionSearchRequest()).result(),
        },
    }
    wrong = []
    for client, (works, refused) in documented().items():
        assert set(calls[client]) == works | refused
        for name, call in calls[client].items():
            try:
                call()
            except Exception as error:
                said = str(error)
                if name in works or ("here" not in said and name not in "get_audit_log whoami"):
                    wrong.append(f"{client}.{name}: {said}")
            else:
                wrong += [f"{client}.{name} is not refused"] if name in refused else []
    service.close("success")
    assert not wrong, "\n".join(wrong)
