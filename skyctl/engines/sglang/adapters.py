"""LoRA adapters of one SGLang server: its routes, and what it would not read of an adapter. Read in
SGLang 0.5.14 to 0.5.23 (`lora/lora.py`, `lora/mem_pool.py`, `lora/lora_config.py`).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from skyctl.engines.base import Arguments, Refusal, ServedAdapter
from skyctl.engines.sglang.inside.adapters import LOAD, NAMED, UNLOAD
from skyctl.engines.sglang.state import SGLangState
from skyctl.errors import ServerError
from skyctl.wire.worker import WorkerMethod

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
"""What skyctl has its servers take LoRA for, unless the fleet file names others."""
_ATTENTION = frozenset({"q_proj", "k_proj", "v_proj", "o_proj"})
"""With others `lora/lora_manager.py` may wrap experts, whose parameters are renamed by that;
SGLang's loaders skip names that they do not know.
"""
_ALL = "all"
_STACKED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
}
_FIRST = {
    "k_proj": ("q_proj", "v_proj"),
    "v_proj": ("q_proj",),
    "q_proj": ("v_proj",),
    "up_proj": ("gate_proj",),
}
"""SGLang stacks modules only beside these: without them loading fails, or the first request with
the adapter ends the server.
"""
_UNREAD = ("use_rslora", "rank_pattern", "alpha_pattern")
_LAYER = re.compile(r"\.layers\.\d+\.")


class SGLangAdapters(SGLangState):
    """Adapters need skyctl's keeper in the server (`inside/adapters.py`)."""

    async def adapters(self) -> list[ServedAdapter]:
        """Versions that have lost their names are not listed: SGLang has read their files."""
        data = await self._field("GET", "/v1/models", "data")
        return self._understood(
            "/v1/models",
            lambda: [
                ServedAdapter(model["id"], model["root"]) for model in data if model.get("parent")
            ],
        )

    async def load_adapter(self, name: str, path: str) -> None:
        await self._lora_targets()
        await self._call("POST", LOAD, json={"lora_name": name, "lora_path": path})

    async def name_adapter(self, name: str, loaded: str) -> None:
        body = {"lora_name": name, "lora_path": f"{NAMED}{loaded}"}
        await self._lora_targets()
        await self._call("POST", LOAD, json=body)

    async def unload_adapter(self, name: str) -> None:
        await self._lora_targets()
        await self._call("POST", UNLOAD, json={"lora_name": name})

    async def ask_workers(
        self, method: str, kwargs: Arguments | None = None, *, timeout_s: float | None = None
    ) -> list[Any]:
        """What a worker would leave out of an adapter is known by its name and configuration; there
        are no other methods.
        """
        if method != WorkerMethod.ADAPTER_FIT:
            self._lacks("workers with skyctl's methods", Refusal.NO_METHOD)
        targets, question = await self._lora_targets(), kwargs or {}
        return [adapter_fit(question["config"], question["names"], targets)]

    async def _lora_targets(self) -> tuple[str, ...]:
        """Raises ServerError: it has no keeper that names adapters, or takes no adapters."""
        state = await self._state()
        if state is None:
            raise ServerError(
                f"{self.target.name} cannot give names to adapters: it runs without skyctl's "
                "keeper; let skyctl start it, or start it with `python -m "
                "skyctl.engines.sglang.inside.serve` in place of `sglang serve`"
            )
        if state.lora is None:
            error = ServerError(
                f"{self.target.name}: {Refusal.NO_ADAPTERS}; start it with --enable-lora, "
                "--max-lora-rank and --lora-target-modules, or by a newer skyctl"
            )
            error.refusal = Refusal.NO_ADAPTERS
            raise error
        return state.lora

    def _lacks(self, feature: str, refusal: Refusal) -> NoReturn:
        error = ServerError(f"{self.target.name}: SGLang servers have no {feature}")
        error.refusal = refusal
        raise error


def config_problem(settings: Mapping[str, Any], config: Mapping[str, Any] | None) -> str:
    """Why an update would leave parts of a server with adapters wrong, by its settings, as
    arguments or as it reports them, and its model's config.json; "" if it would not. Without a
    config.json (None) it might.
    """
    named = {name.replace("-", "_"): value for name, value in settings.items()}
    if not named.get("enable_lora"):
        return ""
    if named.get("quantization") or (config and _is_set(config, "quantization_config")):
        return (
            "it takes LoRA adapters for quantized layers, where SGLang loads new weights but not "
            "their scales"
        )
    if config is None:
        model = named.get("model_path") or "MODEL"
        return (
            "it takes LoRA adapters, and whether SGLang would load all weights follows from its "
            f"model's config.json, which is not on this machine: hf download {model} config.json, "
            "or copy it to where the servers have it"
        )
    targets = named.get("lora_target_modules")
    attention = isinstance(targets, Sequence) and targets and _ATTENTION.issuperset(targets)
    if not attention and _is_set(config, "experts"):
        return (
            "it takes LoRA adapters for the experts of its model, where SGLang skips new weights "
            "without an error; start it without `lora`, or with `lora-target-modules` of attention "
            f"alone ({', '.join(sorted(_ATTENTION))})"
        )
    return ""


def _is_set(config: Mapping[str, Any], ending: str) -> bool:
    """Whether a key with this ending has a value that is not 0, in the whole of a config.json."""
    return any(
        (value and name.endswith(ending)) or (isinstance(value, dict) and _is_set(value, ending))
        for name, value in config.items()
    )


def adapter_fit(
    config: Mapping[str, Any], names: Sequence[str], targets: Sequence[str]
) -> dict[str, Any]:
    """What a server with these `--lora-target-modules` would leave out of an adapter: keys of its
    configuration and combinations of modules, `unread`, and tensors, `unapplied`.
    """
    stacked = {_STACKED.get(target, target) for target in targets}
    unread = {key for key in _UNREAD if config.get(key)}
    unapplied, beside = [], defaultdict[str, set[str]](set)
    for name in names:
        parent, _, module = name.partition(".lora_")[0].rpartition(".")
        beside[parent].add(module)
        if not _LAYER.search(name) or not _is_taken(module, stacked):
            unapplied.append(name)
    for modules in beside.values():
        for module in modules:
            missing = [first for first in _FIRST.get(module, ()) if first not in modules]
            unread |= {f"{module} without {first}" for first in missing}
    listed = config.get("target_modules") or ()
    if isinstance(listed, str):
        if listed not in (_ALL, "all-linear"):
            unread.add("target_modules that are a pattern")
    else:
        last = (str(module).rpartition(".")[2] for module in listed)
        unread |= {
            f"{module} (target_modules)" for module in last if not _is_taken(module, stacked)
        }
    return {"unread": sorted(unread), "unapplied": unapplied}


def _is_taken(module: str, stacked: set[str]) -> bool:
    return _ALL in stacked or _STACKED.get(module, module) in stacked
