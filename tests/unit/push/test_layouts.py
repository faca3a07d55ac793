"""Which way a push goes into servers, what makes a layout count as proven, and how it is copied."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.checkpoints.checkpoint import Checkpoint, read_checkpoint
from skyctl.engines.base import Refusal
from skyctl.errors import PreflightError, ServerError, SkyctlError
from skyctl.push import layouts
from skyctl.push.layouts import LayoutChoice, choose_layout, numbered, settle_parameters
from skyctl.push.request import PushFleet
from skyctl.push.rows import Compared
from skyctl.push.runtime_delivery import CannotCopy, RuntimeDelivery
from skyctl.push.servers import Holds, PushedServer
from skyctl.push.transaction import _open
from skyctl.transfer.plan import plan_chunks
from skyctl.transfer.reader import Filled
from skyctl.transfer.sender_client import Opened, SenderFailed, SenderProcess
from skyctl.transfer.sender_pool import SenderPool
from skyctl.transfer.transports.base import Transport
from skyctl.transfer.transports.ipc import TRANSPORT as IPC
from skyctl.transfer.transports.nccl import TRANSPORT as NCCL
from skyctl.wire.layouts import (
    Program,
    layout_digest,
)
from tests.unit.push.checkpoints import write_checkpoint
from tests.unit.push.deliveries import ReadySender, site
from tests.unit.push.layouts import LAYOUT, NUMBERS, PARAMETERS, PROCESSED, TENSORS, Workers, report


@pytest.fixture(autouse=True)
def forget_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    for known in ("_spelt_out", "_programs", "_checked"):
        monkeypatch.setattr(layouts, known, {})


@pytest.fixture
def checkpoint(tmp_path: Path) -> Checkpoint:
    return read_checkpoint(str(write_checkpoint(tmp_path / "a", TENSORS)))


async def chosen(
    checkpoint: Checkpoint, *sites: PushedServer, wanted: Any = "auto", transport: str = "ipc"
) -> LayoutChoice:
    return await choose_layout(wanted, transport, sites, checkpoint)


async def test_servers_that_have_seen_it_proven_copy(checkpoint: Checkpoint) -> None:
    choice = await chosen(checkpoint, site(Workers(report())), wanted="runtime")
    assert (choice.name, choice.note) == ("runtime", "")
    plan = plan_chunks(checkpoint.tensors, 1 << 20, alignment=1, order=choice.ordered)
    assert [tensor.name for tensor in plan.tensors] == ["g", "u", "d"]
    [program] = choice.planned(plan, checkpoint).programs["demo-0"]
    assert [name for name, _, _ in program.parameters] == ["gate_up", "down"]


async def test_a_layout_that_is_known_by_its_digest_is_not_asked_for_again(
    checkpoint: Checkpoint,
) -> None:
    await chosen(checkpoint, site(Workers(report())))
    workers = Workers(report(parameters=()))
    assert (await chosen(checkpoint, site(workers))).name == "runtime"
    assert workers.calls == [("skyctl_layout", {"described": [LAYOUT]})]


async def test_more_layouts_than_are_remembered_are_understood_in_every_push(
    checkpoint: Checkpoint,
) -> None:
    """Each worker of a large model has a layout of its own."""
    of_rank = {}
    for rank in range(layouts._KEPT + 4):
        parameters = tuple(replace(one, name=f"{one.name}.{rank}") for one in PARAMETERS)
        of_rank[layout_digest(parameters)] = parameters

    class Many(Workers):
        async def ask_workers(self, method: str, kwargs: dict[str, Any], **_: Any) -> list[Any]:
            return [
                report(
                    rank,
                    layout=layout,
                    parameters=() if layout in kwargs["described"] else parameters,
                    proven=False,
                )
                for rank, (layout, parameters) in enumerate(of_rank.items())
            ]

    for _ in range(3):
        one = site(Many())
        one.before = replace(one.before, world_size=len(of_rank))
        choice = await chosen(checkpoint, one)
        assert [report.parameters for report in choice.reports] == list(of_rank.values())


async def test_servers_that_have_not_are_numbered_and_loaded_by_the_loader(
    checkpoint: Checkpoint,
) -> None:
    sites = [site(Workers(report())), site(Workers(report(proven=False)), name="demo-1")]
    choice = await chosen(checkpoint, *sites)
    assert choice.name == "checkpoint"
    assert "not proven yet on demo-1; this push proves it" in choice.note
    assert set(choice.workers) == {"demo-0", "demo-1"}
    with pytest.raises(PreflightError, match="--layout runtime: not proven yet on demo-1"):
        await chosen(checkpoint, *sites, wanted="runtime")


async def test_what_layers_process_is_copied_by_ipc_once_a_rehearsal_has_proven_it(
    checkpoint: Checkpoint,
) -> None:
    one = site(Workers(report(proven=False, **PROCESSED)))
    choice = await chosen(checkpoint, one)
    assert "not proven yet on demo-0; a rehearsal proves it" in choice.note
    proven = site(Workers(report(**PROCESSED)))
    assert (await chosen(checkpoint, proven)).name == "runtime"
    choice = await chosen(checkpoint, proven, transport="nccl")
    assert "gate_up is processed, ahead of a freeze only with ipc" in choice.note


def asleep(one: PushedServer) -> PushedServer:
    one.before = replace(one.before, asleep=True)
    return one


def half_updated(one: PushedServer) -> PushedServer:
    one.holds = Holds.UNKNOWN
    return one


@pytest.mark.parametrize(
    ("one", "reason"),
    [
        (asleep(site(Workers(report()))), "demo-0 sleeps"),
        (half_updated(site(Workers(report()))), "an earlier push broke off in demo-0"),
        (site(Workers(failing="no", refusal=Refusal.NO_METHOD)), "do not know layouts"),
        (site(Workers(failing="CUDA out of memory")), "does not tell its layout: CUDA out of"),
        (site(Workers("None")), "a layout that is not understood"),
        (site(Workers({})), "a layout that is not understood"),
        (site(Workers(report(parameters=()))), "a layout that is not understood"),
        (site(Workers()), "0 of 1 workers of demo-0 tell their layout"),
        (site(Workers(report(), report(1))), "2 of 1 workers of demo-0 tell their layout"),
        (site(Workers(report(reason="mla derives tensors"))), "mla derives tensors"),
        (site(Workers(report() | {"version": 9})), "speaks version 9 of layouts"),
        (site(Workers(report() | {"version": "3.3"})), "speaks version 3.3 of layouts"),
        (site(Workers(report() | {"version": 3})), "speaks version 3 of layouts"),
        (
            site(Workers(report(parameters=PARAMETERS[:1]))),
            "no parameter is made of d",
        ),
    ],
)
async def test_everything_else_is_left_to_the_loader_with_a_line_why(
    checkpoint: Checkpoint, one: PushedServer, reason: str
) -> None:
    choice = await chosen(checkpoint, one)
    assert (choice.name, choice.workers, choice.programs) == ("checkpoint", {}, {})
    assert choice.note.startswith("by vLLM's loader") and reason in choice.note
    with pytest.raises(PreflightError, match="--layout runtime"):
        await chosen(checkpoint, one, wanted="runtime")


async def test_a_checkpoint_that_lacks_tensors_is_refused_where_no_names_were_compared(
    tmp_path: Path,
) -> None:
    """The loader would leave the old weights in place. Where names differ, it may know others."""
    part = {name: TENSORS[name] for name in ("g", "u")}
    lacking = read_checkpoint(str(write_checkpoint(tmp_path / "lacking", part)))
    renamed = read_checkpoint(str(write_checkpoint(tmp_path / "renamed", {"m.g": part["g"]})))
    servers = [site(Workers(report()))]
    with pytest.raises(PreflightError, match="down is made of d, which is not there"):
        await choose_layout("auto", "ipc", servers, lacking, names_compared=False)
    for checkpoint, compared in ((lacking, True), (renamed, False)):
        choice = await choose_layout("auto", "ipc", servers, checkpoint, names_compared=compared)
        assert "which is not there" in choice.note


async def test_a_server_in_which_a_push_broke_off_is_asked_so_that_it_lets_go(
    checkpoint: Checkpoint,
) -> None:
    workers = Workers(failing="stuck")
    assert "broke off in demo-0" in (await chosen(checkpoint, half_updated(site(workers)))).note
    assert workers.asked == ["skyctl_layout"]


async def test_nobody_is_asked_where_it_makes_no_difference(checkpoint: Checkpoint) -> None:
    workers = Workers(report())
    assert await chosen(checkpoint, site(workers), wanted="checkpoint") == LayoutChoice()
    assert await chosen(checkpoint, site(workers), transport="shm") == LayoutChoice()
    assert workers.calls == []


def whole_of(checkpoint: Checkpoint) -> Compared:
    return Compared(len(checkpoint.tensors), checkpoint.total_bytes)


def expecting(workers: Workers, *, copied: bool, numbers: dict[str, int] = NUMBERS) -> PushedServer:
    one = site(workers)
    program = Program(LAYOUT, tuple((p.name, p.dtype, p.shape) for p in PARAMETERS), ())
    one.proof.expected, one.proof.copied = [(program, numbers)], copied
    return one


async def test_a_layout_is_proven_by_what_the_loader_made(checkpoint: Checkpoint) -> None:
    workers = Workers()
    one = expecting(workers, copied=False)
    assert numbered(one) == [["gate_up", "down"]]
    assert await settle_parameters(one, {0: NUMBERS}, whole_of(checkpoint), timeout_s=1.0) == ""
    assert workers.calls == [("skyctl_layout_trust", {"layouts": [LAYOUT]})]
    assert one.proof.compared is not None and one.proof.compared.bytes == checkpoint.total_bytes


@pytest.mark.parametrize(
    ("answered", "expected"),
    [
        ({0: {**NUMBERS, "down": 5}}, NUMBERS),
        ({0: {"gate_up": 17}}, NUMBERS),
        ({1: NUMBERS}, NUMBERS),
        ({}, NUMBERS),
        ({0: NUMBERS}, {"gate_up": 17}),  # the sender did not number all of them
    ],
)
async def test_other_bytes_prove_nothing_and_fail_what_was_copied(
    checkpoint: Checkpoint, answered: dict[int, dict[str, int]], expected: dict[str, int]
) -> None:
    workers = Workers()
    one = expecting(workers, copied=False, numbers=expected)
    said = await settle_parameters(one, answered, whole_of(checkpoint), timeout_s=1.0)
    assert "in a way that is not known" in said and workers.calls == []
    assert one.proof.compared is None
    one = expecting(workers, copied=True, numbers=expected)
    with pytest.raises(ServerError, match="is not what was sent"):
        await settle_parameters(one, answered, whole_of(checkpoint), timeout_s=1.0)
    assert one.proof.compared is None


class NumberingSender(ReadySender):
    """Also numbers parameters: all of them come with the last chunk."""

    def __init__(self, *, slots: int, chunks: int, shown: bool) -> None:
        super().__init__()
        self.slots, self.chunks, self.shown = slots, chunks, shown
        self.programs: list[Program] = []
        self.sent: list[int] = []
        self.released = 0

    async def open(self, *, programs: list[Program], shown: bool, **arguments: Any) -> None:
        await super().open(**arguments)
        assert shown
        self.programs = programs

    async def opened(self, **_: Any) -> Opened:
        slots = {"handles": ["handle"], "offsets": [64 * slot for slot in range(self.slots)]}
        return Opened(
            {"host": "127.0.0.1", "port": 1},
            staged_whole=self.slots == self.chunks,
            shown=slots if self.shown else None,
        )

    async def filled(self, chunk: int, **_: Any) -> Filled:
        last = chunk == self.chunks - 1
        assert chunk - self.released < self.slots, "its slot is not free"
        return Filled(chunk, chunk % self.slots, (), {"numbers": [NUMBERS if last else {}]})

    async def release(self, chunk: int) -> None:
        self.released = chunk + 1

    async def send(self, filled: Filled, *_: Any, **__: Any) -> None:
        self.sent.append(filled.chunk)


async def copied_by(
    transport: Transport,
    workers: Workers,
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    *,
    slots: int = 3,
    shown: bool = True,
    pool: SenderPool | None = None,
    spare_bytes: int = 0,
) -> tuple[PushedServer, NumberingSender]:
    """One server into which three chunks were copied."""
    one = site(workers, instance="1@1")
    choice = await chosen(checkpoint, site(Workers(report())))
    plan = plan_chunks(checkpoint.tensors, 64, alignment=1, order=choice.ordered)
    sender = NumberingSender(slots=slots, chunks=len(plan.chunks), shown=shown)

    async def spawn(*_: Any, **__: Any) -> NumberingSender:
        return sender

    monkeypatch.setattr(SenderProcess, "spawn", spawn)
    delivery = RuntimeDelivery(
        transport,
        checkpoint,
        plan,
        PushFleet("demo", (one.given,)),
        senders=pool or SenderPool(),
        programs=choice.planned(plan, checkpoint).programs,
        spare_bytes=spare_bytes,
    )
    workers.init_weight_transfer = workers.collective_rpc  # type: ignore[attr-defined]
    try:
        await delivery.open([one])
        await delivery.start([one])
        await delivery.update([one], lambda done: None)
        await delivery.finish([one], lambda: "v1")
    finally:
        await delivery.close()
    return one, sender


@pytest.mark.parametrize("transport", [IPC, NCCL], ids=lambda transport: transport.name)
@pytest.mark.parametrize(
    ("slots", "calls"), [(3, [([0, 1, 2], True)]), (2, [([0, 1], False), ([2], True)])]
)
async def test_servers_map_the_slots_before_and_copy_in_as_few_calls_as_these_allow(
    checkpoint: Checkpoint,
    monkeypatch: pytest.MonkeyPatch,
    transport: Transport,
    slots: int,
    calls: list[tuple[list[int], bool]],
) -> None:
    workers = Workers()
    one, sender = await copied_by(transport, workers, checkpoint, monkeypatch, slots=slots)
    assert workers.asked == ["skyctl_layout_open"] + ["skyctl_layout_load"] * len(calls)
    told = workers.calls[0][1]
    assert (told["payload"], told["offsets"]) == ("handle", [64 * slot for slot in range(slots)])
    assert [Program.from_wire(program) for program in told["programs"]] == sender.programs
    loads = [{"chunks": chunks, "last": last} for chunks, last in calls]
    assert [arguments for _, arguments in workers.calls[1:]] == loads
    assert (sender.joins, sender.sent) == (0, [])
    assert (one.holds, one.proof.copied, one.failure) == (Holds.NEW, True, "")
    assert one.proof.expected == [(sender.programs[0], NUMBERS)]


async def test_weights_are_processed_before_the_freeze_and_their_memory_is_given_back(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers()
    await copied_by(IPC, workers, checkpoint, monkeypatch, spare_bytes=7)
    opened, *processed, loaded, freed = workers.calls
    assert (opened[0], loaded[0]) == ("skyctl_layout_open", "skyctl_layout_load")
    assert processed == [
        ("skyctl_layout_process", {"chunk": chunk, "keep": True}) for chunk in range(3)
    ]
    assert freed == ("skyctl_free_cached", {})


async def test_the_next_push_reads_ahead_as_far_as_after_any_other(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sender learns how long a push took from reading to the first update."""
    pool = SenderPool()
    await copied_by(IPC, Workers(), checkpoint, monkeypatch, pool=pool)
    assert pool.idle is not None and 0 < pool.idle.lead_s < 10


