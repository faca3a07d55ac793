"""Ranks whose weights servers copy: what is offered, what is summed, when it is offered anew."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from skyctl.api import live as live_api
from skyctl.api.live import FleetSide
from skyctl.errors import NotMapped, PreflightError
from skyctl.live.offer import Live, Offer, planned
from skyctl.push import live_way
from skyctl.push.request import PushResult
from skyctl.wire.layouts import LayoutReport, ParameterLayout, Part, layout_digest
from tests.unit.api.fleets import attached, everywhere, state_dict, stubs, trainers
from tests.unit.push.checkpoints import write_checkpoint

torch = pytest.importorskip("torch")

from skyctl.wire import exports  # noqa: E402
from skyctl.wire.device_digest import digest_on_device  # noqa: E402

SHAPES = {name: tuple(tensor.shape) for name, tensor in state_dict(50).items()}
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PUSH_LIVE = FleetSide.push_live


class Copying:
    """A fleet whose one worker has each tensor as a parameter of its own, and copies nothing."""

    def __init__(self) -> None:
        self.offers: list[Offer] = []
        self.numbers: list[dict[str, int]] = []
        self.forgets = 0
        self.changes = False
        """At each offer, the order of the parameters."""

    async def offer(self, request: Offer, *_: Any) -> Live:
        self.offers.append(request)
        parameters = tuple(
            ParameterLayout(name, "float32", shape, (Part(name, shape, 1, n, 0, n, 0, n),))
            for name, shape in SHAPES.items()
            if (n := math.prod(shape))
        )
        if self.changes and len(self.offers) % 2 == 0:
            parameters = parameters[::-1]
        return planned(request, [LayoutReport(0, layout_digest(parameters), parameters)])

    async def push_live(
        self, side: FleetSide, numbers: dict[str, dict[str, int]], request: Any, *_: Any
    ) -> PushResult | None:
        if self.forgets:
            self.forgets -= 1
            side._offered = None
            return None
        self.numbers += numbers.values()
        version = request.weight_version
        return PushResult(version, "", "", "live", 0, 1, 0.0, 0.0, 0.0, {}, [])


@pytest.fixture
def copying(monkeypatch: pytest.MonkeyPatch) -> Copying:
    """Tensors on a CPU pass for those of a GPU."""
    made = Copying()

    def export(_: Any, storage: Any, dtype: Any) -> exports.Export:
        name = str(dtype).removeprefix("torch.")
        return exports.Export(name, "GPU", f"{storage.data_ptr()}", 0, 0, "", 0, "", False)

    monkeypatch.setattr(torch.Tensor, "is_cuda", True)
    monkeypatch.setattr(exports.Exporter, "_problem", lambda *_: "")
    monkeypatch.setattr(exports.Exporter, "_export", export)
    monkeypatch.setattr(live_way, "take_offer", lambda *given: made.offer(*given))
    monkeypatch.setattr(FleetSide, "push_live", lambda *given: made.push_live(*given))
    return made


@asynccontextmanager
async def opened(tmp_path: Path, weights: list[Any]) -> AsyncIterator[list[Any]]:
    """A trainer per rank, over stub servers."""
    servers = stubs(write_checkpoint(tmp_path / "base"))
    async with (
        attached(tmp_path, servers) as fleet,
        fleet,
        trainers(fleet, weights) as live,
    ):
        yield live


def expected(parts: list[dict[str, Any]]) -> dict[str, int]:
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    return dict(zip(whole, digest_on_device(list(whole.values())), strict=True))


def halves() -> list[dict[str, Any]]:
    """Two ranks' rows of each tensor, in memory of their own."""
    return [{n: t.chunk(2)[rank].clone() for n, t in state_dict(50).items()} for rank in (0, 1)]


def slices_of(parts: list[dict[str, Any]], rank: int) -> Any:
    def slices(name: str, shape: tuple[int, ...]) -> Any:
        begin = 0 if rank == 0 else len(parts[0][name])
        yield (begin, *[0] * (len(shape) - 1)), parts[rank][name]

    return slices


async def push(live: list[Any], step: int) -> None:
    results = await asyncio.gather(*(trainer.push(f"step-{step}") for trainer in live))
    assert {result.version for result in results} == {f"step-{step}"}


async def test_servers_must_hold_what_all_ranks_have_now(tmp_path: Path, copying: Copying) -> None:
    parts = halves()
    async with opened(tmp_path, [slices_of(parts, rank) for rank in (0, 1)]) as live:
        outline = live[0].plan()
        assert outline.way == "live" and outline.balance == 1.0
        await push(live, 1)
        assert copying.numbers == [expected(parts)]
        parts[1]["model.norm.weight"] += 1
        await push(live, 2)
    assert copying.numbers[1] == expected(parts) != copying.numbers[0]
    assert len(copying.offers) == 1 and len(copying.offers[0].pids) == 2


