"""Trial prompts: what new weights must answer before they serve users.

A trial file (YAML or JSON) lists prompts and what is expected of each answer:

    prompts:
      - prompt: The capital of France is
        expect: {contains: Paris}
      - {name: fixed, prompt_token_ids: [9707, 11], max_tokens: 2, expect: {token_ids: [1, 2]}}
      - messages: [{role: user, content: Say yes.}]
        expect: {regex: "(?i)yes", min_logprob: -8}

Generation is greedy unless a prompt says otherwise. Log probabilities must always be finite.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from os import PathLike
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    StringConstraints,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import SchemaError

from skyctl.errors import UsageError

MAX_PROMPTS = 64
_LARGEST_BYTES = 16 << 20
# vLLM reports this where a log probability is -inf or NaN
_NO_LOGPROB = -9999.0
_SHOWN = 60


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class Expectation(_Strict):
    """What an answer must satisfy; every condition given must hold."""

    token_ids: list[int] | None = None
    text: str | None = None
    contains: str | None = None
    regex: str | None = None
    min_logprob: float | None = None

    @field_validator("regex")
    @classmethod
    def _is_a_regex(cls, value: str | None) -> str | None:
        if value is not None:
            try:
                _pattern(value)
            except SchemaError as error:
                reason = str(error).splitlines()[-1].removeprefix("error: ").strip()
                raise ValueError(f"no regular expression: {reason}") from error
        return value

    def conditions(self) -> dict[str, Any]:
        """Only the conditions that were given."""
        return self.model_dump(exclude_none=True)


class TrialPrompt(_Strict):
    """One prompt, as text, token ids or chat messages. `sampling` is passed to vLLM unchanged."""

    name: str = ""
    prompt: str | None = Field(default=None, min_length=1)
    prompt_token_ids: list[int] | None = Field(default=None, min_length=1)
    messages: list[dict[str, Any]] | None = Field(default=None, min_length=1)
    max_tokens: int = Field(default=16, ge=1)
    sampling: dict[str, Any] = {}
    expect: Expectation = Expectation()

    @model_validator(mode="after")
    def _one_prompt(self) -> TrialPrompt:
        given = [self.prompt, self.prompt_token_ids, self.messages]
        if sum(value is not None for value in given) != 1:
            raise ValueError("give one of prompt, prompt_token_ids and messages")
        return self

    @property
    def chat(self) -> bool:
        return self.messages is not None

    def body(self) -> dict[str, Any]:
        """The request body, without the model."""
        body: dict[str, Any] = {"max_tokens": self.max_tokens, "temperature": 0.0, **self.sampling}
        body |= {"stream": False, "n": 1, "return_token_ids": True}
        if self.chat:
            return {**body, "messages": self.messages, "logprobs": True}
        return {**body, "prompt": self.prompt or self.prompt_token_ids, "logprobs": 1}


class Trial(_Strict):
    """All prompts of one push; `timeout_s` applies to each prompt on each server."""

    prompts: list[TrialPrompt] = Field(min_length=1, max_length=MAX_PROMPTS)
    timeout_s: float = Field(default=60.0, gt=0, le=600)

    def name_of(self, number: int) -> str:
        """The prompt's own name, else its position in the file and its first words."""
        prompt = self.prompts[number]
        if prompt.name:
            return prompt.name
        content = (
            prompt.prompt or prompt.prompt_token_ids or (prompt.messages or [{}])[-1].get("content")
        )
        return f"#{number + 1} {_short(content)}"


