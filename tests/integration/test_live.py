"""A sharded trainer pushes out of its ranks' memory into real vLLM servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.integration.endpoints import PROMPT, TOKENS, answers
from tests.integration.fleet_cli import FleetCli
from tests.integration.reference import answered

pytestmark = pytest.mark.real
FSDP_RL = Path(__file__).parents[2] / "examples" / "fsdp_rl.py"
STEPS = 4


@pytest.mark.parametrize("machines", [1, 2])
def test_two_ranks_train_and_the_servers_have_what_they_would_save(
    real_fleet: FleetCli, tmp_path: Path, machines: int
) -> None:
    pytest.importorskip("torch")
    real_fleet.run("sync-weights", "checkpoints/a")
    command = ["-m", "torch.distributed.run", "--nproc-per-node", "2"]
    command += ["-m", "tests.integration.apart"] if machines > 1 else []
    command += [str(FSDP_RL), "--steps", str(STEPS), "--samples", "8", "--learning-rate", "0.01"]
    printed = real_fleet.run_example(*command, "--save", "saved", cwd=tmp_path, timeout_s=300)
    history = json.loads((tmp_path / "fsdp_rl.json").read_text())
    assert [step["version"] for step in history] == [f"fsdp-{n + 1}" for n in range(STEPS)]
    assert history[-1]["reward"] > history[0]["reward"], printed
    # without the tokenizer, which training does not change, a directory is not a whole checkpoint
    saved = tmp_path / "saved"
    for file in (real_fleet.directory / "checkpoints" / "a").glob("tokenizer*"):
        (saved / file.name).write_bytes(file.read_bytes())
    pushed = answers(real_fleet)
    assert len({tuple(tokens) for tokens in pushed}) == 1, "servers disagree"
    assert pushed[0] == answered(saved, PROMPT, TOKENS)
    digests = {row["weights_digest"] for row in real_fleet.data("weights")["servers"]}
    assert real_fleet.data("weights", "verify")["agree"] is True
    real_fleet.run("sync-weights", str(saved))
    assert {row["weights_digest"] for row in real_fleet.data("weights")["servers"]} == digests
    assert answers(real_fleet) == pushed
