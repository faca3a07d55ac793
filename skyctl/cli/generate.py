"""`skyctl generate`: prompts through the router, streamed; requests that are cut continue."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TextIO

import typer

from skyctl import output
from skyctl.cli import complete
from skyctl.cli.fleet_calls import in_loop
from skyctl.cli.options import FileOption, FleetOption, JsonOption, seconds
from skyctl.core.registry import select
from skyctl.errors import NotFoundError, SkyctlError, UsageError
from skyctl.units import count_of, format_seconds

if TYPE_CHECKING:
    from skyctl.core.registry import FleetRef
    from skyctl.generate.prompts import GenerationRequest
    from skyctl.generate.requests import GenerationClient, GenerationResult
    from skyctl.service import FleetService

EXPLAIN_AFTER_S = 3.0


# panels of --help
ANSWERS, REQUESTS = "Answers, unless a line of the file sets it", "Requests"


PromptArgument = Annotated[str | None, typer.Argument(metavar="PROMPT", help="One prompt.")]
InputOption = Annotated[
    Path | None, typer.Option("-i", "--input", help="JSONL file of prompts; - reads stdin.")
]
OutputFileOption = Annotated[
    Path | None, typer.Option("-o", "--output", help="File of JSONL results (default: stdout).")
]
ModelOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="An adapter (default: the fleet's model).",
        rich_help_panel=ANSWERS,
    ),
]
ChatOption = Annotated[
    bool,
    typer.Option("--chat", help="Send text prompts as chats.", rich_help_panel=ANSWERS),
]
MaxTokensOption = Annotated[
    int, typer.Option(metavar="N", min=1, help="Tokens per answer.", rich_help_panel=ANSWERS)
]
TemperatureOption = Annotated[
    float | None,
    typer.Option(
        metavar="X",
        min=0.0,
        help="Sampling temperature; 0 is greedy.",
        rich_help_panel=ANSWERS,
    ),
]
AnswersOption = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Answers to each prompt.", rich_help_panel=ANSWERS),
]
IgnoreEosOption = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Continue to --max-tokens past the end-of-text token.",
        rich_help_panel=ANSWERS,
    ),
]
SessionIdOption = Annotated[
    str | None,
    typer.Option(
        metavar="ID",
        help="X-Session-ID: sticky policies keep it on one server.",
        rich_help_panel=REQUESTS,
    ),
]
ServerOption = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Ask this server, not the router.",
        autocompletion=complete.replicas,
        rich_help_panel=REQUESTS,
    ),
]
ConcurrencyOption = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Requests under way at once.", rich_help_panel=REQUESTS),
]
RetriesOption = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=0,
        help="Attempts in a row that bring no token, then give up.",
        rich_help_panel=REQUESTS,
    ),
]
RequestTimeoutOption = Annotated[
    float | None,
    seconds(
        "Deadline of one request with its retries (default: none).",
        least=0.001,
        panel=REQUESTS,
    ),
]


def generate(
    prompt: PromptArgument = None,
    file: FileOption = None,
    fleet: FleetOption = None,
    input: InputOption = None,
    output_file: OutputFileOption = None,
    json: JsonOption = False,
    model: ModelOption = None,
    chat: ChatOption = False,
    max_tokens: MaxTokensOption = 128,
    temperature: TemperatureOption = None,
    n: AnswersOption = 1,
    ignore_eos: IgnoreEosOption = False,
    session_id: SessionIdOption = None,
    server: ServerOption = None,
    concurrency: ConcurrencyOption = 32,
    retries: RetriesOption = 8,
    timeout: RequestTimeoutOption = None,
) -> None:
    """Generate from one prompt, or from a JSONL file of them, in its order.

    A line has "prompt", "messages" or "prompt_token_ids"; "id", "session_id" and "n" are optional
    and every other key is a sampling parameter. Requests frozen by `pause --mode keep` just wait;
    those that an abort or a dead server cut continue with their tokens.

    \b
    skyctl generate "Once upon a time" --temperature 0
    skyctl generate "7 times 6 is" --model math
    skyctl generate -i prompts.jsonl -o answers.jsonl --concurrency 64
    skyctl generate -i prompts.jsonl --n 8 --temperature 1
    """
    from skyctl.generate.requests import failure

    given = {"max_tokens": max_tokens, "n": n, "model": model, "temperature": temperature}
    given |= {"ignore_eos": ignore_eos or None, "session_id": session_id}
    requests = read_requests(prompt, input, given, chat)
    if input and output_file and output_file.resolve() == input.resolve():
        raise UsageError(f"{input} would be overwritten", hint="write to another --output")
    began = time.perf_counter()
    as_text = prompt is not None and len(requests) == 1 and output_file is None
    sending = _Sending(server, concurrency, retries, timeout)
    ref = select(file, fleet)
    results = in_loop(_send(ref, requests, sending, output_file, as_text=as_text, began=began))
    taken_s = time.perf_counter() - began
    output.note(_summary(results, taken_s))
    data = {"results": [result.to_json() for result in results], "seconds": round(taken_s, 3)}
    output.emit(data, error=failure(results))


class _Sending(NamedTuple):
    """How requests are sent."""

    server: str | None
    concurrency: int
    retries: int
    timeout_s: float | None


async def _send(
    ref: FleetRef,
    requests: list[GenerationRequest],
    sending: _Sending,
    output_file: Path | None,
    *,
    as_text: bool,
    began: float,
) -> list[GenerationResult]:
    """Send all requests and print the results: `as_text` as it arrives (of one request), else as
    JSON lines. The deadline counts from `began`.
    """
    from skyctl.generate.requests import GenerationClient, RetryPolicy
    from skyctl.service import connect
    from skyctl.service.endpoint import find_endpoint

    done: list[GenerationResult] = []
    async with connect(ref) as running:
        endpoint = await find_endpoint(running, server=sending.server, timeout_s=sending.timeout_s)
        timeout_s = _remaining_s(sending.timeout_s, began)
        client = GenerationClient(endpoint, retry=RetryPolicy(max_retries=sending.retries))
        async with client, explained(running, lambda: len(done)):
            if as_text:
                [request] = requests
                result = await client.generate_one(request, timeout_s=timeout_s, on_text=output.raw)
                output.raw("\n")
                return [result]
            with results_file(output_file) as sink:
                return await _to_jsonl(client, requests, sending.concurrency, timeout_s, sink, done)


@contextlib.asynccontextmanager
async def explained(running: FleetService, finished: Callable[[], int]) -> AsyncIterator[None]:
    """Print each cause of a wait on stderr, once, while the block runs: without it, waiting for a
    frozen fleet looks like a hang.
    """
    watching = asyncio.create_task(_explain(running, finished))
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _explain(running: FleetService, finished: Callable[[], int]) -> None:
    shown, before, wait_s = set[str](), 0, EXPLAIN_AFTER_S
    while True:
        await asyncio.sleep(wait_s)
        if finished() == before:
            with contextlib.suppress(SkyctlError):
                cause = await why_requests_wait(running)
                if cause and cause not in shown:
                    output.note(cause)
                    shown.add(cause)
        before, wait_s = finished(), min(2 * wait_s, 30.0)


async def why_requests_wait(running: FleetService) -> str:
    """What keeps the fleet from answering, and what to type; "" if it answers."""
    from skyctl.core.status import Health

    status = await running.status()
    if status.health in (Health.HEALTHY, Health.PARTIAL, Health.DEGRADED):
        return ""
    if status.job is not None:
        return (
            f"no answer yet: {status.job} has the servers; follow it: skyctl jobs wait {status.job}"
        )
    reason = next(iter(status.reasons), None)
    if reason is None:
        return f"no answer yet: the fleet is {status.health}"
    by = ""
    if status.health == Health.PAUSED:
        paused = any(row.paused for row in (await running.weights()).servers)
        by = " (by skyctl)" if paused else " (not by skyctl)"
    return f"no answer yet: {reason.message}{by}" + (
        f"; type: {reason.hint}" if reason.hint else ""
    )


def read_requests(
    prompt: str | None, path: Path | None, given: dict[str, Any], chat: bool
) -> list[GenerationRequest]:
    """The one prompt, or every line of the file, with the options that were `given` (not None).

    Raises:
        UsageError: both or neither were given, or a line is wrong.
        NotFoundError: there is no such file.
    """
    from skyctl.generate.prompts import parse_line, parse_lines

    defaults = {key: value for key, value in given.items() if value is not None}
    if (prompt is None) == (path is None):
        raise UsageError("give one prompt or --input FILE", hint='skyctl generate "Hello"')
    if prompt is not None:
        line = json.dumps({"prompt": prompt})
        return parse_line(line, "prompt", number=0, defaults=defaults, chat=chat)
    assert path is not None
    try:
        if str(path) == "-":
            return parse_lines(sys.stdin, "stdin", defaults=defaults, chat=chat)
        with path.open(encoding="utf-8") as lines:
            return parse_lines(lines, str(path), defaults=defaults, chat=chat)
    except FileNotFoundError as error:
        raise NotFoundError(
            f"no such file: {path}", hint="--input is a JSONL file of prompts, or - for stdin"
        ) from error
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}") from error


def _remaining_s(timeout_s: float | None, began: float) -> float | None:
    """The time until a deadline, rounded up to a tenth of a second, as errors show it."""
    if timeout_s is None:
        return None
    tenths = math.ceil((began + timeout_s - time.perf_counter()) * 10)
    return min(max(tenths, 0) / 10, timeout_s)


@contextlib.contextmanager
def results_file(path: Path | None) -> Iterator[TextIO | None]:
    """The file of --output, to be written inside; None without one. It appears once it is complete:
    until then, and after Ctrl-C, results are in a file beside it whose name ends with `.partial`.

    Raises:
        UsageError: it cannot be written.
    """
    if path is None:
        yield None
        return
    target = path.resolve()  # a link stays a link
    aside = target.is_file() or not target.exists()  # else a pipe or a terminal
    partial = target.with_name(f"{target.name}.partial") if aside else target
    try:
        sink = partial.open("w", encoding="utf-8")
        if target.is_file():
            shutil.copymode(target, partial)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from error
    try:
        with sink:
            yield sink
    except BaseException:
        if aside and partial.stat().st_size:
            output.warn(f"results until then: {partial}")
        elif aside:
            partial.unlink()
        raise
    if aside:
        partial.replace(target)


async def _to_jsonl(
    client: GenerationClient,
    requests: list[GenerationRequest],
    concurrency: int,
    timeout_s: float | None,
    sink: TextIO | None,
    done: list[GenerationResult],
) -> list[GenerationResult]:
    """Write results in input order, each as soon as it and all before it are complete; `done` gets
    each when it is.
    """
    results: list[GenerationResult] = []
    total, began = len(requests), time.perf_counter()
    with output.live(
        lambda: output.progress_line(
            len(done), total, _summary(done, time.perf_counter() - began, total)
        ),
        transient=True,
    ):
        stream = client.generate_many(
            requests, concurrency=concurrency, timeout_s=timeout_s, on_done=done.append
        )
        async for result in stream:
            results.append(result)
            line = json.dumps(result.to_json(), ensure_ascii=False) + "\n"
            if sink is None:
                output.raw(line)
            else:
                sink.write(line)
                sink.flush()
    return results


def _summary(results: list[GenerationResult], seconds: float, total: int | None = None) -> str:
    """`6 of 6 requests, 48 tokens in 1.2 s (40 tokens/s), 2 retries`."""
    tokens = sum(len(result.token_ids) for result in results)
    retries = sum(result.retries for result in results)
    finished = sum(not result.error for result in results)
    text = (
        f"{finished} of {count_of(len(results) if total is None else total, 'request')}, "
        f"{count_of(tokens, 'token')} "
        f"in {format_seconds(seconds)} ({tokens / max(seconds, 1e-9):.0f} tokens/s)"
    )
    return f"{text}, {retries} {'retry' if retries == 1 else 'retries'}" if retries else text