@dataclass(frozen=True)
class Answer:
    """A server's answer. `logprobs` are those of the generated tokens."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]


@dataclass(frozen=True)
class TrialResult:
    """One prompt on one server."""

    server: str
    """Its name."""
    prompt: str
    """The name of the prompt."""
    ok: bool
    """All conditions hold."""
    expected: dict[str, Any]
    """The conditions."""
    got: dict[str, Any]
    """The answer."""
    problem: str = ""
    """The condition that failed; "" if all hold."""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def read_trial(path: Path) -> dict[str, Any]:
    """Read a trial file as JSON that `parse_trial` accepts; a bare list is taken as its prompts.

    Raises:
        UsageError: it cannot be read, or is not a trial file; names the place.
    """
    try:
        with path.open("rb") as file:
            if len(data := file.read(_LARGEST_BYTES + 1)) > _LARGEST_BYTES:
                raise ValueError("larger than 16 MiB")
        trial = yaml.safe_load(data.decode())
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise UsageError(f"--trial {path}: {' '.join(str(error).split())}") from error
    prompts = {"prompts": trial} if isinstance(trial, list) else trial
    return parse_trial(prompts, str(path)).model_dump(mode="json", exclude_none=True)


def parse_trial(data: Any, where: str = "trial") -> Trial:
    """Raises UsageError unless `data` is a mapping as described at the top of this file."""
    try:
        trial = Trial.model_validate(data)
        json.dumps(trial.model_dump(), ensure_ascii=False, allow_nan=False, default=str).encode()
        return trial
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"]) or "the file"
        raise UsageError(
            f"{where}: {place}: {first['msg'].removeprefix('Value error, ')}",
            hint="such as: prompts: [{prompt: France has the capital, expect: {contains: Paris}}]",
        ) from error
    except ValueError as error:  # no number: on its way it would become none at all
        raise UsageError(f"{where}: it cannot be sent as JSON ({error})") from error


def read_answer(data: Any, *, chat: bool) -> Answer:
    """Read vLLM's answer to a completion or a chat that was not streamed.

    Raises:
        ValueError: it is something else.
    """
    try:
        choice = data["choices"][0]
        text = choice["message"]["content"] if chat else choice["text"]
        return Answer(
            str(text or ""),
            tuple(int(token) for token in choice.get("token_ids") or ()),
            tuple(_logprobs(choice.get("logprobs") or {}, chat=chat)),
        )
    except (TypeError, LookupError, AttributeError) as error:
        raise ValueError(f"it answered {data!r:.100}") from error


def _logprobs(logprobs: Mapping[str, Any], *, chat: bool) -> list[float | None]:
    if chat:
        return [token.get("logprob") for token in logprobs.get("content") or ()]
    return list(logprobs.get("token_logprobs") or ())


def judge(server: str, name: str, expect: Expectation, answer: Answer) -> TrialResult:
    """Check an answer against what is expected. Pure."""
    lowest = min((value for value in answer.logprobs if value is not None), default=None)
    got: dict[str, Any] = {"text": answer.text, "token_ids": list(answer.token_ids)}
    if lowest is not None and math.isfinite(lowest):
        got["min_logprob"] = lowest
    problems = _problems(expect, answer, lowest)
    return TrialResult(server, name, not problems, expect.conditions(), got, "; ".join(problems))


def _problems(expect: Expectation, answer: Answer, lowest: float | None) -> list[str]:
    problems = []
    if not answer.logprobs:
        problems.append("it told no log probabilities")
    elif any(
        value is None or not math.isfinite(value) or value <= _NO_LOGPROB
        for value in answer.logprobs
    ):
        problems.append("a log probability is not finite")
    if expect.token_ids is not None and tuple(expect.token_ids) != answer.token_ids:
        problems.append(f"expected tokens {expect.token_ids}, got {list(answer.token_ids)}")
    if expect.text is not None and expect.text != answer.text:
        problems.append(f"expected the text {_short(expect.text)}, got {_short(answer.text)}")
    if expect.contains is not None and expect.contains not in answer.text:
        problems.append(f"expected {_short(expect.contains)} in it, got {_short(answer.text)}")
    if expect.regex is not None:
        try:
            _pattern(expect.regex).validate_python(answer.text)
        except ValidationError:
            problems.append(f"expected /{expect.regex}/, got {_short(answer.text)}")
    least = expect.min_logprob
    if least is not None and lowest is not None and not lowest >= least:
        problems.append(f"expected log probabilities from {least:g}, got {lowest:.4g}")
    return problems


def _pattern(regex: str) -> TypeAdapter[str]:
    """Matches in linear time, unlike Python's own: the servers are frozen meanwhile.

    Raises:
        SchemaError: it is none of Rust's `regex`, which has no look-around and no back-references.
    """
    return TypeAdapter(Annotated[str, StringConstraints(pattern=regex)])


def failed(results: Sequence[TrialResult]) -> list[TrialResult]:
    return [result for result in results if not result.ok]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 1]}…"


def trial_content(
    given: Mapping[str, Any] | str | PathLike[str] | None,
) -> dict[str, Any] | None:
    """The content of a trial that is given by its content or by the path of its file."""
    if given is None:
        return None
    if isinstance(given, Mapping):
        return parse_trial(given).model_dump(mode="json", exclude_none=True)
    return read_trial(Path(given))
