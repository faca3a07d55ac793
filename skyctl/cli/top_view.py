"""Renders a fleet's sample: once, or as a full screen that fits the terminal."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Group, RenderableType
from rich.text import Text

from skyctl import output
from skyctl.cli.events import event_lines
from skyctl.cli.fleet_view import ROUTED, headline, reason_lines
from skyctl.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from skyctl.monitoring.samples import (
        FleetSample,
        JobSample,
        ReplicaSample,
        RouterSample,
        TinkerSample,
    )

_GAP = 2  # blanks between columns
_FEWEST_EVENTS = 3


@dataclass(frozen=True)
class Column:
    """One column: its heading (`>` aligns right), its cell for a replica, and for all together.

    If the terminal is too narrow, columns with the highest `drop` go first; those with 0 never do.
    """

    head: str
    cell: Callable[[ReplicaSample], Any]
    total: Callable[[Sequence[ReplicaSample]], Any] = lambda replicas: ""
    drop: int = 0


def once_view(sample: FleetSample) -> RenderableType:
    """Everything, each line as long as it needs."""
    parts: list[RenderableType] = [headline(sample.status)]
    if sample.replicas:
        parts += [Text(), *_table(sample, None, len(sample.replicas)), *_below(sample)]
    if sample.events:
        parts += [Text(), *event_lines(sample.events[-5:])]
    return Group(*parts)


def screen_view(sample: FleetSample, failure: str, width: int, height: int) -> RenderableType:
    """One screen of `width` times `height` characters; `failure`: why there is no newer sample."""
    head = headline(sample.status)
    clock = time.strftime("%H:%M:%S", time.localtime(sample.at))
    head.truncate(max(0, width - len(clock) - _GAP), overflow="ellipsis", pad=True)
    head.append(" " * _GAP + clock, style="dim")
    below = _below(sample)
    # at least a few events stay visible below a long table
    room = height - 4 - len(below) - _FEWEST_EVENTS - 2
    body = [*_table(sample, width, max(1, room)), *below]
    events_room = height - 4 - len(body) - 1
    if sample.events and events_room > 0:
        body += [Text(), *event_lines(sample.events[-events_room:])]
    return _page([head, Text()], body, _foot(failure, width), height)


def _page(
    head: Sequence[RenderableType],
    body: Sequence[RenderableType],
    foot: Sequence[RenderableType],
    height: int,
) -> Group:
    blank = height - len(head) - len(body) - len(foot)
    lines = [*head, *body[: height - len(head) - len(foot)], *([Text()] * max(0, blank)), *foot]
    for line in lines:
        if isinstance(line, Text):
            line.no_wrap, line.overflow = True, "ellipsis"
    return Group(*lines)


def _foot(failure: str, width: int) -> list[RenderableType]:
    line = Text(style="on grey15").append(" Ctrl-C", "bold cyan").append(" quit ")
    line.append(f" {failure}", "bold")
    line.append(" " * max(0, width - line.cell_len))
    return [line]


def _below(sample: FleetSample) -> list[RenderableType]:
    """The fronts, the push in progress and what is wrong."""
    lines: list[RenderableType] = []
    if sample.router is not None:
        lines.append(_router_line(sample.router))
    if sample.tinker is not None:
        lines.append(_tinker_line(sample.tinker))
    if lines:
        lines.insert(0, Text())
    if sample.job is not None:
        lines += [Text(), _job_line(sample.job)]
    reasons = reason_lines(sample.status)
    return [*lines, *([Text()] if reasons else []), *reasons]


def _table(sample: FleetSample, width: int | None, room: int) -> list[RenderableType]:
    """Lines of the table: its heading, the first `room` replicas, the sum of all."""
    if not sample.replicas:
        return []
    columns = _columns(sample.replicas)
    shown = sample.replicas[:room]
    cells = [[column.cell(replica) for column in columns] for replica in shown]
    if len(sample.replicas) > 1:
        cells.append([column.total(sample.replicas) for column in columns])
        cells[-1][0] = (
            "all" if len(shown) == len(sample.replicas) else f"all {len(sample.replicas)}"
        )
    texts = [[_text(cell) for cell in row] for row in cells]
    widths = [
        max([len(column.head.lstrip(">")), *(row[i].cell_len for row in texts)])
        for i, column in enumerate(columns)
    ]
    kept = fitting([column.drop for column in columns], widths, width)
    heads = [Text(columns[i].head.lstrip(">"), "bold") for i in kept]
    right = [columns[i].head.startswith(">") for i in kept]
    lines: list[RenderableType] = [_row(heads, [widths[i] for i in kept], right)]
    for index, row in enumerate(texts):
        line = _row([row[i] for i in kept], [widths[i] for i in kept], right)
        if index == len(shown):
            line.stylize("dim")
        lines.append(line)
    return lines


def fitting(drops: Sequence[int], widths: Sequence[int], width: int | None) -> list[int]:
    """Indices of the columns that fit into `width` characters (None: all of them)."""
    kept = list(range(len(drops)))
    while width is not None and sum(widths[i] for i in kept) + _GAP * (len(kept) - 1) > width:
        droppable = [i for i in kept if drops[i]]
        if not droppable:
            break
        kept.remove(max(droppable, key=lambda i: drops[i]))
    return kept


def _row(cells: Sequence[Text], widths: Sequence[int], right: Sequence[bool]) -> Text:
    line = Text()
    for index, (cell, width, to_the_right) in enumerate(zip(cells, widths, right, strict=True)):
        last_of_all = index == len(cells) - 1 and not to_the_right
        blanks = "" if last_of_all else " " * (width - cell.cell_len)
        line.append_text(Text(blanks) + cell if to_the_right else cell + Text(blanks))
        if index < len(cells) - 1:
            line.append(" " * _GAP)
    return line


def _columns(replicas: Sequence[ReplicaSample]) -> list[Column]:
    on_gpus = any(replica.gpus for replica in replicas)
    columns = [
        Column("REPLICA", lambda r: r.status.name),
        Column("STATE", lambda r: output.styled(r.status.state)),
        Column(">FOR", lambda r: _or_none(r.state_s, format_seconds), drop=4),
        Column(
            ">RUN", lambda r: r.status.running, lambda all_: _sum(r.status.running for r in all_)
        ),
        Column(
            ">WAIT", lambda r: r.status.waiting, lambda all_: _sum(r.status.waiting for r in all_)
        ),
        Column(">KV", lambda r: _or_none(r.status.kv_usage, _percent)),
        Column(">HIT", lambda r: _or_none(r.prefix_hit_rate, _percent), drop=5),
        Column(
            ">PROMPT/S",
            lambda r: _or_none(r.prompt_tokens_per_s, _rate),
            lambda all_: _or_none(_sum(r.prompt_tokens_per_s for r in all_), _rate),
        ),
        Column(
            ">GEN/S",
            lambda r: _or_none(r.generation_tokens_per_s, _rate),
            lambda all_: _or_none(_sum(r.generation_tokens_per_s for r in all_), _rate),
        ),
    ]
    if on_gpus:
        columns += [
            Column(">GPU", _gpu_utilization),
            Column(">GPU MEMORY", _gpu_memory, drop=3),
        ]
    if any(replica.status.role for replica in replicas):
        columns.insert(1, Column("ROLE", lambda r: r.status.role, drop=3))
    return [
        *columns,
        Column(">CPU", lambda r: _or_none(r.cpu_percent, _cpu), drop=8 if on_gpus else 1),
        Column(">MEMORY", lambda r: _or_none(r.rss_bytes, format_bytes), drop=9 if on_gpus else 2),
        Column("WEIGHTS", lambda r: r.status.weight_version or "base", drop=6),
        Column("ROUTED", lambda r: ROUTED[r.status.routed], drop=7),
    ]


def _gpu_utilization(replica: ReplicaSample) -> str | None:
    utilizations = [gpu.utilization for gpu in replica.gpus if gpu.utilization is not None]
    return _percent(sum(utilizations) / len(utilizations)) if utilizations else None


def _gpu_memory(replica: ReplicaSample) -> str | None:
    if not replica.gpus:
        return None
    used = sum(gpu.memory_used_bytes for gpu in replica.gpus)
    whole = sum(gpu.memory_bytes for gpu in replica.gpus)
    return f"{used / 1024**3:.1f}/{whole / 1024**3:.0f} GiB"


def _router_line(router: RouterSample) -> Text:
    line = Text.assemble(("router  ", "bold"), output.styled(router.state))
    if router.workers is not None:
        line.append(f" → {router.workers} workers")
    if router.requests is not None:
        rate = _or_none(router.requests_per_s, _rate) or "–"
        line.append(f"   {rate} requests/s   ")
        failing = bool(router.errors_per_s)
        errors = _or_none(router.errors_per_s, _rate) or "–"
        line.append(f"{errors} errors/s", "bold red" if failing else "")
        line.append(
            f"   {router.requests} requests, {router.errors} errors, {router.retries} retries",
            "dim",
        )
    if router.cpu_percent is not None:
        line.append(f"   {_cpu(router.cpu_percent)} CPU", "dim")
    return line


def _tinker_line(tinker: TinkerSample) -> Text:
    line = Text.assemble(("tinker  ", "bold"), output.styled(tinker.state))
    if tinker.cpu_percent is not None:
        line.append(f"   {_cpu(tinker.cpu_percent)} CPU", "dim")
    if tinker.rss_bytes is not None:
        line.append(f"   {format_bytes(tinker.rss_bytes)}", "dim")
    if tinker.operation is not None:
        line.append(f"   {tinker.operation} for {format_seconds(tinker.operation_s or 0.0)}")
    return line


def _job_line(job: JobSample) -> RenderableType:
    size = f"{format_bytes(job.done_bytes)} of {format_bytes(job.total_bytes)}"
    text = f"{job.id} {job.stage}" + (f"  {size}" if job.total_bytes else "")
    text += f"  {format_seconds(job.running_s)}  {job.checkpoint}"
    return output.progress_line(job.done_bytes, job.total_bytes or 1, text)


def _text(cell: Any) -> Text:
    if isinstance(cell, Text):
        return cell.copy()
    return Text("–", "dim") if cell is None else Text(str(cell))


def _or_none(value: Any, shown: Callable[[Any], str]) -> str | None:
    return None if value is None else shown(value)


def _sum(values: Iterable[float | None]) -> float | None:
    """Of those that are known; None if none is."""
    numbers = [value for value in values if value is not None]
    return sum(numbers) if numbers else None


def _percent(share: float) -> str:
    return f"{share:.0%}"


def _cpu(percent: float) -> str:
    return f"{percent:.0f}%"


def _rate(per_second: float) -> str:
    if per_second >= 10_000:
        return f"{per_second / 1000:.1f}k"
    return f"{per_second:.1f}" if 0 < per_second < 100 else f"{per_second:.0f}"
