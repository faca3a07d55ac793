"""Sample requests of the SDK, as vLLM is asked them, and its answers as the SDK reads them."""

from __future__ import annotations

import array
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyctl.errors import ServerError
from skyctl.tinker import wire
from skyctl.tinker.offers import INSTEAD
from skyctl.tinker.training_process import Refused

MOST_TOP, MOST_TOP_PROMPT = 20, 1024
MOST_STOPS = 4
_LARGEST_SEED = 2**63 - 1


class Unanswerable(Refused):
    """The request cannot be answered here; the text is for the client."""

    def __init__(self, message: str) -> None:
        super().__init__(message, "user")


@dataclass(frozen=True)
class Question:
    """One `asample`, checked."""

    tokens: tuple[int, ...]
    """The prompt."""
    samples: int
    """The number of sequences to generate."""
    max_tokens: int | None
    """The most tokens to generate; None: as many as fit."""
    seed: int | None
    """Seed of the samples; None: any."""
    stop: list[str] | list[int] | None
    """Stop texts or stop token ids; None: the model's own end; []: never."""
    temperature: float
    """Sampling temperature; 0 is greedy."""
    top_k: int
    """Sample from this many tokens; -1: all."""
    top_p: float
    """Sample from tokens of this cumulative probability."""
    top_sampled: int
    """Number of most likely tokens to return per generated token."""
    prompt_logprobs: bool
    """Whether to return the prompt's log probabilities."""
    top_prompt: int
    """Number of most likely tokens to return per prompt token."""
    last: int | None
    """Return only this many rows about the prompt; None: all."""
    targets: dict[str, Any] | None
    """Token ids whose log probabilities to return, as the SDK's JSON of a tensor."""


def question(body: Mapping[str, Any]) -> Question:
    """Parse an asample body.

    Raises:
        Unanswerable: it is not offered, or makes no sense.
    """
    if body.get("prompt_alt_tokens_k"):
        raise Unanswerable("prompt_alt_tokens_k is not offered here")
    if body.get("record_stability_info"):
        raise Unanswerable(f"record_stability_info is not offered here: {INSTEAD}")
    tokens: list[int] = []
    for chunk in (body.get("prompt") or {}).get("chunks") or []:
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise Unanswerable("images and audio are not offered here: text tokens only")
        tokens += [int(token) for token in chunk["tokens"]]
    if not tokens:
        raise Unanswerable("the prompt has no tokens")
    if min(tokens) < 0:
        raise Unanswerable("the prompt has negative tokens")
    params = body.get("sampling_params") or {}
    stop = params.get("stop")
    samples, top = int(body.get("num_samples") or 1), int(body.get("topk_sample_logprobs") or 0)
    if not 1 <= samples <= 1024:
        raise Unanswerable(f"num_samples {samples} is not offered: 1 to 1024")
    top_prompt = max(0, int(body.get("topk_prompt_logprobs") or 0))
    if top > MOST_TOP or top_prompt > MOST_TOP_PROMPT:
        raise Unanswerable(
            f"at most {MOST_TOP} top logprobs are offered, and {MOST_TOP_PROMPT} of a prompt"
        )
    if isinstance(stop, list) and len(stop) > MOST_STOPS and isinstance(stop[0], str):
        raise Unanswerable(
            f"at most {MOST_STOPS} stop strings are offered; stop tokens: any number"
        )
    last, most = body.get("prompt_logprobs_last_n"), params.get("max_tokens")
    if last is not None and not 1 <= last < len(tokens):
        raise Unanswerable("prompt_logprobs_last_n must be from 1 to the prompt's length − 1")
    for name in ("temperature", "top_p"):
        if not math.isfinite(float(params.get(name, 1.0))):
            raise Unanswerable(f"{name} is not finite")
    return Question(
        tokens=tuple(tokens),
        samples=samples,
        max_tokens=None if most is None else int(most),
        seed=None if (seed := params.get("seed")) is None else int(seed),
        stop=[stop] if isinstance(stop, str) else stop,
        temperature=float(params.get("temperature", 1.0)),
        top_k=int(params.get("top_k", -1)),
        top_p=float(params.get("top_p", 1.0)),
        top_sampled=top,
        prompt_logprobs=bool(body.get("prompt_logprobs")),
        top_prompt=top_prompt,
        last=last,
        targets=body.get("target_prompt_logprobs"),
    )


def completion_body(sample: Question, model: str, context: int) -> dict[str, Any]:
    """The /v1/completions body. Constraints of vLLM 0.32: n > 1 is refused with temperature 0, a
    seed has 63 bits, and stop texts must be part of the text if tokens are to match it.

    Raises:
        Unanswerable: the prompt leaves no room for a token.
    """
    room = context - len(sample.tokens)
    if room < 1:
        raise Unanswerable(
            f"the prompt has {len(sample.tokens)} tokens; the model takes {context} in all"
        )
    body: dict[str, Any] = {
        "model": model,
        "prompt": list(sample.tokens),
        "n": 1 if sample.temperature == 0 else sample.samples,
        "max_tokens": room if sample.max_tokens is None else min(sample.max_tokens, room),
        "temperature": sample.temperature,
        "top_k": sample.top_k,
        "top_p": sample.top_p,
        "logprobs": sample.top_sampled,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }
    if sample.seed is not None:
        body["seed"] = sample.seed % _LARGEST_SEED
    if sample.stop is None:
        return body
    if not sample.stop:
        body["ignore_eos"] = True
    elif isinstance(sample.stop[0], int):
        body["stop_token_ids"] = sample.stop
    else:
        body |= {"stop": sample.stop, "include_stop_str_in_output": True}
    return body


def sample_response(sample: Question, answer: Mapping[str, Any], about_prompt: bytes) -> bytes:
    """A serialized SampleResponse of vLLM's answer; `about_prompt` is one too, merged into it."""
    message = wire.message("SampleResponse").FromString(about_prompt)
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    if len(choices) == 1:
        choices = choices * sample.samples  # greedy: asked once
    for choice in choices:
        tokens, logprobs = choice["token_ids"], choice["logprobs"]["token_logprobs"]
        if len(tokens) != len(logprobs):
            raise ServerError(f"{len(tokens)} tokens came with {len(logprobs)} logprobs")
        stopped = choice["finish_reason"] == "stop"
        sequence = message.sequences.add(stop_reason=wire.STOP if stopped else wire.LENGTH)
        sequence.tokens = array.array("i", tokens).tobytes()
        sequence.logprobs = array.array("f", logprobs).tobytes()
        if sample.top_sampled:
            _add_top(sequence.topk_sampled_logprobs, choice["logprobs"], sample.top_sampled)
    usage = answer.get("usage") or {}
    details = usage.get("prompt_tokens_details") or {}
    message.prompt_cache_hit_tokens = details.get("cached_tokens") or 0
    return bytes(message.SerializeToString())


def _add_top(message: Any, logprobs: Mapping[str, Any], k: int) -> None:
    ids, values = array.array("i"), array.array("f")
    for row in logprobs["top_logprobs"]:
        best = sorted(row.items(), key=lambda pair: -pair[1])[:k]
        best += [("token_id:0", -99999.0)] * (k - len(best))
        ids.extend(int(token.rsplit(":", 1)[-1]) for token, _ in best)
        values.extend(value for _, value in best)
    message.token_ids, message.logprobs = ids.tobytes(), values.tobytes()
    message.k, message.length = k, len(logprobs["top_logprobs"])
