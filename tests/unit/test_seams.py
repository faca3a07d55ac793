"""Nothing outside `engines/` has an engine's words: routes, flags, variables, metrics, errors."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import skyctl

PACKAGE = Path(skyctl.__file__).parent
ENGINES_WORDS = re.compile(
    r"""VLLM_\w+ | vllm[:_]\w | vllm\.(?!inside)\w          # variables, metrics, modules
    | --worker-urls | --worker-ext | weight-transfer-config | enable-sleep-mode | enforce-eager
    | ^/(is_paused|pause|resume|sleep|is_sleeping|wake_up|server_info|collective_rpc|readiness)\b
    | /(add|remove|list)_worker | ^/metrics | ^/health | ^/(get_world_size|reset_\w+_cache)
    | _weight_update\b | weight_transfer_engine | ^/update_weights | ^/weight_(info|checker)
    | without\ a\ matching | Model\ reloading | is\ not\ implemented | Engine\ core""",
    re.VERBOSE,
)
ADVICE = {
    "core/scaffold.py": "the fleet files that `init` writes",
    "doctor/fleet_file.py": "what to change in them",
    "launch/local/segments.py": "what a killed server leaves in /dev/shm",
    "push/server_facts.py": "variables of NCCL's that vLLM reads too",
    "push/verify.py": "how to start a server that can digest",
    "service/formats.py": "what other programs want of servers",
    "transfer/transports/nccl.py": "loads vLLM's NCCL into the sender",
}
"""Sentences for people that name an engine's settings, and why there."""


@cache
def modules() -> list[tuple[str, ast.Module]]:
    paths = {file.relative_to(PACKAGE).as_posix(): file for file in sorted(PACKAGE.rglob("*.py"))}
    return [
        (path, ast.parse(file.read_text(encoding="utf-8")))
        for path, file in paths.items()
        if not path.startswith("engines/")
    ]


def strings(tree: ast.Module) -> Iterator[ast.Constant]:
    """Every string but those that stand alone: documentation."""
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
            yield node


def test_an_engines_words_stay_in_its_package() -> None:
    found = {
        f"{path}:{node.lineno}: {node.value!r:.80}"
        for path, tree in modules()
        for node in strings(tree)
        if path not in ADVICE and ENGINES_WORDS.search(str(node.value))
    }
    assert not found


@pytest.mark.parametrize(
    "text", ["/is_paused", "vllm:num_requests_running", "VLLM_API_KEY", "vllm.entrypoints.x"]
)
def test_those_words_would_be_found(text: str) -> None:
    assert ENGINES_WORDS.search(text)


def test_nothing_imports_an_engine_but_the_protocol_of_its_workers() -> None:
    """What runs in an engine's workers is skyctl's own, and so are the messages to it."""
    found = {
        f"{path}: {name}"
        for path, tree in modules()
        for node in ast.walk(tree)
        for name in imported(node)
        if re.match(r"skyctl\.engines\.(?!base$|logs$|vllm\.inside\.)\w", name)
    }
    assert not found


def imported(node: ast.AST) -> list[str]:
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return [name.name for name in node.names] if isinstance(node, ast.Import) else []
