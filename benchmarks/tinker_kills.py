"""Kill the Tinker API or its worker at every moment of a training run, many times.

    python -m benchmarks.tinker_kills --seeds 20             # 21 points, 420 runs, about an hour
    python -m benchmarks.tinker_kills --seeds 1 --points api:optim worker:save
    python -m benchmarks.tinker_kills --ranks 2 --forked     # any rank of the worker dies
    python -m benchmarks.tinker_kills --ranks 2 --rank 0 --forked    # which shard all parameters
    python -m benchmarks.tinker_kills --forked --jobs 32 --seconds 540    # on a large machine

Each run is the unmodified SDK's: eight steps of two `forward_backward`, a checkpoint that is loaded
back and into a second model, a sampler. One process dies by SIGKILL at the named moment, after a
delay that the seed decides, as it does in which step. The losses must be those of an undisturbed
run, to the bit, and the ledger must have every step once. Each job has its own API. The result has
what `--seconds` leaves undone; `--resume` does that. Needs `skyctl-fleet[tinker]` and the SDK.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import platform
import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from tests import forking
from tests.faults.tinker_run import MOMENTS, OF_A_STEP, STEPS, train
from tests.processes.tinker.serving import ServingProcess

RESULTS = Path(__file__).parent / "results" / "tinker-kills.json"
POINTS = tuple(
    f"{victim}:{moment}"
    for victim in ("api", "worker")
    for moment in MOMENTS
    if (victim, moment) != ("api", "create")  # the SDK sends that once, and gives up
)
LONGEST_RUN_S = 30.0
"""After this a job is ended, and its run is undone."""
_LONGEST_DELAY_S = 0.15


def main() -> int:
    """Exit status 1 when a step was lost, done twice or came out otherwise, or time ran out."""
    options = arguments()
    # seed by seed: when time runs out, every point had about as many
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    undone = [(point, seed) for seed in seeds for point in options.points]
    result: dict[str, Any] = {"violations": [], "points": dict.fromkeys(options.points, 0)}
    if options.resume:
        result = json.loads(options.out.read_text())
        options.rank, options.ranks = result["rank"], result["ranks"]
        undone = [(point, seed) for point, seed in result["undone"]]
    result |= {
        "undone": undone,
        "rank": options.rank,
        "ranks": options.ranks,
        "steps": STEPS,
        "jobs": options.jobs,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }
    with tempfile.TemporaryDirectory(prefix="tinker-kills-") as directory:
        if options.jobs > 1 and options.job is None:
            _share(options, result, Path(directory))
        else:
            _sweep(options, result, Path(directory))
    write(options, result)
    found = {"runs": sum(result["points"].values()), "violations": result["violations"]}
    if options.job is None:
        print(json.dumps({**found, "undone": len(result["undone"])}))
    return 1 if result["violations"] or result["undone"] else 0


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tinker_kills")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--points", nargs="*", choices=POINTS, default=POINTS)
    parser.add_argument("--rank", type=int, default=4, help="0: all parameters")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the worker")
    parser.add_argument("--forked", action="store_true", help="start them as tests do, in a second")
    parser.add_argument("--jobs", type=int, default=1, help="runs at the same time")
    parser.add_argument("--job", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--first-port", type=int, default=21_000, help="of as many as jobs")
    parser.add_argument("--seconds", type=float, default=36_000.0, help="start no run after that")
    parser.add_argument("--resume", action="store_true", help="what the result's file has undone")
    parser.add_argument("--out", type=Path, default=RESULTS)
    return parser.parse_args()


def write(options: argparse.Namespace, result: dict[str, Any]) -> None:
    text = json.dumps({"runs": sum(result["points"].values()), **result}, indent=1)
    partial = options.out.with_suffix(".partial")
    partial.write_text(text + "\n")
    partial.replace(options.out)


def _share(options: argparse.Namespace, result: dict[str, Any], directory: Path) -> None:
    """Divide the runs among jobs, each a process, and add what they found."""
    until = time.monotonic() + options.seconds + LONGEST_RUN_S
    results = [directory / f"{number}.json" for number in range(options.jobs)]
    jobs = []
    for number, out in enumerate(results):
        own = {**result, "undone": result["undone"][number :: options.jobs]}
        own |= {"violations": [], "points": dict.fromkeys(result["points"], 0)}
        out.write_text(json.dumps(own))
        words = ["--resume", "--job", str(number), "--out", str(out)]
        jobs.append(
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.tinker_kills", *sys.argv[1:], *words],
                env={**os.environ, "TMPDIR": str(directory)},
                start_new_session=True,
            )
        )
    try:
        for job in jobs:
            with suppress(subprocess.TimeoutExpired):
                job.wait(max(0.0, until - time.monotonic()))
    finally:
        for job in jobs:
            with suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
            job.wait()
    found = [json.loads(out.read_text()) for out in results]
    result["undone"] = [run for own in found for run in own["undone"]]
    result["violations"] += [text for own in found for text in own["violations"]]
    undisturbed = {str(own.get("undisturbed")) for own in found if "undisturbed" in own}
    if len(undisturbed) > 1:
        result["violations"].append(f"undisturbed runs differ: {undisturbed}")
    for point in result["points"]:
        result["points"][point] += sum(own["points"][point] for own in found)


def _sweep(options: argparse.Namespace, result: dict[str, Any], directory: Path) -> None:
    """Do the runs by one API, and write the result after each."""
    until = time.monotonic() + options.seconds
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")  # the SDK says of `load_state` that it will go
    logging.disable(logging.WARNING)
    faulthandler.register(signal.SIGUSR1)  # tells where a run is
    if options.forked:
        forking.use()
    serving = ServingProcess(
        directory / "d",
        make_tiny_checkpoint(directory / "tiny", seed=1),
        port=options.first_port + (options.job or 0),
        forked=options.forked,
        ranks=options.ranks,
        snapshot_steps=3,
        snapshot_share=1.0,
    )
    serving.start()
    try:
        undisturbed = train(serving, options.rank, lambda moment, step: None)
        if options.job is not None:
            result["undisturbed"] = undisturbed
        for point, seed in list(result["undone"]):
            if time.monotonic() > until:
                break
            if violation := _run(serving, options.rank, point, seed, undisturbed):
                result["violations"].append(f"{point} seed {seed}: {violation}")
                sys.stderr.write(result["violations"][-1] + "\n")
            result["points"][point] += 1
            result["undone"] = result["undone"][1:]
            write(options, result)
    finally:
        serving.kill()


def _run(
    serving: ServingProcess, rank: int, point: str, seed: int, undisturbed: list[float]
) -> str:
    """One run with one kill; what is wrong with it, or ""."""
    victim, at = point.split(":")
    dice = random.Random(f"{point} {seed}")
    where = dice.randrange(STEPS) if at in OF_A_STEP else None
    delay_s = dice.random() * _LONGEST_DELAY_S
    killed: list[int] = []

    def disturb(moment: str, step: int) -> None:
        if moment != at or killed or (where is not None and step != where):
            return
        killed.append(step)
        time.sleep(delay_s)
        if victim == "worker":
            serving.kill_rank(dice.randrange(serving.ranks))
        else:
            serving.kill()
            serving.start()

    try:
        losses = train(serving, rank, disturb)
    except Exception as error:
        return f"the client failed: {error!r}"
    if not killed:
        return "nothing was killed"
    if losses != undisturbed:
        return f"losses {losses} for {undisturbed}"
    with sqlite3.connect(serving.directory / "ledger.sqlite") as ledger:
        [(steps,)] = ledger.execute(
            "SELECT COUNT(*) FROM requests WHERE kind = 'optim_step' AND state IN ('done', 'gone') "
            "AND owner = (SELECT owner FROM requests WHERE kind = 'create_model' "
            "ORDER BY created DESC LIMIT 1)"
        )
    return "" if steps == STEPS else f"{steps} steps on record for {STEPS}"


if __name__ == "__main__":
    sys.exit(main())
