"""LoRA adapters on a server of the fleet `tuned` (`sglang.py`), where SGLang itself loaded the
adapter `own` at its start: what skyctl loads from the same directory must answer as that does.
"""

from __future__ import annotations

import random
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import psutil

from skyctl.adapters.peft import WEIGHTS
from skyctl.checkpoints.header import read_header
from tests.integration.fleet_cli import bearer
from tests.unit.adapters.files import lora, make_adapter

if TYPE_CHECKING:
    from tests.gpu.sglang import SGLangRun

RETURN_TIMEOUT_S = 150.0
TUNED_RIGHT = "tuned-right"
"""The fleet whose server was started on `b`, otherwise like that of `tuned`: SGLang computes
otherwise where it takes LoRA.
"""
_MODULES = ("self_attn.o_proj", "mlp.down_proj")
_PROMPT = [40, 41, 42, 43]


def write_adapters(model: Path, directory: Path) -> tuple[Path, Path]:
    """Two adapters of a checkpoint, which change what it answers."""
    shapes = {
        tensor.name: tensor.shape
        for file in model.glob("*.safetensors")
        for tensor in read_header(file)[1]
    }
    tensors: dict[str, Any] = {}
    for module in (f"model.layers.0.{module}" for module in _MODULES):
        rows, columns = shapes[f"{module}.weight"]
        tensors |= lora(f"base_model.model.{module}", rows=rows, columns=columns)
    listed = [module.rpartition(".")[2] for module in _MODULES]
    x1, x2 = (
        make_adapter(directory / f"x{number}", tensors, target_modules=listed) for number in (1, 2)
    )
    for seed, adapter in enumerate((x1, x2)):
        _fill(adapter / WEIGHTS, random.Random(seed))
    return x1, x2


