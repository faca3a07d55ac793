"""Parts of a benchmark side by side, each in a process of its own, for a bounded time: what was
done until then, or until Ctrl-C, is the result.
"""

from __future__ import annotations

import json
import multiprocessing
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ENDING_S = 30.0
"""For what a part has begun when the time is up, and again for taking its servers down."""
Part = Callable[[list[Any], float], Iterable[dict[str, Any]]]
"""Does these items in turn, and begins none after a moment of `time.monotonic`; a line for each."""


def side_by_side(
    part: Part, items: Sequence[Any], jobs: int, seconds: float
) -> list[dict[str, Any]]:
    """The lines of all parts in the order in which they were written; of a part that failed, or did
    not end, one with `error`.
    """
    deadline = time.monotonic() + seconds
    spawn = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(prefix="side-by-side-") as directory:
        log = Path(directory) / "lines"
        log.touch()
        processes = [
            spawn.Process(target=_run, args=(part, list(items[number::jobs]), deadline, log))
            for number in range(min(jobs, len(items)))
        ]
        for process in processes:
            process.start()
        interrupted = threading.Event()  # `timeout` interrupts twice
        signals = (signal.SIGINT, signal.SIGTERM)
        before = [signal.signal(number, lambda *_: interrupted.set()) for number in signals]
        while late := [process for process in processes if process.is_alive()]:
            if interrupted.is_set() or time.monotonic() > deadline + ENDING_S:
                break
            late[0].join(0.2)
        for process in late:
            process.terminate()
        end = time.monotonic() + ENDING_S
        for process in late:
            process.join(max(0.0, end - time.monotonic()))
        lines = [json.loads(line) for line in log.read_text().splitlines()]
        for process in late:
            if process.is_alive():
                process.kill()
                lines.append({"error": f"{process.name} did not end in {2 * ENDING_S:.0f} s"})
        for number, handler in zip(signals, before, strict=True):
            signal.signal(number, handler)
        return lines


def _end(*_: object) -> None:
    """Once: the group may have been signalled as well, and what runs is taken down meanwhile."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _run(part: Part, items: list[Any], deadline: float, log: Path) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's affair: it ends this process
    signal.signal(signal.SIGTERM, _end)
    with log.open("a", encoding="utf-8") as file, suppress(KeyboardInterrupt):
        try:
            for line in part(items, deadline):
                file.write(json.dumps(line) + "\n")
                file.flush()
        except Exception as error:
            traceback.print_exc()
            file.write(json.dumps({"error": repr(error)[:500]}) + "\n")
