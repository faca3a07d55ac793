"""Every ```python block of README.md and docs/ is run against the real fleet, as it stands.

A block behind `<!-- not run: why -->` is not.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.integration.fleet_cli import FleetCli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?!<!-- not run: )[^\n]*\n```python\n(.*?)^```$", re.M | re.S)
BLOCKS = {
    f"{page.relative_to(ROOT)}-{number}": code
    for page in PAGES
    for number, code in enumerate(BLOCK.findall(page.read_text(encoding="utf-8")), 1)
}
# What a reader of the pages has: a trainer with its model, and a fleet. A block may await.
RUNNER = """
import ast, asyncio, inspect, sys
from types import SimpleNamespace
from safetensors.torch import load_file
from skyctl import Fleet

trained = []
names = {
    "fleet": Fleet.load("fleet.yaml"),
    "model": SimpleNamespace(state_dict=lambda: load_file("checkpoints/b/model.safetensors")),
    "prompts": ["The fleet"], "step": 7, "steps": 2, "train_on": trained.append,
}
code = compile(sys.argv[1], "block", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
if code.co_flags & inspect.CO_COROUTINE:
    asyncio.run(eval(code, names))
else:
    exec(code, names)
assert all(rollouts[0].token_ids for rollouts in trained)
print("trained", len(trained))
"""


@pytest.mark.real
@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_runs(name: str, real_fleet: FleetCli) -> None:
    pytest.importorskip("safetensors.torch")
    code = BLOCKS[name]
    (real_fleet.directory / "runs").mkdir(exist_ok=True)
    if not (real_fleet.directory / "runs" / "step-200").exists():
        (real_fleet.directory / "runs" / "step-200").symlink_to("../checkpoints/b")
    real_fleet.run("sync-weights", "checkpoints/a", "--weight-version", "before")
    try:
        out = real_fleet.run_python("-c", RUNNER, code, cwd=real_fleet.directory)
        *printed, trained = out.splitlines()
        assert bool(printed) == ("print(" in code), out
        assert trained == f"trained {2 if 'train_on(' in code else 0}"
        pushed = real_fleet.data("status")["weight_version"] != "before"
        assert pushed == ("sync_weights(" in code or "live.push(" in code)
    finally:
        real_fleet.run("sync-weights", "checkpoints/a")


def test_pages_have_blocks() -> None:
    assert {name.rpartition("-")[0] for name in BLOCKS} >= {"README.md", "docs/python.md"}
