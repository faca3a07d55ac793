"""Nothing outside `engines/` has an engine's words: routes, flags, variables, metrics, errors."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

import skyctl
from skyctl.wire.worker import WorkerMethod

PACKAGE = Path(skyctl.__file__).parent
ENGINES_WORDS = re.compile(
    r"""VLLM_\w+ | vllm[:_]\w | vllm\.\w                    # variables, metrics, modules
    | --worker-urls | --worker-ext | weight-transfer-config | enable-sleep-mode | enforce-eager
    | ^/(is_paused|pause|resume|sleep|is_sleeping|wake_up|server_info|collective_rpc|readiness)\b
    | /(add|remove|list)_worker | ^/metrics | ^/health | ^/(get_world_size|reset_\w+_cache)
    | _weight_update\b | weight_transfer_engine | ^/update_weights | ^/weight_(info|checker)
    | without\ a\ matching | Model\ reloading | is\ not\ implemented | Engine\ core""",
    re.VERBOSE,
)
ADVICE = {
    "cli/init.py": "the fleet files that `init` writes",
    "doctor/fleet_file.py": "what to change in them",
    "launch/local/segments.py": "what a killed server leaves in /dev/shm",
    "push/server_facts.py": "variables of NCCL's that vLLM reads too",
    "push/verify.py": "how to start a server that can digest",
    "core/urls.py": "what other programs want of servers",
    "supervisor/trainer_api.py": "the API that trainers' clients speak",
    "transfer/transports/nccl.py": "how to get vLLM's NCCL for the sender",
    "wire/nccl.py": "loads vLLM's NCCL, in servers and in the sender",
}
"""Sentences for people that name an engine's settings, and why there."""


class Module(NamedTuple):
    """`strings` are all but those that stand alone, which are documentation."""

    path: str
    strings: list[tuple[int, str]]
    imported: list[str]


@cache
def modules() -> list[Module]:
    paths = {file.relative_to(PACKAGE).as_posix(): file for file in sorted(PACKAGE.rglob("*.py"))}
    return [read(path, file) for path, file in paths.items() if not path.startswith("engines/")]


def read(path: str, file: Path) -> Module:
    module, alone = Module(path, [], []), set[int]()
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):  # parents first
        if isinstance(node, ast.Expr):
            alone.add(id(node.value))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in alone:
                module.strings.append((node.lineno, node.value))
        elif isinstance(node, ast.ImportFrom):
            module.imported.append(node.module or "")
        elif isinstance(node, ast.Import):
            module.imported.extend(name.name for name in node.names)
    return module


def test_an_engines_words_stay_in_its_package() -> None:
    found = {
        f"{module.path}:{line}: {text!r:.80}"
        for module in modules()
        for line, text in module.strings
        if module.path not in ADVICE and ENGINES_WORDS.search(text)
    }
    assert not found


def test_what_ray_needs_stays_with_its_launcher() -> None:
    known = [module.path for module in modules() if any("launch.ray" in m for m in module.imported)]
    assert {path for path in known if not path.startswith("launch/ray/")} == set()


@pytest.mark.parametrize(
    "text", ["/is_paused", "vllm:num_requests_running", "VLLM_API_KEY", "vllm.entrypoints.x"]
)
def test_those_words_would_be_found(text: str) -> None:
    assert ENGINES_WORDS.search(text)


INTERFACE = r"base|dialect|launches|logs|traffic|inside\.guard"


def test_nothing_imports_an_engine_but_its_interface() -> None:
    """The messages to its workers are in `skyctl/wire`. The guard belongs to no engine."""
    found = {
        f"{module.path}: {name}"
        for module in modules()
        for name in module.imported
        if re.match(
            r"skyctl\.engines\.(?!base$|dialect$|launches$|logs$|traffic$|inside\.guard$)\w", name
        )
    }
    assert not found


def test_a_method_of_workers_is_named_in_one_table_and_exists() -> None:
    extension = PACKAGE / "engines/vllm/inside/worker.py"
    methods = re.findall(r"    def (skyctl_\w+)\(", extension.read_text(encoding="utf-8"))
    assert sorted(methods) == sorted(WorkerMethod)
    named = {module.path for module in modules() for _, text in module.strings if text in methods}
    assert named == {"wire/worker.py"}
