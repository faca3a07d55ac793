"""Kill the Tinker API or its worker at every moment of a training run, many times.

    python -m benchmarks.tinker_kills --seeds 20             # 21 points, 420 runs, about an hour
    python -m benchmarks.tinker_kills --seeds 1 --points api:optim worker:save
    python -m benchmarks.tinker_kills --ranks 2 --forked     # any rank of the worker dies
    python -m benchmarks.tinker_kills --ranks 2 --rank 0 --forked    # which shard all parameters

Each run is the unmodified SDK's: eight steps of two `forward_backward`, a checkpoint that is loaded
back and into a second model, a sampler. One process dies by SIGKILL at the named moment, after a
delay that the seed decides, as it does in which step. The losses must be those of an undisturbed
run, to the bit, and the ledger must have every step once. Needs `skyctl-fleet[tinker]` and the SDK.
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
import sys
import tempfile
import time
import warnings
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
_LONGEST_DELAY_S = 0.15


def main() -> int:
    """Exit status 1 when a step was lost, done twice or came out otherwise."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.tinker_kills")
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--points", nargs="*", choices=POINTS, default=POINTS)
    parser.add_argument("--rank", type=int, default=4, help="0: all parameters")
    parser.add_argument("--ranks", type=int, default=1, help="processes of the worker")
    parser.add_argument("--forked", action="store_true", help="start them as tests do, in a second")
    parser.add_argument("--minutes", type=float, default=600.0, help="stop after this long")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    os.environ["TINKER_TELEMETRY"] = "0"
    warnings.simplefilter("ignore")  # the SDK says of `load_state` that it will go
    logging.disable(logging.WARNING)
    faulthandler.register(signal.SIGUSR1)  # tells where a run is
    if options.forked:
        forking.use()
    with tempfile.TemporaryDirectory(prefix="tinker-kills-") as directory:
        checkpoint = make_tiny_checkpoint(Path(directory) / "tiny", seed=1)
        serving = ServingProcess(
            Path(directory) / "d",
            checkpoint,
            forked=options.forked,
            ranks=options.ranks,
            snapshot_steps=3,
            snapshot_share=1.0,
        )
        serving.start()
        try:
            result = _sweep(serving, options)
        finally:
            serving.kill()
    options.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps({key: result[key] for key in ("runs", "violations")}))
    return 1 if result["violations"] else 0


def _sweep(serving: ServingProcess, options: argparse.Namespace) -> dict[str, Any]:
    deadline = time.monotonic() + options.minutes * 60
    undisturbed = train(serving, options.rank, lambda moment, step: None)
    done: dict[str, int] = dict.fromkeys(options.points, 0)
    violations: list[str] = []
    # seed by seed: when time runs out, every point had about as many
    for seed in range(options.first_seed, options.first_seed + options.seeds):
        for point in options.points:
            if time.monotonic() > deadline:
                break
            said = _run(serving, options.rank, point, seed, undisturbed)
            done[point] += 1
            if said:
                violations.append(f"{point} seed {seed}: {said}")
                sys.stderr.write(violations[-1] + "\n")
        sys.stderr.write(f"seed {seed}: {sum(done.values())} runs\n")
    return {
        "runs": sum(done.values()),
        "violations": violations,
        "points": done,
        "rank": options.rank,
        "ranks": options.ranks,
        "steps": STEPS,
        "cpus": os.cpu_count(),
        "python": platform.python_version(),
    }


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