async def test_weights_are_read_again_only_when_one_has_moved(
    tmp_path: Path, copying: Copying, monkeypatch: pytest.MonkeyPatch
) -> None:
    weights = state_dict(50)
    async with opened(tmp_path, [weights]) as live:
        with monkeypatch.context() as patch:
            patch.setattr(type(live[0]), "_read", lambda self: pytest.fail("read again"))
            patch.setattr(FleetSide, "outline", lambda *_: pytest.fail("planned again"))
            weights["lm_head.weight"] += 1
            await push(live, 1)
        assert copying.numbers == [expected([weights])] and len(copying.offers) == 1
        before = weights["lm_head.weight"]
        weights["lm_head.weight"] = before + 1
        await push(live, 2)
    assert copying.numbers[1] == expected([weights]) and len(copying.offers) == 2


@pytest.mark.parametrize(
    "given",
    [lambda weights: weights, lambda weights: SimpleNamespace(state_dict=lambda: weights)],
    ids=["mapping", "object"],
)
async def test_the_same_memory_under_other_names_is_offered_anew(
    tmp_path: Path, copying: Copying, given: Any
) -> None:
    weights = state_dict(50)
    swap = {HEAD: EMBEDDING, EMBEDDING: HEAD}
    async with opened(tmp_path, [given(weights)]) as live:
        await push(live, 1)
        renamed = {swap.get(name, name): tensor for name, tensor in weights.items()}
        weights.clear()
        weights.update(renamed)
        await push(live, 2)
    assert copying.numbers[1] == expected([renamed]) != copying.numbers[0]
    assert len(copying.offers) == 2


async def test_the_same_memory_in_other_places_of_its_tensors_is_offered_anew(
    tmp_path: Path, copying: Copying
) -> None:
    parts = halves()
    places = [0, 1]

    def slices(name: str, shape: tuple[int, ...]) -> Iterator[Any]:
        for part, place in zip(parts, places, strict=True):
            yield (place * len(part[name]), *[0] * (len(shape) - 1)), part[name]

    async with opened(tmp_path, [slices]) as live:
        await push(live, 1)
        places.reverse()
        await push(live, 2)
    assert copying.numbers == [expected(parts), expected(parts[::-1])]


class Converting(torch.nn.Module):
    """Its state dict is made of other tensors than it has, anew each time."""

    def __init__(self, weights: dict[str, Any]) -> None:
        super().__init__()
        self.register_buffer("step", torch.zeros(1))
        self.weights = weights

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        return {name: tensor.clone() for name, tensor in self.weights.items()}


class Caching(Converting):
    """The same, and keeps what it has made."""

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:
        self.made = [*getattr(self, "made", ()), super().state_dict()]
        return self.made[-1]


@pytest.mark.parametrize(
    "given",
    [
        lambda weights: lambda name, shape: [([0] * len(shape), weights[name].clone())],
        Converting,
        Caching,
    ],
    ids=["function", "module", "module that keeps them"],
)
async def test_tensors_that_are_made_for_a_push_are_read_for_each(
    tmp_path: Path, copying: Copying, given: Any
) -> None:
    weights = state_dict(50)
    async with opened(tmp_path, [given(weights)]) as live:
        await push(live, 1)
        weights["lm_head.weight"] += 1
        await push(live, 2)
    assert copying.numbers[1] == expected([weights]) != copying.numbers[0]


@pytest.mark.parametrize("forgets", [1, 2])
@pytest.mark.parametrize("changes", [False, True])
async def test_what_the_fleet_has_forgotten_is_offered_again(
    tmp_path: Path, copying: Copying, forgets: int, changes: bool
) -> None:
    weights = state_dict(50)
    copying.changes = changes
    async with opened(tmp_path, [weights]) as live:
        copying.forgets = forgets
        await push(live, 1)
    assert copying.numbers == [expected([weights])] and len(copying.offers) == 1 + forgets


async def test_nan_is_refused_before_the_push_begins(tmp_path: Path, copying: Copying) -> None:
    parts = halves()
    parts[1]["lm_head.weight"][3, 2] = torch.nan
    async with opened(tmp_path, [slices_of(parts, rank) for rank in (0, 1)]) as live:
        errors = await everywhere([trainer.push("step-1") for trainer in live])
        assert {error.message for error in errors} == {
            "rank 1: lm_head.weight holds NaN or infinity as it is sent"
        }
        assert not copying.numbers
        parts[1]["lm_head.weight"][3, 2] = 0
        await push(live, 2)
    assert copying.numbers == [expected(parts)]


