"""The examples' plots: well-formed, inside its frame, and true to its numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from plots import HEIGHT, WIDTH, Panel, plot

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("rewards", "windows_ms"),
    [([0.2, 0.4, 0.6], [100, 2800, 400]), ([0.0], [0.0]), ([1.0] * 40, [0.1] * 40)],
)
def test_every_step_is_a_dot_and_a_bar_inside_the_frame(
    rewards: list[float], windows_ms: list[float]
) -> None:
    root = ElementTree.fromstring(plot(Panel("a", rewards), Panel("b", windows_ms, bars=True)))
    dots = [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in root.iter(f"{SVG}circle")]
    bars = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "bar"]
    assert len(dots) == len(bars) == len(rewards)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in dots)
    assert all(float(bar.attrib["height"]) >= 0 for bar in bars)


def test_a_higher_reward_is_drawn_higher_and_numbers_stay_readable() -> None:
    root = ElementTree.fromstring(plot(Panel("a", [0.2, 0.6]), Panel("b", [1500, 2800])))
    low, high, *_ = (float(dot.attrib["cy"]) for dot in root.iter(f"{SVG}circle"))
    assert high < low
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "4,000" in texts and not any("e+" in (text or "") for text in texts)
