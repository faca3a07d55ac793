"""What SGLang lacks for LoRA adapters that change under traffic: behind skyctl's keeper.

SGLang (0.5.14 to 0.5.23, `lora/lora_registry.py`) has one registry of names in its front end. Each
name has an id that no other adapter ever gets, and a request runs with the id that its name had
when it came.

- **A name for a version.** `/load_lora_adapter` with the path `skyctl:NAME@7` gives the name to the
  adapter that was loaded as NAME@7: one assignment, between two requests.
- **Versions end with their requests.** A version that has lost its name is kept until no request
  runs with it, and is then unloaded. SGLang's own unload waits for these requests under the lock
  that every load needs, and while the server is paused it never ends.
- **An unloaded adapter stays unloaded.** SGLang loads one again when a request names it
  (`lora_ref_cache`).
- **`model` names an adapter.** SGLang takes only `BASE:NAME` for one, and answers any other name
  from the base model.

Standard library only.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from functools import wraps
from typing import Any

LOAD, UNLOAD = "/load_lora_adapter", "/unload_lora_adapter"
NAMED = "skyctl:"
BASE_ALONE = frozenset({"/v1/responses", "/v1/score", "/v1/rerank", "/v1/classify"})
"""Routes that answer from the base model, whatever adapter `model` names."""
_LOOK_S = 1.0
_DEFAULT = "default"  # what a request that names no model has for a name
_LOG = logging.getLogger("uvicorn.error")


class Adapters:
    """The names of one server. `manager` returns its front end, and `unload` makes SGLang's request
    to drop an adapter, of a name and an id.
    """

    def __init__(self, manager: Callable[[], Any], unload: Callable[..., Any]) -> None:
        self._manager = manager
        self._unload = unload
        self._versions: dict[str, str] = {}  # by the id of an adapter that has a name now
        self._retired: dict[str, Any] = {}  # adapters without a name, by version
        self._dropping: asyncio.Task[None] | None = None

    @property
    def _registry(self) -> dict[str, Any]:
        registry: dict[str, Any] = self._manager().lora_registry._registry
        return registry

    def targets(self) -> list[str] | None:
        """The modules that it takes LoRA for; None if it takes none."""
        arguments = self._manager().server_args
        if not arguments.enable_lora:
            return None
        return sorted(arguments.lora_target_modules or ())

    def serves(self, name: object) -> bool:
        """Whether it is the name of an adapter."""
        return bool(self._manager().server_args.enable_lora) and name in self._registry

    def give(self, name: str, version: str) -> str:
        """Make `name` stand for what was loaded as `version`. Returns why not; "" if it does."""
        registry = self._registry
        current = registry.get(name)
        if current is not None and self._versions.get(current.lora_id) == version:
            return ""
        if not name or self._is_base(name) or version not in registry:
            return f"{name!r} cannot be a name of {version!r}, which is not loaded"
        if current is not None:
            self._retire(name, current)
        adapter = registry.pop(version)
        self._versions[adapter.lora_id] = version
        registry[name] = _renamed(adapter, name)
        return ""

    def unload(self, name: str) -> None:
        """Take a name away; what has none counts as unloaded."""
        self._manager().lora_ref_cache.pop(name, None)
        if (adapter := self._registry.pop(name, None)) is not None:
            self._retire(name, adapter)

    def restore(self, version: str, path: str) -> bool:
        """Whether a version that had lost its name is loaded again: SGLang still has it."""
        adapter = self._retired.get(version)
        if adapter is None or adapter.lora_path != path:
            return False
        del self._retired[version]
        self._registry[version] = _renamed(adapter, version)
        return True

    def loaded(self, name: str) -> None:
        """SGLang has loaded it, and must not do so again by itself."""
        self._manager().lora_ref_cache.pop(name, None)

    def _is_base(self, name: str) -> bool:
        return name in base_names(self._manager())

    def _retire(self, name: str, adapter: Any) -> None:
        self._retired[self._versions.pop(adapter.lora_id, name)] = adapter
        if self._dropping is None or self._dropping.done():
            self._dropping = asyncio.create_task(self._drop_unused())

    async def _drop_unused(self) -> None:
        """Drop each version once no request has it for two looks: one that has just been accepted
        does not show its id yet, and one that has just ended may be in the scheduler's last batch.
        """
        unused: set[str] = set()
        while self._retired:
            await asyncio.sleep(_LOOK_S)
            manager = self._manager()
            before, used = unused, used_ids(manager)
            unused = {v for v, adapter in self._retired.items() if adapter.lora_id not in used}
            if manager.is_pause:
                unused = set()  # the scheduler's last batch ends when it is resumed
            for version in before & unused:
                if version in self._retired:  # it may have been restored during an earlier drop
                    await self._drop(version)

    async def _drop(self, version: str) -> None:
        manager, adapter = self._manager(), self._retired.pop(version)
        try:
            async with manager.lora_update_lock:
                request = self._unload(lora_name=version, lora_id=adapter.lora_id)
                await manager.update_lora_adapter_communicator(request)
        except Exception:  # it stays in memory, and the next ones are dropped
            _LOG.exception("the LoRA adapter %s was not dropped", version)
        manager.lora_registry._counters.pop(adapter.lora_id, None)


def choose_by_model(serving: Any, refusal: Callable[..., Exception]) -> None:
    """Teach `serving`, the class of SGLang's OpenAI routes, that `model` names an adapter, and that
    a server with adapters has no model of another name.
    """
    resolve = serving._resolve_lora_path

    @wraps(resolve)
    def by_model(self: Any, model: str, explicit: Any) -> Any:
        manager = self.tokenizer_manager
        if not manager.server_args.enable_lora:
            return resolve(self, model, explicit)
        if model in manager.lora_registry._registry:
            return model
        base = base_names(manager)
        begins = tuple(f"{name}:" for name in base)
        if model and model not in base and not model.startswith(begins):
            raise refusal(status_code=404, detail=f"The model `{model}` does not exist.")
        return resolve(self, model, explicit)

    serving._resolve_lora_path = by_model


def base_names(manager: Any) -> set[str]:
    """The names of the model itself. During an update from disk it is named after its directory."""
    arguments = manager.server_args
    named = {manager.served_model_name, arguments.served_model_name, arguments.model_path}
    return {name for name in named if name} | {_DEFAULT}


def used_ids(manager: Any) -> set[Any]:
    """The ids of adapters that requests run with; a batch has one for each of its prompts."""
    used: set[Any] = set()
    for state in list(manager.rid_to_state.values()):
        ids = getattr(state.obj, "lora_id", None)
        used.update(ids if isinstance(ids, list) else [ids])
    return used


def _renamed(adapter: Any, name: str) -> Any:
    return type(adapter)(
        lora_id=adapter.lora_id, lora_name=name, lora_path=adapter.lora_path, pinned=adapter.pinned
    )
