"""The screen of `top` fits every terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console, RenderableType

from skyctl.cli.top_view import fitting, once_view, screen_view
from skyctl.core.status import FleetStatus
from skyctl.launch.local.devices import GpuUsage
from skyctl.monitoring.samples import FleetSample
from tests.unit.monitoring.fleets import fleet_sample, replica_sample


def drawn(view: RenderableType, width: int = 300) -> list[str]:
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(view)
    assert isinstance(console.file, io.StringIO)
    return [line.rstrip() for line in console.file.getvalue().rstrip("\n").split("\n")]


def sample(replicas: int = 2) -> FleetSample:
    return fleet_sample(*(replica_sample(f"tiny-{index}") for index in range(replicas)))


@pytest.mark.parametrize("width", [60, 80, 100, 200])
@pytest.mark.parametrize("height", [12, 24, 50])
@pytest.mark.parametrize("replicas", [1, 3, 40])
def test_the_screen_fits_the_terminal(width: int, height: int, replicas: int) -> None:
    lines = drawn(screen_view(sample(replicas), "", width, height), width)
    assert len(lines) == height
    assert max(map(len, lines)) <= width
    assert "Ctrl-C quit" in lines[-1]


def test_a_long_list_is_cut_and_its_sum_says_how_long_it_is() -> None:
    lines = drawn(screen_view(sample(40), "the supervisor does not answer", 100, 24), 100)
    assert any(line.startswith("tiny-0 ") for line in lines)
    assert any(line.startswith("all 40") for line in lines)
    assert "the supervisor does not answer" in lines[-1]


def test_rates_are_summed_over_the_fleet_and_the_rest_is_named() -> None:
    text = "\n".join(drawn(once_view(sample())))
    assert "680" in text  # two times 340 tokens/s
    assert "4.0 requests/s" in text and "0.5 errors/s" in text
    assert "tinker  ready   130% CPU   2.0 GiB   optim_step for 1m15s" in text
    assert "push-3 update  512.0 MiB of 1.0 GiB" in text
    assert "up: done" in text


def test_gpus_take_the_place_of_cpu_where_there_are_some() -> None:
    gpus = (GpuUsage(0, 0.9, 40 * 1024**3, 80 * 1024**3), GpuUsage(1, 0.7, 0, 80 * 1024**3))
    text = "\n".join(drawn(once_view(fleet_sample(replica_sample(gpus=gpus)))))
    assert "80%" in text and "40.0/160 GiB" in text


def test_roles_are_told_where_there_are_some() -> None:
    pair = [replica_sample("p", role="prefill"), replica_sample("d", role="decode")]
    [head, *rows] = drawn(once_view(fleet_sample(*pair)))[2:5]
    at = head.index("ROLE")
    assert [row[at:].split()[0] for row in rows] == ["prefill", "decode"]
    assert "ROLE" not in "\n".join(drawn(once_view(sample())))


def test_unknown_numbers_are_dashes_and_not_zeros() -> None:
    unknown = replica_sample(
        state="dead", running=None, waiting=None, kv_usage=None, generation_tokens_per_s=None
    )
    row = drawn(once_view(fleet_sample(unknown)))[3]
    assert row.startswith("tiny-0   dead") and row.count("–") == 4


def test_columns_that_do_not_fit_go_in_the_order_of_their_worth() -> None:
    assert fitting([0, 2, 1, 0], [5, 5, 5, 5], None) == [0, 1, 2, 3]
    assert fitting([0, 2, 1, 0], [5, 5, 5, 5], 20) == [0, 2, 3]
    assert fitting([0, 2, 1, 0], [5, 5, 5, 5], 3) == [0, 3]


def test_a_fleet_that_is_down_is_a_line_and_not_an_empty_table() -> None:
    down = fleet_sample(
        status=FleetStatus("tiny", "down", (), None, supervised=False),
        router=None,
        tinker=None,
        job=None,
        events=(),
    )
    assert drawn(once_view(down)) == ["tiny  down    start it: skyctl up"]
    assert len(drawn(screen_view(down, "", 80, 12), 80)) == 12
