"""A killed replica whose weights only its sibling has: from its engine's first answer to readiness.

    python -m benchmarks.sibling --gpu 0 1                 # 16.4 GB, after a live push
    python -m benchmarks.sibling --cpu --shape tiny        # the pushed file is removed instead

Starts two servers on one checkpoint, pushes another out of this process's memory, and kills the
second server, --kills times. `admission_s` is the time from the first 200 of its /health to the
event that it is ready: within it the server has taken the fleet's weights, by the `way` that its
events name. Answers of both servers are compared with those of a server that was started on the
pushed checkpoint, and `free_mib` is what the GPUs had free before and after the kills. At last the
tensors are pushed with `keep=True`, and the copy that a server writes is compared with them. Writes
sibling.json to --out, and prints a table last.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

from benchmarks.adapter_memory import TINY_PROMPTS
from benchmarks.checkpoints import SHAPES, two_checkpoints
from benchmarks.cpu_transports import taken_on
from benchmarks.push import (
    PROMPTS,
    RESULTS,
    Fleet,
    answer,
    control_token,
    on_cpu,
    save,
    taken_on_gpus,
    wait_until_warm,
)
from skyctl import Fleet as Api
from skyctl.checkpoints.tiny import make_tiny_checkpoint
from skyctl.launch.local.devices import free_gpu_memory

GIB = 1 << 30
BACK_TIMEOUT_S = 240.0
LABEL, KEPT_LABEL = "in-memory", "kept"
_LOOK_S = 0.02


def checkpoints(options: argparse.Namespace) -> list[Path]:
    if options.shape != "tiny":
        return two_checkpoints(options.scratch, options.shape)
    made = [options.scratch / f"tiny-{seed}" for seed in (1, 2)]
    for seed, checkpoint in enumerate(made, 1):
        if not checkpoint.exists():
            make_tiny_checkpoint(checkpoint, seed=seed)
    return made


def fleet_on(options: argparse.Namespace, model: Path, gpus: list[int], suffix: str = "") -> Fleet:
    content = on_cpu(model, max(len(gpus), 1) if options.gpu else (1 if suffix else 2))
    if options.gpu:
        content |= {"device": "cuda", "gpus": gpus, "share_gpus": True}
        content["args"] |= {"max-num-seqs": 32, "kv-cache-memory-bytes": 2 * GIB}
        content["args"] |= {"gpu-memory-utilization": 0.08}
        content["weight_transfer"] = {"transport": "ipc", "warm": not suffix}
    return Fleet(options.scratch / f"fleet-sibling{suffix}", content)


def reference_answers(options: argparse.Namespace, model: Path, answers: list[list[int]]) -> None:
    """What a server that is started on this checkpoint answers."""
    fleet = fleet_on(options, model, options.gpu[:1], "-reference")
    try:
        fleet.run("up")
        answers.append(answer(fleet.urls[0], control_token(fleet), prompts_of(options)))
    finally:
        fleet.run("down", check=False)


def prompts_of(options: argparse.Namespace) -> tuple[list[int], ...]:
    return TINY_PROMPTS if options.shape == "tiny" else PROMPTS


def free_mib(options: argparse.Namespace) -> dict[int, int]:
    """What each of the servers' GPUs has free."""
    free = free_gpu_memory() if options.gpu else {}
    return {gpu: free[gpu] >> 20 for gpu in options.gpu}


