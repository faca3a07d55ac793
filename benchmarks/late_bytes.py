"""What of staging on a GPU makes the first bytes late, when slots were given back before.

    python -m benchmarks.late_bytes [--gb 16 31] [--rounds 10] [--pauses 0 1]

Each round does what a sender does from one push to the next, by its own calls: allocate the slots,
copy to them from pinned memory, 64 MiB at a time, and give them back. The first two copies are
timed one by one. A pause is between giving back and allocating anew. Three cases: nothing else on
the GPU; another process that runs small kernels without end, as a server does; and one that also
maps the slots and reads from them in each round. Prints a table in milliseconds last, and writes
one JSON object to --out (default benchmarks/results/).
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from benchmarks.push import RESULTS, save, taken_on_gpus
from skyctl.transfer.gpu.devices import MirroredSlots
from skyctl.transfer.gpu.reader import copy_to_device

COPY_BYTES = 64 * 1024**2
SLOT_BYTES = 1024**3
PEER_TIMEOUT_S = 60.0
STEPS = ("allocate", "first copy", "second copy", "other copies", "give back")
CASES = ("alone", "beside kernels", "mapped by them")


def peer(pipe: Connection) -> None:
    """Small kernels until told to end; reads from slots that it is shown meanwhile."""
    import torch

    square = torch.ones(1024, 1024, dtype=torch.bfloat16, device="cuda:0")
    product = torch.empty_like(square)
    read = torch.empty(SLOT_BYTES, dtype=torch.uint8, device="cuda:0")
    torch.cuda.synchronize()
    pipe.send("ready")
    while True:
        for _ in range(20):
            torch.mm(square, square, out=product)
        torch.cuda.synchronize()
        if not pipe.poll():
            continue
        shown = pipe.recv()
        if shown is None:
            return
        rebuild, arguments = shown
        slots = rebuild(*arguments)
        for begin in range(0, slots.numel() - SLOT_BYTES + 1, SLOT_BYTES):
            read.copy_(slots[begin : begin + SLOT_BYTES])
        torch.cuda.synchronize()
        del slots
        torch.cuda.ipc_collect()
        pipe.send("read")


def heard(pipe: Connection) -> None:
    """Wait for the other process's next word."""
    if not pipe.poll(PEER_TIMEOUT_S):
        raise SystemExit(f"the other process said nothing for {PEER_TIMEOUT_S:g} s")
    pipe.recv()


@contextmanager
def beside(case: str) -> Iterator[Connection | None]:
    """Run the other process of a case."""
    if case == "alone":
        yield None
        return
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(target=peer, args=(theirs,), daemon=True)
    process.start()
    try:
        heard(ours)
        yield ours
        ours.send(None)
        process.join(PEER_TIMEOUT_S)
    finally:
        process.kill()


class Rounds:
    """Rounds by one pinned buffer and one stream, which outlive them as a sender's do."""

    def __init__(self) -> None:
        import torch

        torch.cuda.set_device(0)
        self._pinned = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        self._stream = torch.cuda.Stream()

    def copy(self, address: int, size: int) -> None:
        """Start a copy to the GPU."""
        copy_to_device(address, self._pinned.data_ptr(), size, self._stream.cuda_stream)

    def run(self, total: int, shows: Connection | None) -> dict[str, float]:
        """Seconds of each step. `shows`: the process that the slots are shown to."""
        from torch.multiprocessing.reductions import reduce_tensor

        sizes = [min(SLOT_BYTES, total - begin) for begin in range(0, total, SLOT_BYTES)]
        times = [time.perf_counter()]
        slots = MirroredSlots([0], sizes)
        times.append(time.perf_counter())
        base = slots.addresses()[0]
        for number in (0, 1):
            self.copy(base + number * COPY_BYTES, COPY_BYTES)
            self._stream.synchronize()
            times.append(time.perf_counter())
        for begin in range(2 * COPY_BYTES, total, COPY_BYTES):
            self.copy(base + begin, min(COPY_BYTES, total - begin))
        self._stream.synchronize()
        times.append(time.perf_counter())
        if shows is not None:
            shows.send(reduce_tensor(slots.buffer(0)))
            heard(shows)
        given_back = time.perf_counter()
        slots.free()
        given_back = time.perf_counter() - given_back
        steps = [after - before for before, after in pairwise(times)]
        return dict(zip(STEPS, [*steps, given_back], strict=True))


def cell(seconds: list[float]) -> str:
    """Least, median and most, in milliseconds."""
    found = (min(seconds), statistics.median(seconds), max(seconds))
    return " ".join(f"{one * 1000:.1f}" for one in found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gb", type=float, nargs="+", default=[16, 31])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--pauses", type=float, nargs="+", default=[0, 1], help="seconds")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=CASES)
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()

    rounds = Rounds()
    rows: list[dict[str, Any]] = []
    for case in options.cases:
        with beside(case) as other:
            shows = other if case == CASES[-1] else None
            for gb in options.gb:
                total = int(gb * 1e9)
                rounds.run(total, shows)  # whatever happens only once
                for pause_s in options.pauses:
                    taken: list[dict[str, float]] = []
                    for _ in range(options.rounds):
                        time.sleep(pause_s)
                        taken.append(rounds.run(total, shows))
                    steps = {step: [round(one[step], 5) for one in taken] for step in STEPS}
                    rows.append({"case": case, "gb": gb, "pause_s": pause_s, "steps_s": steps})
                    print(f"{case}, {gb:g} GB, pause {pause_s:g} s: {steps}", flush=True)

    result = {"benchmark": "late-bytes", **taken_on_gpus(), "copy_bytes": COPY_BYTES, "rows": rows}
    save(result, directory=options.out)
    print("milliseconds: least median most")
    print(f"{'':<16}{'GB':>4}{'pause':>6}" + "".join(f"{step:>24}" for step in STEPS))
    for row in rows:
        print(f"{row['case']:<16}{row['gb']:>4g}{row['pause_s']:>6g}", end="")
        print("".join(f"{cell(row['steps_s'][step]):>24}" for step in STEPS))


if __name__ == "__main__":
    main()
