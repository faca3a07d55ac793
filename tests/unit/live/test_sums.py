"""What the ranks of a trainer contribute adds up to the numbers that servers' workers report."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from skyctl.live.plan import WorkerPlan, plan_live
from tests.unit.live.pieces import in_memory, parts, report, tensors

torch = pytest.importorskip("torch")

from torch.multiprocessing.reductions import StorageWeakRef  # noqa: E402

from skyctl.live.sums import Partial, Summer, added  # noqa: E402
from skyctl.wire.copies import octets_of, paired_runs  # noqa: E402
from skyctl.wire.device_digest import digest_on_device  # noqa: E402
from skyctl.wire.layouts import ParameterLayout  # noqa: E402

Exports = dict[tuple[int, int], Any]


def filled(plan: WorkerPlan, exports: Exports) -> dict[str, Any]:
    """The parameters as a worker's copies leave them; padding is zero."""
    made = {
        number: torch.zeros(shape, dtype=getattr(torch, dtype))
        for number, (_, dtype, shape) in enumerate(plan.parameters)
    }
    octets = {number: octets_of(parameter) for number, parameter in made.items()}
    dtypes = [getattr(torch, dtype) for _, dtype, _ in plan.parameters]
    for copy in plan.program.copies:
        for target, source in paired_runs(
            [copy], exports[plan.sources[copy.chunk]], octets, dtypes
        ):
            target.copy_(source)
    return {plan.parameters[number][0]: parameter for number, parameter in made.items()}


def numbers(plan: WorkerPlan, exports: Exports) -> dict[str, int]:
    """What all ranks contribute, over the wire."""
    partials = []
    for rank in range(4):
        own = [exports[key] for key in sorted(exports) if key[0] == rank]
        wire = json.dumps(
            Summer(plan.parameters, plan.rows_by_rank()[rank], own).sum(own).to_wire()
        )
        partials.append(Partial.from_wire(json.loads(wire)))
    assert not any(partial.not_finite for partial in partials)
    return added(plan.parameters, partials)


def elements(octets: Any, dtype: Any) -> Any:
    """Those of an export, from its bytes in bfloat16; none of them NaN or infinity."""
    drawn = torch.frombuffer(bytearray(octets.tobytes()), dtype=torch.uint8)
    return (drawn.view(torch.int16) % 97).to(torch.float32).mul_(1.0001).to(dtype)


@given(st.data(), tensors(), st.booleans(), st.integers(0, 5), st.sampled_from([True, False]))
def test_ranks_contribute_what_workers_report(
    data: st.DataObject, shared: Any, together: bool, zeros: int, masters: bool
) -> None:
    """Also where ranks' pieces end within a word, and where float32 becomes bfloat16."""
    ranks, memory, _ = in_memory(shared, together)
    dtype = torch.float32 if masters else torch.bfloat16
    exports = {key: elements(octets, dtype) for key, octets in memory.items()}
    layouts = []
    for number, (name, (shape, _)) in enumerate(shared.items()):
        part = data.draw(parts(name, shape, 0))
        size = part.rows * part.row + zeros
        layouts.append(ParameterLayout(f"p{number}", "bfloat16", (size,), (part,), zeros))
    worker = report(*layouts)
    plan = plan_live(ranks, [worker])[worker.layout]
    made = filled(plan, exports)
    assert numbers(plan, exports) == dict(
        zip(made, digest_on_device(list(made.values())), strict=True)
    )


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize(
    "dtype", ["float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"]
)
def test_nan_and_infinity_are_seen(value: float, dtype: str) -> None:
    if dtype == "float8_e4m3fn" and math.isinf(value):
        pytest.skip("it has no infinity")
    weight = torch.zeros(100, dtype=getattr(torch, dtype))
    rows = [(0, number, 1, 40, number * 40, 0, 8, 0) for number in range(2)]
    described = [(f"p{number}", dtype, (30,)) for number in range(2)]
    assert Summer(described, rows, [weight]).sum([weight]).not_finite == []
    weight[40 // weight.itemsize + 3] = value
    assert Summer(described, rows, [weight]).sum([weight]).not_finite == [1]


def test_tensors_that_lie_in_words_are_not_made_to_be_summed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A push of thousands of exports would take longer for that than for their sums."""
    from skyctl.live.memory import Flats

    weight = torch.ones(4, 8, dtype=torch.bfloat16)
    storages = [(StorageWeakRef(weight.untyped_storage()), weight.dtype, weight.device)]
    flats = Flats(storages)
    assert flats.addresses == [weight.data_ptr()] and len(flats) == 1
    assert flats[0].equal(weight.view(-1)) and flats[0].data_ptr() == weight.data_ptr()
    described, rows = [("w", "bfloat16", (4, 8))], [(0, 0, 1, 64, 0, 64, 0, 64)]
    summer = Summer(described, rows, flats, by_kernel=True)
    monkeypatch.setattr(Summer, "_sum_words", lambda *_: None)  # a kernel, by addresses
    monkeypatch.setattr(Flats, "__getitem__", None)
    assert summer.sum(flats).not_finite == []
    del weight, flats, summer
    with pytest.raises(RuntimeError, match="freed"):
        Flats(storages)
