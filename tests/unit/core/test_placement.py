"""Who gets which GPUs and CPU cores."""

from __future__ import annotations

from typing import Any

from skyctl.core.placement import bind_to_cores, expand_replicas, place_on_gpus, place_replicas
from skyctl.fleetfile.schema import FleetConfig
from skyctl.launch.base import Cpu, Gpu, Machine, Node


def place(allowed: list[int], *, share: bool = False, **config: Any) -> list[tuple[int, ...]]:
    fleet = FleetConfig.model_validate({"name": "f", "model": "m", **config})
    return place_on_gpus(expand_replicas(fleet), allowed, share=share)


def plain(count: int) -> list[Cpu]:
    return [Cpu(index, index) for index in range(count)]


def test_a_replica_takes_one_gpu_per_worker() -> None:
    sizes = {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert place(list(range(8)), replicas=2, **sizes) == [(0, 1, 2, 3), (4, 5, 6, 7)]
    assert place(list(range(4)), data_parallel_size=3) == [(0, 1, 2)]


def test_gpus_named_by_a_group_are_left_to_it() -> None:
    groups = [{"count": 1}, {"name": "g", "count": 2, "gpus": [[0], [2]]}]
    assert place([0, 1, 2], replicas=groups) == [(1,), (0,), (2,)]


def test_a_groups_parallel_size_is_its_own() -> None:
    groups = [{"tensor_parallel_size": 2}, {"count": 1}]
    assert place([0, 1, 2], replicas=groups) == [(0, 1), (2,)]


def test_without_sharing_gpus_run_out() -> None:
    assert place([0], replicas=2) == [(0,), ()]


def test_with_sharing_replicas_spread_before_they_stack() -> None:
    assert place([0, 1], share=True, replicas=3) == [(0,), (1,), (0,)]
    assert place([0], share=True, replicas=2) == [(0,), (0,)]


def test_vllm_chooses_the_cores_of_a_single_worker() -> None:
    assert bind_to_cores([1], plain(4)) == [()]


def test_unknown_cores_are_left_to_vllm() -> None:
    assert bind_to_cores([1, 1], []) == [(), ()]


def test_workers_get_disjoint_sets_of_one_size() -> None:
    assert bind_to_cores([1, 1], plain(2)) == [((0,),), ((1,),)]
    assert bind_to_cores([1, 1], plain(5)) == [((0, 1),), ((2, 3),)]


def test_a_large_share_leaves_a_core_for_the_scheduler() -> None:
    assert bind_to_cores([1, 1], plain(8)) == [((0, 1, 2),), ((4, 5, 6),)]


def test_workers_of_one_replica_are_separated_as_vllm_reads_them() -> None:
    assert bind_to_cores([2, 2], plain(4)) == [((0,), (1,)), ((2,), (3,))]


def test_one_hardware_thread_per_core_while_there_are_enough() -> None:
    hyperthreads = [Cpu(0, 0), Cpu(1, 1), Cpu(2, 0), Cpu(3, 1)]
    assert bind_to_cores([1, 1], hyperthreads) == [((0,),), ((1,),)]
    assert bind_to_cores([1, 1, 1], hyperthreads) == [((0,),), ((1,),), ((2,),)]


def test_more_workers_than_cores_share_them_in_turn() -> None:
    assert bind_to_cores([1, 1, 1], plain(2)) == [((0,),), ((1,),), ((0,),)]


def spread(
    gpus: dict[str, int], *, share: bool = False, on_gpus: bool = True, **config: Any
) -> list[tuple[str, tuple[int, ...]]]:
    machines = [
        Machine(
            Node(name, name, "python3", ("ssh",), 60.0),
            tuple(Gpu(index, f"GPU-{index}", "H100", 0) for index in range(count)),
            tuple(plain(4)),
            lambda: 0,
        )
        for name, count in gpus.items()
    ]
    replicas = expand_replicas(FleetConfig.model_validate({"name": "f", "model": "m", **config}))
    places = place_replicas(replicas, machines, allowed=None, on_gpus=on_gpus, share=share)
    return [(one.machine.node.target, one.gpus) for one in places if one.machine.node]


def test_replicas_are_spread_over_machines_that_have_room() -> None:
    two = {"a": 2, "b": 2}
    assert spread(two, replicas=3) == [("a", (0,)), ("b", (0,)), ("a", (1,))]
    assert spread(two, replicas=2, tensor_parallel_size=2) == [("a", (0, 1)), ("b", (0, 1))]
    assert spread({"a": 1, "b": 4}, replicas=3) == [("a", (0,)), ("b", (0,)), ("b", (1,))]
    assert spread({"a": 1, "b": 2}, replicas=1, tensor_parallel_size=2) == [("b", (0, 1))]
    assert spread(two, share=True, replicas=5)[-1] == ("a", (0,))


def test_a_replica_without_room_anywhere_gets_fewer_gpus_than_it_needs() -> None:
    assert spread({"a": 1, "b": 1}, replicas=3)[-1] == ("a", ())


def test_without_gpus_machines_take_turns() -> None:
    assert [name for name, _ in spread({"a": 0, "b": 0}, on_gpus=False, replicas=3)] == list("aba")
