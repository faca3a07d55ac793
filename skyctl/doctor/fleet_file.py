"""Checks a fleet file's plan against the machine and the model. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyctl.core.check import Problem
from skyctl.core.plan import FleetPlan
from skyctl.doctor.check_line import CheckLine, Result, error, ok, run_checks, warning
from skyctl.doctor.machine import MachineFacts
from skyctl.engines import ENGINES
from skyctl.fleetfile.sections import RouterSection
from skyctl.fleetfile.values import is_loopback
from skyctl.units import format_bytes

_SLOTS = 2  # chunks that a push has in memory at once, plus one per worker
_BUSY_SHARE = 0.05


@dataclass(frozen=True)
class ModelFacts:
    """The model's checkpoint, by its headers. Sizes in bytes."""

    total_bytes: int
    largest_tensor: str
    largest_tensor_bytes: int


@dataclass(frozen=True)
class FilePlan:
    """What is checked: the plan, its known problems, its model, and whether it runs.

    `model` is None for a model that is not on this disk.
    """

    plan: FleetPlan
    problems: Sequence[Problem]
    model: ModelFacts | None
    running: bool


def check_fleet_file(given: FilePlan, facts: MachineFacts) -> list[CheckLine]:
    """All checks of this section."""
    on_this_machine = all(server.node is None for server in given.plan.servers)
    checks = CHECKS | OF_THIS_MACHINE if on_this_machine else CHECKS
    return run_checks("fleet-file", checks, given, facts)


def plan_problems(given: FilePlan, facts: MachineFacts) -> Iterator[Result]:
    """What `up` would refuse: ports, GPUs, model, interpreter."""
    for problem in given.problems:
        yield error(problem.message, problem.hint)
    if not given.problems:
        number, device = len(given.plan.servers), given.plan.device
        noun = "replica" if number == 1 else "replicas"
        yield ok(f"{number} {noun} of {given.plan.served_model_name} on {device}")


def plan_advice(given: FilePlan, facts: MachineFacts) -> Iterator[Result]:
    """Settings that are allowed but probably a mistake."""
    for advice in given.plan.warnings:
        yield warning(str(advice), advice.fix)


def public_pickle(given: FilePlan, facts: MachineFacts) -> Iterator[Result]:
    """Servers that unpickle must not be reachable from outside."""
    plan = given.plan
    if not is_loopback(plan.config.host) and any(s.backend == "ipc" for s in plan.servers):
        yield error(
            f"host {plan.config.host} with CUDA IPC: a reader of the control token on the network "
            "can run code in the servers",
            "leave `host` out, or set weight_transfer.transport to nccl or disk",
        )


def router_patience(given: FilePlan, facts: MachineFacts) -> Iterator[Result]:
    """Does the router wait longer than a push may freeze requests?"""
    config = given.plan.config
    router = config.router
    if given.plan.router is None or not isinstance(router, RouterSection):
        return
    transfer = config.weight_transfer
    freeze_s = transfer.rendezvous_timeout_s + transfer.update_timeout_s
    freeze_s += 2 * config.control_timeout_s  # pause and resume
    if router.request_timeout_s <= freeze_s:
        yield warning(
            f"router.request_timeout_s {router.request_timeout_s} is less than the "
            f"{freeze_s:g} s that a push may freeze requests for",
            f"raise it above {freeze_s:g}, or lower the timeouts of weight_transfer",
        )
    else:
        yield ok(f"the router waits {router.request_timeout_s} s for an answer")


def chunk_size(given: FilePlan, facts: MachineFacts) -> Iterator[Result]:
    """Does a chunk hold the largest tensor? If not, chunks grow, and so does what a push needs."""
    model, size = given.model, given.plan.config.weight_transfer.chunk_size
    if model is None or given.plan.config.weight_transfer.transport == "disk":
        return
    if model.largest_tensor_bytes > size:
        yield ok(
            f"chunks of {format_bytes(size)} grow to {format_bytes(model.largest_tensor_bytes)} "
            f"for {model.largest_tensor}"
        )
    else:
        yield ok(f"chunks of {format_bytes(size)} hold every tensor")


