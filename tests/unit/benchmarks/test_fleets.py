"""Fleet files of benchmarks that run on GPUs only, so that no other test sees them rot."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.push import ONE_SERVER, settings
from skyctl.fleetfile.load import load_fleet


def test_a_fleet_of_one_server_is_whole(tmp_path: Path) -> None:
    options = argparse.Namespace(**ONE_SERVER, transport="ipc", chunk_size="1GiB")
    file = tmp_path / "fleet.yaml"
    file.write_text(json.dumps(settings(options, tmp_path)))
    config = load_fleet(file, environ={}).config
    assert (config.weight_transfer.transport, config.gpus) == ("ipc", [0])
