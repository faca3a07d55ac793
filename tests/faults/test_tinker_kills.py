"""kill -9 of the Tinker API or of a rank of its worker, between and during requests: the SDK goes
on, and the losses are those of an undisturbed run, to the bit."""

from __future__ import annotations

import random
import time
from pathlib import Path

import pytest

pytest.importorskip("tinker")
pytest.importorskip("torch")

from tests.faults.tinker_run import train
from tests.processes.tinker.serving import ServingProcess
from tests.tiny import make_tiny_checkpoint

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
WORKER_DIES = {("forward", 1), ("optim", 5), ("save", 8)}
API_DIES = {("second", 3), ("optim", 5), ("sample", 8)}


@pytest.mark.parametrize(("rank", "ranks"), [(4, 1), (0, 1), (4, 2), (0, 2)])
def test_no_step_is_lost_or_done_twice(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    request: pytest.FixtureRequest,
    rank: int,
    ranks: int,
) -> None:
    monkeypatch.setenv("TINKER_TELEMETRY", "0")
    checkpoint = make_tiny_checkpoint(tmp_path / "tiny", seed=1)
    # snapshots every third step: a rebuilt model repeats up to two
    serving = ServingProcess(
        *(tmp_path / "d", checkpoint),
        forked=True,
        ranks=ranks,
        snapshot_steps=3,
        snapshot_share=1.0,
    )
    request.addfinalizer(lambda: serving.kill())
    serving.start()
    undisturbed = train(serving, rank, lambda moment, step: None)
    dice = random.Random(5)

    def disturb(moment: str, step: int) -> None:
        if (moment, step) in WORKER_DIES:
            time.sleep(dice.random() * 0.1)  # in the middle of something, or before it, or after
            serving.kill_rank(dice.randrange(ranks))
        if (moment, step) in API_DIES:
            time.sleep(dice.random() * 0.1)
            serving.kill()
            serving.start()

    assert train(serving, rank, disturb) == undisturbed
    assert undisturbed[-1] == undisturbed[-2]
    left = {path.name for path in (serving.directory / "snapshots").iterdir()}
    assert len(left) <= 4  # one for each model
