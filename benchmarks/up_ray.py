"""What `up` takes with Ray between: two tiny real servers on the nodes of a Ray cluster, over the
same two without Ray, in one run.

    python -m benchmarks.up_ray [--rounds 3] [--write]

The cluster is a real one on this machine, up before the first round; each of its two nodes gets a
server, at the priority that they have without Ray (`RAY_worker_niceness=0`; Ray's own is 15). The
two ways take turns, and which one is first, too. A round that only warms caches comes before. The
ratio is that of the medians of what the command takes. It wants the machine for itself: what else
runs there slows the one way or the other.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.store.paths import FleetPaths
from skyctl.store.state import FleetState
from tests.faults.ray_fleet import RayCluster, running_cluster
from tests.integration.fleet_cli import UP_TIMEOUT_S, FleetCli
from tests.integration.two_servers import write_two

RESULT = Path(__file__).parent / "results" / "up-ray.json"
GOAL_RATIO = 1.15


def fleets(root: Path, cluster: RayCluster) -> dict[str, FleetCli]:
    """The same fleet, by launcher."""
    model = make_tiny_checkpoint(root / "model", seed=1)
    found = {}
    disk = {"weight_transfer": {"transport": "disk"}}
    ray = {"ray": {"address": cluster.address, "python": sys.executable}}
    for launcher, more in (("local", disk), ("ray", disk | ray)):
        found[launcher] = fleet = FleetCli(root / launcher, root / launcher, cluster.environ)
        fleet.directory.mkdir()
        write_two(fleet, model, launcher=launcher, **more)
    return found


def measured(fleet: FleetCli) -> dict[str, float]:
    """Seconds from the start of `up` to what its supervisor notes first and last."""
    began = time.time()
    try:
        fleet.run("up", timeout_s=UP_TIMEOUT_S)
        ended = time.time()
    finally:
        fleet.run("down", timeout_s=UP_TIMEOUT_S)
    with FleetState(FleetPaths(fleet.home, "two").database) as state:
        noted = [event for event in state.events() if event.at > began and event.at < ended]
    starting = [event.at for event in noted if event.message == "starting"]
    ready = [event.at for event in noted if event.message == "ready"]
    times = {"first_starting_s": min(starting), "servers_ready_s": max(ready), "up_s": ended}
    return {name: round(at - began, 2) for name, at in times.items()}


def measure(rounds: int) -> dict[str, Any]:
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="up-ray-") as root, running_cluster() as cluster:
        compared = fleets(Path(root), cluster)
        for number in range(rounds + 1):
            names = list(compared) if number % 2 else list(reversed(compared))
            row: dict[str, Any] = {name: measured(compared[name]) for name in names}
            row["load_average"] = round(os.getloadavg()[0], 1)
            print(f"{'warms' if number == 0 else number:>5}", row, flush=True)
            found.append(row)
    medians = {
        name: round(statistics.median(row[name]["up_s"] for row in found[1:]), 2)
        for name in compared
    }
    ratio = medians["ray"] / medians["local"]
    brought = importlib.metadata.packages_distributions()
    return {
        "servers": 2,
        "rounds": found[1:],
        "median_s": medians,
        "ratio": round(ratio, 3),
        "goal_ratio": GOAL_RATIO,
        "goal_met": ratio <= GOAL_RATIO,
        "cores": os.cpu_count(),
        "versions": {
            name: importlib.metadata.version(brought[name][0]) for name in ("vllm", "ray")
        },
    }


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.up_ray")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {RESULT.name}")
    options = parser.parse_args()
    result = measure(options.rounds)
    if options.write:
        RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return int(not result["goal_met"])


if __name__ == "__main__":
    sys.exit(main())