def _fill(file: Path, chance: random.Random) -> None:
    """Draw its numbers: a product of constant ones turns all hidden states the same way."""
    raw = bytearray(file.read_bytes())
    begin = 8 + int.from_bytes(raw[:8], "little")
    drawn = array("f", (chance.gauss(0, 0.1) for _ in range((len(raw) - begin) // 4)))
    file.write_bytes(raw[:begin] + drawn.tobytes())


def adapters(run: SGLangRun) -> str:
    """Load beside the adapter of the fleet file, replace under a request, unload; then under a
    push, in a pause and over a sleep. Last the server is killed, for `adapters_return`.
    """
    if run.tuned_failed is not None:
        raise run.tuned_failed
    base, own, first = tokens(run, None), tokens(run, "own"), tokens(run, "first")
    assert len({str(answer) for answer in (base, own, first)}) == 3, (base, own, first)
    took = _change(run, "load", "math", str(run.x1))
    assert tokens(run, "math") == own, "other tokens than of what SGLang loaded at its start"
    by_name = {name: _routed(run, name) for name in ("math", "tiny:own", "tiny")}
    assert by_name["math"] == by_name["tiny:own"] != by_name["tiny"], by_name
    settings = {"temperature": 0.0, "max_new_tokens": run.held_tokens, "ignore_eos": True}
    body = {"input_ids": _PROMPT, "lora_path": "math", "sampling_params": settings}
    held = run.held("tuned-0", fleet="tuned", body=body)
    replaced = _change(run, "sync", "math", str(run.x2))
    # of the others, none has the same sums beside a request as alone
    assert tokens(run, "math", flush=False)[:1] == first[:1] and held[0].is_alive()
    assert run.ended(held) == (run.held_tokens, "length")
    assert tokens(run, "math") == first
    assert _names(run) == {"tiny", "own", "first", "math"}
    _change(run, "unload", "first")
    assert _names(run) == {"tiny", "own", "math"}
    assert [_status(run, "first"), _status(run, "nothing"), _status(run, "tiny")] == [404, 404, 200]
    _through_changes(run, base, own, first)
    psutil.Process(_row(run)["pid"]).kill()
    return f"loaded in {took:.0f} ms, replaced under a request in {replaced:.0f} ms"


def _through_changes(
    run: SGLangRun, base: Sequence[int], own: Sequence[int], second: Sequence[int]
) -> None:
    """`math` stays, and so do the base model's answers and those of SGLang's own adapter."""
    command = run.fleets["tuned"].run
    command("pause", "--mode", "keep", timeout_s=60)
    _change(run, "load", "late", str(run.x1))
    command("resume", timeout_s=60)
    assert tokens(run, "late") == own
    command("sleep", timeout_s=90)
    command("wake", timeout_s=90)
    assert [tokens(run, "math"), tokens(run, None)] == [second, base]
    before, right = run.answers("tuned")["tuned-0"], run.answers(TUNED_RIGHT)[f"{TUNED_RIGHT}-0"]
    assert before != right
    command("sync-weights", str(run.b), timeout_s=90)
    pushed = run.answers("tuned")["tuned-0"]
    assert pushed == right, "pushed in part"
    command("sync-weights", str(run.a), timeout_s=90)
    assert [tokens(run, "math"), tokens(run, None), tokens(run, "own")] == [second, base, own]
    run.remembered["math"], run.remembered["late"] = list(second), list(own)


def adapters_return(run: SGLangRun) -> str:
    """The server that was killed is back, with the adapters that it had."""
    if not run.remembered:
        return "not tried: no server was killed"
    began = time.monotonic()
    while _row(run)["state"] != "ready":
        assert time.monotonic() - began < RETURN_TIMEOUT_S, _row(run)
        time.sleep(1)
    assert {name: tokens(run, name) for name in run.remembered} == run.remembered
    assert _names(run) == {"tiny", "own", "math", "late"}
    return f"waited {time.monotonic() - began:.0f} s for it; {', '.join(run.remembered)}"


def tokens(run: SGLangRun, adapter: str | None, *, flush: bool = True) -> list[int]:
    """Greedy tokens by SGLang's own route."""
    (url,) = run.places["tuned"].servers.values()
    if flush:
        _flush(run)
    settings = {"temperature": 0.0, "max_new_tokens": 16, "ignore_eos": True}
    body = {"input_ids": _PROMPT, "sampling_params": settings, "lora_path": adapter}
    answer: list[int] = run.post(url, body)["output_ids"]
    return answer


def _flush(run: SGLangRun) -> None:
    """Empty the prefix cache: behind a cached prefix the same sums are rounded otherwise."""
    place = run.places["tuned"]
    (url,) = place.servers.values()
    done = httpx.post(f"{url}/flush_cache", headers=bearer(place.token), timeout=30)
    assert done.status_code == 200, done.text


def _complete(run: SGLangRun, model: str) -> httpx.Response:
    place = run.places["tuned"]
    (url,) = place.servers.values()
    body = {"model": model, "prompt": _PROMPT, "max_tokens": 16, "temperature": 0.0}
    body |= {"return_token_ids": True}  # text has only those that the small tokenizer knows
    return httpx.post(f"{url}/v1/completions", json=body, headers=bearer(place.key), timeout=60)


def _routed(run: SGLangRun, model: str) -> tuple[list[int] | None, str]:
    """Tokens (None before SGLang 0.5.17) and text by OpenAI's route, which has the adapter's name
    for a model's.
    """
    _flush(run)
    answer = _complete(run, model)
    answer.raise_for_status()
    (choice,) = answer.json()["choices"]
    return choice.get("token_ids"), choice["text"]


def _status(run: SGLangRun, model: str) -> int:
    return _complete(run, model).status_code


def _names(run: SGLangRun) -> set[str]:
    place = run.places["tuned"]
    (url,) = place.servers.values()
    answer = httpx.get(f"{url}/v1/models", headers=bearer(place.key), timeout=30)
    return {model["id"] for model in answer.raise_for_status().json()["data"]}


def _change(run: SGLangRun, *command: str) -> float:
    """Milliseconds that a change took."""
    done = run.fleets["tuned"].data("adapters", *command, timeout_s=90)
    return float(done["elapsed_ms"])


def _row(run: SGLangRun) -> dict[str, Any]:
    (row,) = run.fleets["tuned"].data("status", timeout_s=30)["replicas"]
    found: dict[str, Any] = row
    return found
