"""A stored checkpoint, without an API."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from skyctl.tinker import files
from skyctl.tinker.ledger import Ledger

FINAL = "tinker://run/weights/final"


def store_checkpoint(storage: Path, path: str = FINAL) -> None:
    """Store a checkpoint, as a Tinker API does."""
    directory = storage / "checkpoints" / "c"

    def write(beside: Path) -> None:
        (beside / "adapter_model.safetensors").write_bytes(b"weights")

    size = files.write_checkpoint(directory, write, {})
    columns = "path, model, kind, name, directory, config, optimizer, created, size"
    config = json.dumps({"base": "b", "lora": {"rank": 8}})
    row = (path, "run", "training", "final", str(directory), config, 0, 0.0, size)
    ledger = Ledger(storage / "ledger.sqlite")
    asyncio.run(
        ledger.write(f"INSERT INTO checkpoints ({columns}) VALUES (?,?,?,?,?,?,?,?,?)", *row)
    )
    ledger.close()