async def test_what_cannot_be_broadcast_as_a_whole_is_not_copied(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers()
    with pytest.raises(CannotCopy, match="does not fit on the sender's GPU"):
        await copied_by(NCCL, workers, checkpoint, monkeypatch, slots=2, shown=False)
    assert workers.asked == []


async def test_broadcast_chunks_are_copied_in_one_call(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers()
    one, sender = await copied_by(NCCL, workers, checkpoint, monkeypatch, shown=False)
    assert workers.asked == ["skyctl_layout_open", "skyctl_layout_receive"]
    assert workers.calls[0][1]["buffer_bytes"] == 64
    assert workers.calls[1][1] == {"sizes": [64, 64, 64]}
    assert sender.sent == [0, 1, 2] and one.holds is Holds.NEW


class Refusing(Workers):
    """Has no room for what this method needs."""

    def __init__(self, method: str) -> None:
        super().__init__()
        self.method = method

    async def ask_workers(self, method: str, kwargs: dict[str, Any], **rest: Any) -> list[Any]:
        answers = await super().ask_workers(method, kwargs, **rest)
        if method == self.method:
            raise ServerError("no room", status=500)
        return answers


@pytest.mark.parametrize("method", ["skyctl_layout_open", "skyctl_layout_process"])
async def test_a_server_that_cannot_get_ready_lets_go_and_can_be_loaded(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    workers = Refusing(method)
    with pytest.raises(CannotCopy, match="no room") as caught:
        await copied_by(IPC, workers, checkpoint, monkeypatch, spare_bytes=7)
    assert "--layout checkpoint" in caught.value.hint
    asked = dict.fromkeys(["skyctl_layout_open", method])
    assert workers.asked == [*asked, "skyctl_layout_close", "skyctl_free_cached"]


class Opening:
    """A delivery of which only `open` matters here."""

    def __init__(self, failure: Exception | None = None, *, copies: bool = False) -> None:
        self.failure, self.copies, self.closed = failure, copies, False

    async def open(self, sites: Any) -> None:
        if self.failure is not None:
            raise self.failure

    async def close(self) -> None:
        self.closed = True


@pytest.mark.parametrize("failure", [CannotCopy("demo-0: no room"), SenderFailed("no room")])
@pytest.mark.parametrize(
    ("wanted", "second", "ends"),
    [
        ("auto", lambda: Opening(), "by loader"),
        ("auto", lambda: Opening(PreflightError("no GPU")), "no GPU"),
        ("runtime", lambda: Opening(), "no room"),
    ],
)
async def test_a_push_goes_on_by_the_loader_unless_copying_was_asked_for(
    wanted: str, second: Any, ends: str, failure: SkyctlError
) -> None:
    first, second, notes = Opening(failure, copies=True), second(), []
    run: Any = SimpleNamespace(
        request=SimpleNamespace(layout=wanted), fleet=None, senders=None, note=notes.append
    )
    way = SimpleNamespace(delivery=lambda *_, by_loader: second)
    prepared: Any = SimpleNamespace(servers=(), way=way)
    if ends == "by loader":
        assert await _open(run, prepared, first) is second  # type: ignore[arg-type,comparison-overlap]
        assert first.closed and not second.closed and "no room" in notes[0]
        return
    with pytest.raises(PreflightError, match=ends):
        await _open(run, prepared, first)  # type: ignore[arg-type]
    assert second.closed is (wanted == "auto")


async def test_the_checkpoint_is_at_fault_whichever_way_it_goes() -> None:
    failure = SenderFailed("it changed")
    failure.final = True
    run: Any = SimpleNamespace(request=SimpleNamespace(layout="auto"))
    with pytest.raises(PreflightError, match="it changed"):
        await _open(run, SimpleNamespace(servers=()), Opening(failure, copies=True))  # type: ignore[arg-type]


async def test_a_sender_that_died_before_the_first_copy_leaves_nothing_in_doubt(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Workers()
    monkeypatch.setattr(NumberingSender, "failure", SenderFailed("killed"))
    one, _ = await copied_by(IPC, workers, checkpoint, monkeypatch)
    assert (one.holds, one.failure) == (Holds.OLD, "killed")
    assert workers.asked == ["skyctl_layout_open", "skyctl_layout_close"]


class Breaking(Workers):
    """Dies as it copies."""

    async def ask_workers(self, method: str, kwargs: dict[str, Any], **rest: Any) -> list[Any]:
        if method == "skyctl_layout_load":
            self.failing = "an illegal memory access"
        return await super().ask_workers(method, kwargs, **rest)


async def test_a_copy_that_breaks_off_leaves_the_server_in_doubt(
    checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    workers = Breaking()
    one, _ = await copied_by(IPC, workers, checkpoint, monkeypatch)
    assert one.holds is Holds.UNKNOWN
    assert one.failure == "update: an illegal memory access"
    assert workers.asked[-1] == "skyctl_layout_close"