def staging_memory(given: FilePlan, facts: MachineFacts) -> Iterator[Result]:
    """Is there memory for the chunks of a push?"""
    plan, model, available = given.plan, given.model, facts.memory_available
    if model is None or available is None or plan.config.weight_transfer.transport == "disk":
        return
    largest = max(plan.config.weight_transfer.chunk_size, model.largest_tensor_bytes)
    chunk = min(largest, model.total_bytes)
    workers = sum(server.world_size for server in plan.servers) if plan.device == "cpu" else 0
    needed = (_SLOTS + workers) * chunk
    message = f"a push needs up to {format_bytes(needed)} of memory, {format_bytes(available)}"
    if needed > available:
        yield error(
            f"{message} are available",
            "lower weight_transfer.chunk_size, or set its transport to disk",
        )
    else:
        yield ok(f"{message} are available")


def server_memory(given: FilePlan, facts: MachineFacts) -> Iterator[Result]:
    """Do weights and KV cache of all CPU servers fit into memory?"""
    plan, model, available = given.plan, given.model, facts.memory_available
    if plan.device != "cpu" or given.running or model is None or available is None:
        return
    needed = sum(
        model.total_bytes + ENGINES[server.engine].sizes(server.argv, server.env).host_bytes
        for server in plan.servers
    )
    message = f"{len(plan.servers)} servers take about {format_bytes(needed)} of memory"
    if needed > available:
        yield warning(
            f"{message}, {format_bytes(available)} are available",
            "lower `replicas`, or VLLM_CPU_KVCACHE_SPACE under `env`",
        )
    else:
        yield ok(f"{message} of {format_bytes(available)}")


def gpu_memory(given: FilePlan, facts: MachineFacts) -> Iterator[Result]:
    """Do the weights fit into the share of each GPU that a server takes?"""
    plan, model = given.plan, given.model
    by_index = {gpu.index: gpu for gpu in facts.gpus}
    if model is None or plan.device != "cuda":
        return
    for server in plan.servers:
        gpus = [by_index[index] for index in server.gpus if index in by_index]
        if not gpus:
            continue
        sizes = ENGINES[server.engine].sizes(server.argv, server.env)
        room = min(gpu.memory_bytes for gpu in gpus) * sizes.gpu_share
        needed = model.total_bytes * sizes.copies / len(gpus)
        if needed > room:
            yield error(
                f"{server.name}: {format_bytes(needed)} of weights per GPU, and it takes "
                f"{format_bytes(room)} of each",
                "raise tensor_parallel_size, or gpu-memory-utilization under `args`",
            )


def gpus_in_use(given: FilePlan, facts: MachineFacts) -> Iterator[Result]:
    """Does another process use the GPUs that the fleet is about to take?"""
    if given.running:
        return
    users: dict[int, list[str]] = {}
    for server in given.plan.servers:
        for index in server.gpus:
            users.setdefault(index, []).append(server.name)
    group = given.plan.config.sleep_group
    advice = "or lower gpu-memory-utilization under `args`"
    if group is not None:
        advice = f"`skyctl up` puts the fleet of sleep_group {group} that is awake to sleep"
    for gpu in facts.gpus:
        if gpu.index in users and gpu.used_bytes > _BUSY_SHARE * gpu.memory_bytes:
            yield warning(
                f"GPU {gpu.index} ({', '.join(users[gpu.index])}) has "
                f"{format_bytes(gpu.used_bytes)} of {format_bytes(gpu.memory_bytes)} in use",
                f"see by whom: nvidia-smi; {advice}",
            )


CHECKS = {
    "plan": plan_problems,
    "advice": plan_advice,
    "public-pickle": public_pickle,
    "router-patience": router_patience,
}
OF_THIS_MACHINE = {
    "chunk-size": chunk_size,
    "staging-memory": staging_memory,
    "server-memory": server_memory,
    "gpu-memory": gpu_memory,
    "gpus-in-use": gpus_in_use,
}
