"""The toy's plot: well-formed, inside its frame, and true to its numbers."""

from __future__ import annotations

import sys
from pathlib import Path
from xml.etree import ElementTree

import pytest

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from rl_plot import HEIGHT, WIDTH, reward_plot

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize(
    ("rewards", "windows_s"),
    [([0.2, 0.4, 0.6], [0.1, 2.8, 0.4]), ([0.0], [0.0]), ([1.0] * 40, [0.0001] * 40)],
)
def test_every_step_is_a_dot_and_a_bar_inside_the_frame(
    rewards: list[float], windows_s: list[float]
) -> None:
    root = ElementTree.fromstring(reward_plot(rewards, windows_s))
    dots = [(float(d.attrib["cx"]), float(d.attrib["cy"])) for d in root.iter(f"{SVG}circle")]
    bars = [r for r in root.iter(f"{SVG}rect") if r.get("class") == "bar"]
    assert len(dots) == len(bars) == len(rewards)
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for x, y in dots)
    assert all(float(bar.attrib["height"]) >= 0 for bar in bars)


def test_a_higher_reward_is_drawn_higher_and_numbers_stay_readable() -> None:
    root = ElementTree.fromstring(reward_plot([0.2, 0.6], [1.5, 2.8]))
    low, high = (float(dot.attrib["cy"]) for dot in root.iter(f"{SVG}circle"))
    assert high < low
    texts = [text.text for text in root.iter(f"{SVG}text")]
    assert "4,000" in texts and not any("e+" in (text or "") for text in texts)
