"""All figures of pushes on one GPU machine: starts fleets side by side, measures one by one.

    python -m benchmarks.push_matrix --out DIR                    what the GPUs allow
    python -m benchmarks.push_matrix --out DIR --only ipc-1,tp2   some of it
    python -m benchmarks.push_matrix --out DIR --deadline-s 480   what can be done until then
    python -m benchmarks.push_matrix --checkpoints                write the checkpoints beforehand
    python -m benchmarks.push_matrix --out DIR --only ipc-1,ipc-1-cold,nccl-1,nccl-1-cold
                          a first push that was rehearsed and one that was not; serving, bounded

Checkpoints lie in /dev/shm. Servers have CUDA graphs, without torch.compile, which would take
longer to start than all pushes together. Each figure is one run of `benchmarks.push`. Prints a
table last; a figure that fails does not keep the others from being measured.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.checkpoints import INDEX, two_checkpoints
from benchmarks.push import RESULTS

SCRATCH = Path("/dev/shm/skyctl-bench")
GIB = 1 << 30
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 16]}
UP_TIMEOUT_S = 240
PUSH_TIMEOUT_S = 200
WRITE_TIMEOUT_S = 150


@dataclass(frozen=True)
class Figure:
    """One figure. `wave`: those of a wave are up at the same time. `gpus` are the servers',
    `reference` those of the server that is started on the second checkpoint, unless another figure
    (`same_as`) has one that answers alike; the first GPU where there are no more. `alone`: those
    measured before are taken down first."""

    name: str
    wave: int
    transport: str
    shape: str
    gpus: tuple[int, ...]
    reference: tuple[int, ...]
    tensor_parallel_size: int = 1
    args: dict[str, Any] = field(default_factory=dict, compare=False)
    differing: int = 0
    options: tuple[str, ...] = ()
    kv_gib: int = 3
    same_as: str = ""
    alone: bool = False


_FOUR = (0, 1, 2, 3)
_FP8 = {"quantization": "fp8"}
_EXPERTS = {"enable-expert-parallel": True}
_SERVING = ("--serving", "--stage-rates", "8GB", "4GB")
_COLD = ("--warm", "false", "--runs", "2", "--warmups", "1")
FIGURES = (
    Figure("ipc-1", 1, "ipc", "qwen3-8b", (0,), (0,), options=_SERVING),
    Figure("nccl-1", 1, "nccl", "qwen3-8b", (0,), (), options=_SERVING, same_as="ipc-1"),
    Figure("ipc-2-tp2", 1, "ipc", "qwen3-8b", (0, 1), (0, 1), 2),
    Figure(
        *("ipc-1-moe61", 1, "ipc", "qwen3-30b-a3b", (1,), ()),
        differing=2,
        kv_gib=32,
        alone=True,
    ),
    Figure("ipc-1-moe31", 2, "ipc", "qwen3-30b-a3b-24", (0,), (1,)),
    Figure("nccl-1-moe31", 2, "nccl", "qwen3-30b-a3b-24", (1,), (), same_as="ipc-1-moe31"),
    Figure("ipc-2-ep2", 2, "ipc", "qwen3-30b-a3b-24", (0, 1), (0, 1), 2, args=_EXPERTS),
    Figure("ipc-1-fp8", 2, "ipc", "qwen3-8b", (0,), (1,), args=_FP8),
    Figure("ipc-1-cold", 3, "ipc", "qwen3-8b", (0,), (), options=_COLD, same_as="ipc-1"),
    Figure("nccl-1-cold", 3, "nccl", "qwen3-8b", (0,), (), options=_COLD, same_as="ipc-1"),
    Figure("ipc-4", 4, "ipc", "qwen3-8b", _FOUR, _FOUR, options=("--servers", "4")),
    Figure("ipc-4-tp4", 4, "ipc", "qwen3-8b", _FOUR, _FOUR, 4),
    Figure(
        *("nccl-3", 5, "nccl", "qwen3-8b", (0, 1, 2), ()),
        options=("--servers", "3"),
        same_as="ipc-4",
    ),
    Figure(
        *("ipc-4-dp2-tp2", 5, "ipc", "qwen3-30b-a3b-24", _FOUR, _FOUR, 2),
        args={**_EXPERTS, "data-parallel-size": 2},
    ),
)


class Suite:
    """One run of the figures. `log` takes what the benchmarks print."""

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._began = time.monotonic()
        self._log = (options.out / "push-matrix.log").open("a", buffering=1)
        self.rows: dict[str, str] = {}

    def left_s(self) -> float:
        return float(self._options.deadline_s) - (time.monotonic() - self._began)

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:5.0f} s  {text}", flush=True)

    def run(self, figure: Figure, phase: str, timeout_s: float) -> bool:
        """One phase of a figure; False when it failed."""
        arguments = {
            "max-num-seqs": 32,
            "kv-cache-memory-bytes": figure.kv_gib * GIB,
            "compilation-config": GRAPHS,
            **figure.args,
        }
        command = [
            *(sys.executable, "-m", "benchmarks.push", "--phase", phase, "--name", figure.name),
            *("--transport", figure.transport, "--shape", figure.shape, "--share-gpus"),
            *("--gpus", *map(str, figure.gpus), "--cuda-graphs", "--args", json.dumps(arguments)),
            *("--tensor-parallel-size", str(figure.tensor_parallel_size)),
            *("--runs", str(self._options.runs), "--warmups", str(self._options.warmups)),
            *("--out", str(self._options.out), "--scratch", str(SCRATCH), *figure.options),
            *("--differing", str(figure.differing), "--memory", "0.08"),
        ]
        if figure.same_as:
            command += ["--answers", str(SCRATCH / f"fleet-{figure.same_as}" / "answers.json")]
        if figure.reference and phase == "up":
            command += ["--reference", *map(str, figure.reference)]
        command += ["--native-runs", str(self._options.native_runs)]
        try:
            done = subprocess.run(
                command,
                text=True,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            )
            text, failed = done.stdout, done.returncode != 0
        except subprocess.TimeoutExpired as late:
            out = late.stdout or b""
            text, failed = out.decode() if isinstance(out, bytes) else out, True
        self._log.write(f"==== {figure.name} {phase}\n{text}\n")
        if failed:
            self.rows[figure.name] = f"{phase} failed: {' | '.join(text.splitlines()[-3:])[-300:]}"
            self.say(f"{figure.name}: {self.rows[figure.name]}")
        return not failed

    def wave(self, figures: list[Figure]) -> None:
        """Start them all, then measure them one after the other."""
        limit_s = min(UP_TIMEOUT_S, self.left_s())

        def start(figure: Figure) -> bool:
            write_checkpoints(figure)
            return self.run(figure, "up", limit_s)

        with ThreadPoolExecutor(len(figures)) as pool:
            up = dict(zip(figures, pool.map(start, figures), strict=True))
        self.say("up: " + " ".join(figure.name for figure in figures if up[figure]))
        measured: list[Figure] = []
        for figure in figures:
            if figure.alone:
                self.down(measured)
                measured = []
            if self.left_s() < 15:
                self.rows.setdefault(figure.name, "not run: no time left")
            elif up[figure] and self.run(figure, "push", min(PUSH_TIMEOUT_S, self.left_s())):
                found = json.loads((self._options.out / f"{figure.name}.json").read_text())
                self.rows[figure.name] = row(found)
                self.say(f"{figure.name}: {self.rows[figure.name]}")
            measured.append(figure)
        self.down(measured)

    def down(self, figures: list[Figure]) -> None:
        """Take their fleets down, all at once."""
        with ThreadPoolExecutor(max(1, len(figures))) as pool:
            list(pool.map(lambda figure: self.run(figure, "down", 60), figures))


_WRITING = Lock()


def write_checkpoints(figure: Figure) -> None:
    """Write those of a figure, one figure's after another's, unless `--checkpoints` is at it."""
    second = SCRATCH / f"{figure.shape}-2" / INDEX
    deadline = time.monotonic() + WRITE_TIMEOUT_S
    while (SCRATCH / "writing").exists() and not second.exists() and time.monotonic() < deadline:
        time.sleep(0.5)
    with _WRITING:
        two_checkpoints(SCRATCH, figure.shape, differing=figure.differing)


def row(found: dict[str, Any]) -> str:
    """A figure in one line."""
    stages = " ".join(f"{name} {value:.3f}" for name, value in found["stages_s"].items() if value)
    return (
        f"whole {found['median_s']:.3f} ({min(found['runs_s']):.3f} to {max(found['runs_s']):.3f})"
        f" frozen {found['freeze_window_s']:.3f} ({min(found['freeze_windows_s']):.3f} to "
        f"{max(found['freeze_windows_s']):.3f}) command {found['command_wall_s']:.2f} first "
        f"{found['first_push_s']:.2f} native {found['native_median_s']} copied "
        f"{found['layout_share']:.0%} serving {found['serving_ratio']} bounded "
        f"{found['serving_ratio_limited']} warm {found['warm']}; {stages}"
    )


def main() -> None:
    import torch

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--checkpoints", action="store_true", help="write these, and nothing else")
    parser.add_argument("--only", default="", help="names, separated by commas")
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--warmups", type=int, default=3)
    parser.add_argument("--native-runs", type=int, default=0, help="of vLLM's own sender, too")
    parser.add_argument("--deadline-s", type=float, default=1e9)
    options = parser.parse_args()
    options.out.mkdir(parents=True, exist_ok=True)
    wanted = set(filter(None, options.only.split(",")))
    found = torch.cuda.device_count()
    if options.checkpoints:
        SCRATCH.mkdir(parents=True, exist_ok=True)
        (SCRATCH / "writing").touch()
        for figure in FIGURES:
            if not wanted or figure.name in wanted:
                began = time.monotonic()
                two_checkpoints(SCRATCH, figure.shape, differing=figure.differing)
                print(f"{figure.shape}: {time.monotonic() - began:.0f} s", flush=True)
        (SCRATCH / "writing").unlink()
        return
    suite = Suite(options)
    for wave in sorted({figure.wave for figure in FIGURES}):
        figures = [
            figure if max(figure.reference, default=0) < found else replace(figure, reference=(0,))
            for figure in FIGURES
            if figure.wave == wave
            and (not wanted or figure.name in wanted)
            and max(figure.gpus) < found
            and (figure.transport != "nccl" or found > len(figure.gpus))
        ]
        if figures and suite.left_s() > 90:
            suite.wave(figures)
    print("\n==== pushes ====")
    for name, text in suite.rows.items():
        print(f"{name}: {text}")


if __name__ == "__main__":
    main()
