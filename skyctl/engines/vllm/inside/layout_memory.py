"""Memory that a worker copies parameters out of: the sender's, and its own beside the model."""

from __future__ import annotations

import base64
import pickle
from collections.abc import Mapping

import torch

_ALIGNMENT = 256


def memory_beside(
    parameters: Mapping[int, torch.Tensor], device: torch.device
) -> dict[int, torch.Tensor]:
    """Memory of the sizes of these parameters, all zero: their padding is.

    Raises:
        RuntimeError: there is not so much on the device.
    """
    places, total = {}, 0
    for number, octets in parameters.items():
        places[number] = total
        total += -(-octets.numel() // _ALIGNMENT) * _ALIGNMENT
    if device.type == "cuda" and (free := torch.cuda.mem_get_info(device)[0]) < total:
        raise RuntimeError(
            f"{total >> 20} MiB are staged beside the model, and {free >> 20} MiB are free"
        )
    memory = torch.zeros(total, dtype=torch.uint8, device=device)
    return {number: memory[at : at + parameters[number].numel()] for number, at in places.items()}


def sender_slots(payload: str, device: torch.device) -> torch.Tensor:
    """The sender's slots in this GPU's memory, as flat bytes; not a copy."""
    from torch.multiprocessing.reductions import rebuild_cuda_tensor
    from vllm import envs

    if not envs.VLLM_ALLOW_INSECURE_SERIALIZATION:
        raise RuntimeError("IPC handles need VLLM_ALLOW_INSECURE_SERIALIZATION=1")
    index = device.index
    handles = pickle.loads(base64.b64decode(payload))
    arguments = list(handles[str(torch.cuda.get_device_properties(index).uuid)])
    arguments[6] = index  # the device number in this process
    mapped: torch.Tensor = rebuild_cuda_tensor(*arguments)
    return mapped
