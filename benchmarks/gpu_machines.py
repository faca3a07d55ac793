"""A push whose senders run on two machines at once, beside one into one of them alone.

    python -m benchmarks.gpu_machines                      two GPUs, a sender beside each server
    python -m benchmarks.gpu_machines --readers one        one of the senders reads for both
    python -m benchmarks.gpu_machines --transport nccl     a sender here, a server on a machine
    python -m benchmarks.gpu_machines --launcher ray       the machines are nodes of a Ray cluster
    python -m benchmarks.gpu_machines --transport shm --shape qwen3-4-layers     without GPUs

Both machines are this one: ssh is a script that runs commands here, and Ray's nodes are started
here, with a home, an address and a GPU of each machine's own. So the senders share processors and
memory, which those of two machines do not. For NCCL, a fleet of `launcher: local` is what the other
one is compared with; `--apart` lets NCCL take the server's machine for another one, so that it goes
by sockets.

Two fleets start side by side, each on one of two checkpoints: every answer after a push is compared
with those of the servers that were started on what was pushed. Then one after the other is
measured. Writes one JSON object to --out (default benchmarks/results/).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import site
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.checkpoints import SHAPES, two_checkpoints
from benchmarks.push import (
    RESULTS,
    Fleet,
    answer,
    control_token,
    figures,
    save,
    skyctl_pushes,
    taken_on_gpus,
)
from benchmarks.push_matrix import GIB, GRAPHS
from tests.faults.ray_fleet import RayCluster, running_cluster
from tests.faults.remote_fleet import ADDRESSES
from tests.faults.ssh_fleet import write_ssh

GOAL = 1.2
CPU = "shm"
ON_GPUS = {"gpu-memory-utilization": 0.08, "kv-cache-memory-bytes": 3 * GIB}


@dataclass(frozen=True)
class Case:
    """A fleet of one server on each of its machines; without any, of one on this machine."""

    name: str
    machines: tuple[str, ...]


def cases(transport: str, launcher: str) -> tuple[Case, Case]:
    """What is measured, and what it is compared with."""
    if transport == "nccl":
        return Case(f"over {launcher}", ADDRESSES[:1]), Case("local", ())
    return Case("two machines", ADDRESSES), Case("one of them", ADDRESSES[:1])


def settings(options: argparse.Namespace, case: Case, model: Path) -> dict[str, Any]:
    """The fleet file of a case; where its machines are is written by `made`."""
    on_gpus = options.transport != CPU
    arguments: dict[str, Any] = {
        "max-model-len": 2048,
        "max-num-seqs": 16,
        **(ON_GPUS if on_gpus else {}),
    }
    if options.eager:
        arguments["enforce-eager"] = True
    else:
        arguments["compilation-config"] = GRAPHS
    found: dict[str, Any] = {
        "name": "bench",
        "model": str(model),
        "served_model_name": "bench",
        "replicas": len(case.machines) or 1,
        "device": "cuda" if on_gpus else "cpu",
        "share_gpus": on_gpus,  # by the other fleet
        "args": arguments,
        "weight_transfer": {
            "transport": options.transport,
            "chunk_size": options.chunk_size,
            "readers": options.readers,
            "warm": False,  # no rehearsal of one fleet while the other is measured
        },
        "router": {"enabled": False},
    }
    return found if case.machines else {**found, "gpus": [0]}


def made(options: argparse.Namespace, cluster: RayCluster | None, case: Case, model: Path) -> Fleet:
    """The fleet of a case, that is started on a checkpoint."""
    directory = options.scratch / "-".join(["machines", options.transport, *case.name.split()])
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    found = settings(options, case, model)
    if case.machines and cluster:
        found["share_gpus"] = False  # Ray lends each GPU of a list, even twice the same
        found["ray"] = {"address": cluster.address, "python": sys.executable}
    elif case.machines:
        environ = environs(options)
        ssh = write_ssh(directory / "ssh", directory / "hosts", environ=environ)
        hosts = [f"me@{address}" for address in case.machines]
        found["ssh"] = {"hosts": hosts, "python": sys.executable, "command": [str(ssh)]}
    if case.machines:
        found["launcher"] = options.launcher
    fleet = Fleet(directory, found)
    if cluster:
        fleet.env["RAY_AUTH_TOKEN_PATH"] = cluster.environ["RAY_AUTH_TOKEN_PATH"]
    if options.transport == "nccl":  # the server's GPU is another machine's: not one of ours
        fleet.env |= {"CUDA_VISIBLE_DEVICES": "1"} if case.machines else {}
    return fleet


def environs(options: argparse.Namespace) -> dict[str, dict[str, str]]:
    """What is set on each machine: it has one GPU, which Ray lends to as many as there are of it in
    the list.
    """
    lent = gpus_of_a_node(options) if options.launcher == "ray" else 1
    return {
        address: {
            "CUDA_VISIBLE_DEVICES": ",".join([str(gpu)] * lent),
            "PYTHONUSERBASE": site.getuserbase(),
            "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
            # what vLLM and Triton compiled is not each machine's own
            "VLLM_CACHE_ROOT": str(Path.home() / ".cache" / "vllm"),
            "TRITON_CACHE_DIR": str(Path.home() / ".triton" / "cache"),
            **({"NCCL_HOSTID": address} if options.apart else {}),
        }
        for gpu, address in enumerate(ADDRESSES)
    }


def gpus_of_a_node(options: argparse.Namespace) -> int:
    """By `ipc` both fleets have a server on the first one; by `nccl` the sender is on the other."""
    return {"ipc": 2, "nccl": 1}.get(options.transport, 0)


def start(fleet: Fleet, model: Path) -> dict[str, list[int]]:
    """Bring a fleet up; what its first server answers, by the checkpoint it was started on."""
    fleet.run("up")
    found = {str(model): answer(fleet.urls[0], control_token(fleet))}
    (fleet.directory / "answers.json").write_text(json.dumps(found))
    return found


def measured(fleet: Fleet, checkpoints: list[Path], options: argparse.Namespace) -> dict[str, Any]:
    """The pushes of one fleet that count, for the result."""
    dry = fleet.data("sync-weights", str(checkpoints[1]), "--dry-run")["job"]["result"]["plan"]
    pushes = skyctl_pushes(fleet, checkpoints, options)[options.warmups :]
    return {"transport": f"{dry['transport']}: {dry['reason']}", **figures(pushes)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--transport", choices=["ipc", "nccl", CPU], default="ipc")
    parser.add_argument("--launcher", choices=["ssh", "ray"], default="ssh")
    parser.add_argument("--readers", choices=["all", "one"], default="all")
    parser.add_argument("--apart", action="store_true", help="NCCL sees two machines")
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3-8b")
    parser.add_argument("--chunk-size", default="1GiB")
    parser.add_argument("--eager", action="store_true", help="without CUDA graphs")
    parser.add_argument("--layout", choices=["auto", "runtime", "checkpoint"], default="auto")
    parser.add_argument("--push-options", default="", help="more options of sync-weights")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--warmups", type=int, default=2)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    options.eager |= options.transport == CPU

    checkpoints = two_checkpoints(options.scratch, options.shape)
    with contextlib.ExitStack() as until_measured:
        cluster = None
        if options.launcher == "ray":
            gpus, environ = gpus_of_a_node(options), environs(options)
            cluster = until_measured.enter_context(running_cluster(gpus=gpus, environs=environ))
        measure(options, cluster, checkpoints)


def measure(
    options: argparse.Namespace, cluster: RayCluster | None, checkpoints: list[Path]
) -> None:
    pair = cases(options.transport, options.launcher)
    fleets = [made(options, cluster, *one) for one in zip(pair, checkpoints, strict=True)]
    options.answers = options.scratch / f"machines-{options.transport}-answers.json"
    try:
        with ThreadPoolExecutor(len(fleets)) as pool:
            started = [*pool.map(start, fleets, checkpoints)]
        known = {checkpoint: tokens for one in started for checkpoint, tokens in one.items()}
        if len({tuple(tokens) for tokens in known.values()}) != len(known):
            raise SystemExit(f"the checkpoints answer alike: {known}")
        options.answers.write_text(json.dumps(known))
        found = {}
        for case, fleet, order in zip(pair, fleets, (checkpoints, checkpoints[::-1]), strict=True):
            print(f"==== {case.name} ====", flush=True)
            found[case.name] = measured(fleet, order, options)
    finally:
        with ThreadPoolExecutor(len(fleets)) as pool:
            list(pool.map(lambda fleet: fleet.run("down", check=False), fleets))

    first, second = (found[case.name] for case in pair)
    ratio = first["median_s"] / second["median_s"]
    kind = "2-machines" if len(pair[0].machines) > 1 else f"over-{options.launcher}"
    on_ray = "-on-ray" if cluster and len(pair[0].machines) > 1 else ""
    save(
        {
            "benchmark": f"{options.transport}-{kind}{on_ray}"
            + ("-apart" if options.apart else "")
            + ("-one-reader" if options.readers == "one" else ""),
            **(taken_on_gpus() if options.transport != CPU else {}),
            **found,
            "ratio": round(ratio, 3),
            "options": f"{options.shape} chunk {options.chunk_size}, layout {options.layout}, "
            f"{options.warmups} warm-ups, {'eager' if options.eager else 'CUDA graphs'}, machines "
            f"simulated on one host {options.push_options}".strip(),
        },
        directory=options.out,
    )
    print(f"{'':<14}{'median s':>10}{'least':>8}{'most':>8}{'frozen s':>10}{'most':>8}")
    for name, of in found.items():
        runs, frozen = of["runs_s"], of["freeze_windows_s"]
        print(f"{name:<14}{of['median_s']:>10.3f}{min(runs):>8.3f}{max(runs):>8.3f}", end="")
        print(f"{of['freeze_window_s']:>10.3f}{max(frozen):>8.3f}")
    print(f"ratio {ratio:.2f}" + (f", goal {GOAL}" if kind == "2-machines" else ""))


if __name__ == "__main__":
    main()