def tensors_of(options: argparse.Namespace, checkpoint: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    device = f"cuda:{options.gpu[0]}" if options.gpu else "cpu"
    shards = sorted(checkpoint.glob("*.safetensors"))
    return {name: t for shard in shards for name, t in load_file(shard, device=device).items()}


async def push(options: argparse.Namespace, tensors: dict[str, Any]) -> dict[str, Any]:
    """Push tensors out of memory; no file has them afterwards."""
    async with Api.named("bench") as api:
        result = await api.sync_weights(tensors, weight_version=LABEL)
    told = result.to_json()
    if not options.gpu:
        for shard in Path(str(result.checkpoint)).glob("*.safetensors"):  # noqa: ASYNC240
            shard.unlink()
    elif told["transport"] != "live":
        raise SystemExit(f"it was pushed by {told['transport']}: {told['notes']}")
    return dict(told)


async def push_kept(tensors: dict[str, Any]) -> dict[str, Any]:
    """Push them again and keep them; compare what a server wrote with them."""
    from safetensors.torch import load_file

    async with Api.named("bench") as api:
        began = time.perf_counter()
        result = await api.sync_weights(tensors, weight_version=KEPT_LABEL, keep=True)
        pushed = time.perf_counter()
        while not (kept := [v for v in await api.kept_weights() if v.kept.version == KEPT_LABEL]):
            if time.perf_counter() - pushed > BACK_TIMEOUT_S:
                raise SystemExit("no copy was kept: see skyctl events")
            await asyncio.sleep(0.2)
        written = time.perf_counter()
    alike = 0
    for file in Path(kept[0].kept.checkpoint).glob("*.safetensors"):  # noqa: ASYNC240
        for name, tensor in load_file(file).items():
            alike += tensor.equal(tensors[name].to("cpu", tensor.dtype))
    return {
        "transport": result.transport,
        "push_s": round(pushed - began, 3),
        "frozen_s": round(result.freeze_window_s, 3),
        "kept_after_s": round(written - pushed, 1),
        "tensors_alike": f"{alike} of {len(tensors)}",
    }


def kept_or_reason(tensors: dict[str, Any]) -> dict[str, Any]:
    """What comes before it is saved all the same."""
    try:
        return asyncio.run(push_kept(tensors))
    except (Exception, SystemExit) as error:
        return {"failed": repr(error)}


def killed(fleet: Fleet, number: int) -> dict[str, Any]:
    """Kill the second server, and wait until it is ready again."""
    victim = fleet.data("status")["replicas"][1]
    began = time.time()
    os.kill(victim["pid"], signal.SIGKILL)
    url, answered_at = fleet.urls[1], 0.0
    gone = False
    while not answered_at:
        if time.time() - began > BACK_TIMEOUT_S:
            raise SystemExit(f"{victim['name']} does not come back")
        try:
            ok = httpx.get(f"{url}/health", timeout=2).status_code == 200
        except httpx.HTTPError:
            ok, gone = False, True
        if ok and gone:
            answered_at = time.time()
        time.sleep(_LOOK_S)
    while (row := fleet.data("status")["replicas"][1])["state"] != "ready":
        if row["state"] == "quarantined" or time.time() - began > BACK_TIMEOUT_S:
            raise SystemExit(f"{row['name']} is {row['state']}: {row['reason']}")
        time.sleep(0.2)
    events = [
        event
        for event in fleet.data("events")["events"]
        if event["at"] >= began and event.get("subject", event.get("source")) == victim["name"]
    ]
    for event in events:
        print(f"  {event['at'] - answered_at:+8.3f} s  {event['message']}", flush=True)
    ready_at = max(event["at"] for event in events if "ready" in event["message"])
    taking = [event["at"] for event in events if "taking" in event["message"]]
    return {
        "kill": number,
        "engine_s": round(answered_at - began, 3),
        "admission_s": round(ready_at - answered_at, 3),
        "taking_s": round(ready_at - min(taking, default=ready_at), 3),
        "way": way_of([event["message"] for event in events]),
    }


def way_of(messages: list[str]) -> str:
    """How the weights came, by a server's events."""
    if any("its workers copied" in message for message in messages):
        return "worker to worker"
    return (
        "a file" if any("taking its weights" in message for message in messages) else "no sibling"
    )


def measure(
    options: argparse.Namespace, fleet: Fleet, expected: list[int], saved: Callable[..., None]
) -> dict[str, Any]:
    first, token = fleet.urls, control_token(fleet)
    if options.gpu:  # servers copy once a rehearsal has shown that they can
        print(f"warm after {wait_until_warm(fleet):.1f} s", flush=True)
    tensors = tensors_of(options, checkpoints(options)[1])
    told = asyncio.run(push(options, tensors))
    prompts = prompts_of(options)
    rows, equal = [], True
    free = {"before": free_mib(options)}
    for number in range(options.kills):
        row = killed(fleet, number)
        answers = [answer(url, token, prompts) for url in first]
        equal &= all(tokens == expected for tokens in answers)
        print(row, "answers", "agree" if equal else f"differ: {answers}, {expected}", flush=True)
        rows.append(row)
    free["after"] = free_mib(options)
    result = {
        "bytes": told["total_bytes"],
        "transport": told["transport"],
        "kills": rows,
        "admission_s": statistics.median(row["admission_s"] for row in rows),
        "free_mib": free,
        "answers_agree": equal,
        "verified": fleet.data("weights", "verify")["agree"],
    }
    saved(result)
    return {**result, "kept": kept_or_reason(tensors)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--gpu", type=int, nargs=2, default=[], help="the servers'")
    where.add_argument("--cpu", action="store_true")
    parser.add_argument("--shape", choices=["tiny", *sorted(SHAPES)], default="qwen3-8b")
    parser.add_argument("--kills", type=int, default=1)
    parser.add_argument("--scratch", type=Path, default=Path("/dev/shm/skyctl-bench"))
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    made = checkpoints(options)
    fleet = fleet_on(options, made[0], options.gpu)
    os.environ["SKYCTL_HOME"] = fleet.env["SKYCTL_HOME"]
    machine = taken_on_gpus() if options.gpu else taken_on()

    def saved(result: dict[str, Any]) -> None:
        save({"benchmark": "sibling", **machine, **result}, directory=options.out)

    answers: list[list[int]] = []
    arguments = (options, made[1], answers)
    starting = threading.Thread(target=reference_answers, args=arguments)
    starting.start()
    try:
        with contextlib.ExitStack() as stack:
            stack.callback(starting.join)
            fleet.run("up")
        if not answers:
            raise SystemExit("no server started on the pushed checkpoint")
        result = measure(options, fleet, answers[0], saved)
    finally:
        fleet.run("down", check=False)
    saved(result)
    print(f"\n{'kill':>4} {'engine':>8} {'admission':>10} {'taking':>8}  seconds, way")
    for row in result["kills"]:
        print(
            f"{row['kill']:>4} {row['engine_s']:>8.1f} {row['admission_s']:>10.3f} "
            f"{row['taking_s']:>8.3f}  {row['way']}"
        )
    print(f"MiB free: {result['free_mib']}")
    print(f"answers agree: {result['answers_agree']}, verified: {result['verified']}")
    print(f"pushed again and kept: {result['kept']}")


if __name__ == "__main__":
    main()
