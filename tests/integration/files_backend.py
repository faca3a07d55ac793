"""A transfer engine that a CPU can run, in vLLM's own classes: its NCCL and IPC engines need GPUs.

The trainer's side is a `TrainerWeightTransferEngine` of vLLM, with vLLM's own HTTP client; the
worker's side reads the files that an update names. Imports vLLM.
"""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from safetensors.torch import load_file, save_file
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from skyctl.engines.vllm.inside.engine import SkyctlWeightTransferEngine
from skyctl.engines.vllm.inside.worker import SkyctlWorkerExtension

BACKEND = "files"


@dataclass
class FilesInit(WeightTransferInitInfo):
    """There is nothing to open; these are of trainers that think so."""

    master_address: str = ""
    master_port: int = 0
    rank_offset: int = 0
    world_size: int = 0
    packed: bool = True


@dataclass
class FilesUpdate(WeightTransferUpdateInfo):
    """One file of tensors."""

    path: str = ""
    names: list[str] = field(default_factory=list)
    dtype_names: list[str] = field(default_factory=list)
    packed: bool = True
    """Senders that use NCCL say so, here or at the init."""


class FilesEngine(SkyctlWeightTransferEngine):
    """Loads tensors from files, layer by layer."""

    init_info_cls = FilesInit
    update_info_cls = FilesUpdate

    def init_transfer_engine(self, init_info: Any) -> None:
        self.shutdown()
        self._received = set()

    def receive_weights(self, update_info: Any) -> None:
        tensors = load_file(update_info.path)
        self.model.load_weights([(name, tensors[name]) for name in update_info.names])
        self._received.update(update_info.names)
        self._announced = set(self._received)


class FilesExtension(SkyctlWorkerExtension):
    """What workers have; loading it registers the engine."""


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, FilesEngine)


@dataclass
class FilesTrainerInit(TrainerInitInfo):
    """Where a trainer puts its files."""

    backend: ClassVar[str] = BACKEND


class FilesTrainer(TrainerWeightTransferEngine[FilesTrainerInit]):
    """Sends a state dict in two files."""

    init_info_cls = FilesTrainerInit

    @classmethod
    def trainer_init(cls, init_info: Any, *, client: Any, source: Any = None) -> FilesTrainer:
        client.init_weight_transfer_engine({})
        return cls(client=client, source=source)

    def send_weights(self) -> None:
        assert isinstance(self.source, Path)
        self.send(None, self.source)

    def send(self, version: str | None, checkpoint: Path) -> None:
        """All weights of a checkpoint, under this label."""
        files = [load_file(shard) for shard in checkpoint.glob("*.safetensors")]
        tensors = {name: tensor for file in files for name, tensor in file.items()}
        names = sorted(tensors)
        self.client.start_weight_update()
        with tempfile.TemporaryDirectory(dir="/dev/shm") as directory:
            for number, half in enumerate((names[::2], names[1::2])):
                path = f"{directory}/{number}.safetensors"
                save_file({name: tensors[name] for name in half}, path)
                self.client.update_weights({"path": path, "names": half})
            self.client.finish_weight_update(version)