async def test_servers_that_cannot_copy_take_a_file(tmp_path: Path) -> None:
    async with opened(tmp_path, [state_dict(50)]) as live:
        side = live[0]._side
        memory = {"exports": [], "places": [[0, 0]] * len(SHAPES), "pid": 1}
        assert await side.offer([memory]) is None
        outline = side.outline()
        assert outline.way == "file"
        assert "servers cannot copy out of the trainer's memory" in outline.reason


@pytest.mark.parametrize(
    ("opened_by", "pushed_by"), [("auto", "auto"), ("ipc", "auto"), ("auto", "live")]
)
async def test_memory_that_servers_cannot_map_is_offered_once_and_goes_through_a_file(
    tmp_path: Path,
    copying: Copying,
    monkeypatch: pytest.MonkeyPatch,
    opened_by: Any,
    pushed_by: str,
) -> None:
    """As in another container. A way that was asked for is refused, each time."""
    refusals = []

    async def push_to_its_end(*_: Any) -> Any:
        refusals.append(NotMapped("demo-0: map: no such file in /dev/shm"))
        raise refusals[-1]

    monkeypatch.setattr(FleetSide, "push_live", PUSH_LIVE)
    monkeypatch.setattr(live_api, "push_to_its_end", push_to_its_end)
    parts = halves()
    given = [slices_of(parts, rank) for rank in (0, 1)]
    servers = stubs(write_checkpoint(tmp_path / "base"))
    async with (
        attached(tmp_path, servers) as fleet,
        fleet,
        trainers(fleet, given, transport=opened_by) as live,
    ):
        for step in (1, 2):
            pushing = [trainer.push(f"step-{step}", transport=pushed_by) for trainer in live]
            if (opened_by, pushed_by) != ("auto", "auto"):
                errors = await everywhere(pushing)
                assert {error.message for error in errors} == {refusals[-1].message}
                continue
            for result in await asyncio.gather(*pushing):
                assert result.version == f"step-{step}" and result.transport != "live"
                assert f"sent through a file: {refusals[0].message}" in result.notes
            assert live[0].plan().way == "file" and refusals[0].message in live[0].plan().reason
    assert len(refusals) == (1 if opened_by == pushed_by else 2)


async def test_tensors_on_a_gpu_are_copied_without_a_file(tmp_path: Path, copying: Copying) -> None:
    weights = state_dict(50)
    async with attached(tmp_path, stubs(write_checkpoint(tmp_path / "base"))) as fleet:
        result = await fleet.sync_weights(weights)
        assert result.transport == "live" and result.version.startswith("live@")
        assert copying.numbers == [expected([weights])]
        assert (await fleet.sync_weights(weights)).version == result.version
        weights["lm_head.weight"] += 1
        assert (await fleet.sync_weights(weights)).version != result.version


@pytest.mark.parametrize("transport", ["auto", "live"])
async def test_tensors_that_servers_cannot_copy_go_through_a_file_with_a_note(
    tmp_path: Path, copying: Copying, monkeypatch: pytest.MonkeyPatch, transport: str
) -> None:
    async def offer(*_: Any) -> Live:
        raise PreflightError("not proven yet")

    monkeypatch.setattr(live_way, "take_offer", offer)
    async with attached(tmp_path, stubs(write_checkpoint(tmp_path / "base"))) as fleet:
        if transport == "live":
            with pytest.raises(PreflightError, match="not proven yet"):
                await fleet.sync_weights(state_dict(50), transport=transport)
        else:
            result = await fleet.sync_weights(state_dict(50))
            assert result.transport != "live" and "not proven yet" in result.notes[-1]


@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_is_to_be_kept_goes_through_a_file_where_no_server_can_write_it(
    tmp_path: Path, copying: Copying, ranks: int
) -> None:
    """Nobody is there to have it written: the fleet is attached."""
    parts = halves() if ranks == 2 else [state_dict(50)]
    async with attached(tmp_path, stubs(write_checkpoint(tmp_path / "base"))) as fleet, fleet:
        if ranks == 1:
            results = [await fleet.sync_weights(parts[0], keep=True)]
            with pytest.raises(PreflightError, match="attached"):
                await fleet.sync_weights(parts[0], keep=True, transport="live")
        else:
            given = [slices_of(parts, rank) for rank in (0, 1)]
            async with trainers(fleet, given) as live:
                pushing = (trainer.push("step-1", keep=True) for trainer in live)
                results = await asyncio.gather(*pushing)
                assert not copying.numbers
                await push(live, 2)  # and the next is copied out of memory
            assert copying.numbers == [expected(parts)]
        [kept] = await fleet.kept_weights()
        for result in results:
            assert result.version == kept.kept.version and result.transport != "live"
            assert any("attached" in note for note in result.notes)
