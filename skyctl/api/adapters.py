"""`Fleet.adapters`: LoRA adapters from a directory or a trainer's memory."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyctl.adapters.change import AdapterChange, LoadAdapter, UnloadAdapter
from skyctl.adapters.peft import write_adapter
from skyctl.checkpoints.live import NamedTensors, each_tensor
from skyctl.checkpoints.staging import staged
from skyctl.store.adapters import AdapterVersion
from skyctl.store.paths import expanded

if TYPE_CHECKING:
    from skyctl.api.session import SessionHolder


class Adapters:
    """The LoRA adapters of one fleet. Requests select them by name, as a model.

        await fleet.adapters.load("math", "./math-adapter")
        await fleet.adapters.sync("math", peft.get_peft_model_state_dict(model), config)

    A change is made on every server or on none. Nothing is paused: running requests finish with the
    version they began with, and answers say which that is (`"model": "math@2"`).
    """

    def __init__(self, fleet: SessionHolder) -> None:
        self._fleet = fleet

    async def list(self) -> tuple[AdapterVersion, ...]:
        """Every adapter, with its version, digest and the servers that have it."""
        async with self._fleet._connected() as fleet:
            return await fleet.adapters()

    async def load(
        self,
        name: str,
        source: str | PathLike[str] | NamedTensors,
        config: Mapping[str, Any] | None = None,
        *,
        any_base: bool = False,
        timeout_s: float | None = None,
    ) -> AdapterChange:
        """Serve an adapter under a new name.

        `source` is a directory that PEFT's save_pretrained wrote, or (name, tensor) pairs in PEFT's
        names: `base_model.model.<module>.lora_A.weight` [rank, in] and `.lora_B.weight` [out,
        rank]. With tensors, `config` holds the keys of adapter_config.json: at least `r` and
        `lora_alpha`. The fleet makes a copy, in memory if it fits: the source may change once this
        returns. `any_base` accepts an adapter that says it was trained on another model.

        Raises:
            NotFoundError, PreflightError, UsageError: refused; nothing was sent.
            ConflictError: the name is taken, there is no room, or somebody else acts on the fleet.
            PartialFailure, ServerError, DeadlineExceeded: a server failed; it was undone on all,
                and `details["outcomes"]` says what became of each.
        """
        return await self._serve(name, source, config, True, any_base, timeout_s)

    async def sync(
        self,
        name: str,
        source: str | PathLike[str] | NamedTensors,
        config: Mapping[str, Any] | None = None,
        *,
        create: bool = False,
        any_base: bool = False,
        timeout_s: float | None = None,
    ) -> AdapterChange:
        """Bring a name to its next version; with `create`, also one that is new. As `load`.

        Raises:
            NotFoundError: the name is new, and `create` is not set.
        """
        return await self._serve(
            name, source, config, None if create else False, any_base, timeout_s
        )

    async def unload(self, name: str, *, timeout_s: float | None = None) -> AdapterChange:
        """Stop serving an adapter; running requests end with it. Raises as `load`."""
        async with self._fleet._connected() as fleet:
            return await fleet.unload_adapter(UnloadAdapter(name=name, timeout_s=timeout_s))

    async def _serve(
        self,
        name: str,
        source: str | PathLike[str] | NamedTensors,
        config: Mapping[str, Any] | None,
        new: bool | None,
        any_base: bool,
        timeout_s: float | None,
    ) -> AdapterChange:
        def asked(directory: Path) -> LoadAdapter:
            return LoadAdapter(
                name=name,
                directory=str(expanded(directory).absolute()),
                new=new,
                any_base=any_base,
                timeout_s=timeout_s,
            )

        async with self._fleet._connected() as fleet:
            if isinstance(source, str | PathLike):
                return await fleet.load_adapter(asked(Path(fspath(source))))
            found = [pair async for pair in each_tensor(source)]
            total = sum(tensor.nbytes for _, tensor in found if hasattr(tensor, "nbytes"))
            place = await fleet.staging()
            with staged(place.adapters, needed_bytes=total, in_memory=place.in_memory) as directory:
                await write_adapter(found, config, directory)
                return await fleet.load_adapter(asked(directory))
