"""`scripts/engine-changes`, and what it says that skyctl reads."""

from __future__ import annotations

import importlib.util
import sys
import tomllib
import zipfile
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from typing import Any

import pytest

from skyctl.engines.sglang.engine import SGLANG
from skyctl.engines.vllm.server import METRICS

ROOT = Path(__file__).resolve().parents[3]
LISTS = tomllib.loads((ROOT / "scripts/engine-reads.toml").read_text(encoding="utf-8"))
WATCHED = [(entry["symbol"], entry) for listed in LISTS.values() for entry in listed["watch"]]


@pytest.fixture(scope="module")
def script() -> Any:
    """scripts/engine-changes, which is no part of the package."""
    path = str(ROOT / "scripts" / "engine-changes")
    spec = importlib.util.spec_from_loader(
        "engine_changes", SourceFileLoader("engine_changes", path)
    )
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(ROOT / "scripts"))
    sys.modules["engine_changes"] = module
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(ROOT / "scripts"))
        del sys.modules["engine_changes"]
    return module


def wheel(script: Any, path: Path, version: str, sources: Mapping[str, str]) -> Any:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(
            "vllm-1.dist-info/METADATA", f"Version: {version}\nRequires-Dist: torch==1\n"
        )
        for name, text in {"__init__.py": "", **sources}.items():
            archive.writestr(f"vllm/{name}", text)
    return script.Wheel(path, "vllm")


READER = """
from vllm.base import Source
class Own(Source):
    def metadata(self): ...
PATH, METRIC, VARIABLE, FLAG = "/pause", "vllm:running", "VLLM_TOKEN", "--max-len"
ERROR = "because no update is open"
"""
LISTED = {
    "engine": "vllm",
    "requires": ["torch"],
    "arguments": ["vllm/"],
    "routes": ["vllm/"],
    "packages": ["vllm.transfer"],
    "metrics": "vllm:",
    "variables": "VLLM_[A-Z]+",
    "messages": ["no update is open"],
    "watch": [
        {
            "symbol": "vllm.core:Core",
            "members": "pause",
            "read_by": ["docs/pauses.md"],
            "because": "what a pause does",
        }
    ],
}
OLD = {
    "base.py": "class Source:\n    def metadata(self): ...\n    def other(self): ...\n",
    "core.py": "class Core:\n    def pause(self, mode):\n        return mode\n",
    "routes.py": "@app.post('/pause')\ndef pause(): ...\n",
    "metrics.py": "running = Gauge('vllm:running')\n",
    "errors.py": "raise Error('no update '\n    'is open')\nX = 'VLLM_TOKEN'\n",
    "arguments.py": "parser.add_argument('--max-len')\n",
    "transfer/m2n.py": "",
    "experts.py": "class Experts:\n    def local_expert_ids(self): ...\n",
}
CASES = {
    "nothing": ({}, []),
    "what is not read": (
        {"base.py": "class Source:\n    def metadata(self): ...\n    def other(self, more): ...\n"},
        [],
    ),
    "comments": ({"core.py": OLD["core.py"].replace("return", "# a\n        return")}, []),
    "a class moves": (
        {"base.py": "", "common.py": OLD["base.py"]},
        ["moved    vllm.base:Source  vllm.common"],
    ),
    "a class is gone": ({"base.py": ""}, ["gone     vllm.base:Source"]),
    "a method becomes a property": (
        {"base.py": "class Source:\n    @property\n    def metadata(self): ...\n"},
        ["changed  vllm.base:Source.metadata  no decorator → @property"],
    ),
    "a hook of subclasses": (
        {"base.py": OLD["base.py"] + "    def __init_subclass__(cls): ...\n"},
        ["new      vllm.base:Source.__init_subclass__"],
    ),
    "a watched method takes more": (
        {"core.py": "class Core:\n    def pause(self, mode, now):\n        return mode\n"},
        ["changed  vllm.core:Core.pause  +now"],
    ),
    "a watched method does something else": (
        {"core.py": "class Core:\n    def pause(self, mode):\n        raise mode\n"},
        ["changed  vllm.core:Core.pause  +1 −1 lines"],
    ),
    "a watched method is new": (
        {"core.py": OLD["core.py"] + "    def refuse_while_paused(self): ...\n"},
        ["new      vllm.core:Core.refuse_while_paused"],
    ),
    "a name that code inside the engine uses is gone": (
        {"experts.py": ""},
        ["gone     name local_expert_ids"],
    ),
    "a module is gone": ({"transfer/m2n.py": None}, ["gone     vllm.transfer.m2n  module"]),
    "a route is gone": ({"routes.py": ""}, ["gone     route /pause"]),
    "a route is new": (
        {"routes.py": OLD["routes.py"] + "@a.get('/v1/models')\n@a.get('/drop')\ndef f(): ...\n"},
        [
            "new      route /drop  closed: the control token opens it",
            "new      route /v1/models  the API key opens it",
        ],
    ),
    "an argument is gone": ({"arguments.py": ""}, ["gone     argument --max-len"]),
    "an argument is deprecated": (
        {"arguments.py": OLD["arguments.py"] + "X = '--max-len is deprecated'\n"},
        ["changed  argument --max-len  --max-len is deprecated"],
    ),
    "a metric is gone": ({"metrics.py": ""}, ["gone     metric vllm:running"]),
    "a variable is gone": (
        {"errors.py": "raise Error('no update is open')\n"},
        ["gone     variable VLLM_TOKEN"],
    ),
    "a variable is read in one more place": (
        {"more.py": "X = 'VLLM_TOKEN'\n"},
        ["changed  variable VLLM_TOKEN  also in vllm/more.py"],
    ),
    "an error has other words": (
        {"errors.py": "raise Error('nothing is open')\nX = 'VLLM_TOKEN'\n"},
        ["gone     message 'no update is open'"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_changed_between_two_wheels_is_reported(
    script: Any, tmp_path: Path, name: str
) -> None:
    changed, expected = CASES[name]
    (tmp_path / "skyctl").mkdir()
    (tmp_path / "skyctl" / "reader.py").write_text(READER)
    (tmp_path / "skyctl" / "inside").mkdir()
    (tmp_path / "skyctl" / "inside" / "layout.py").write_text("of_vllm.local_expert_ids()")
    reads = script.what_is_read("vllm", ["skyctl/"], tmp_path)
    sources = {file: text for file, text in {**OLD, **changed}.items() if text is not None}
    old = wheel(script, tmp_path / "old.whl", "0.32.0", OLD)
    new = wheel(script, tmp_path / "new.whl", "0.32.1", sources)
    changes = list(script.Comparison(old, new, reads, LISTED).changes())
    assert [line for line in script.report(iter(changes), diff=False) if line[0] != " "] == expected
    read_by = {"skyctl/reader.py", "skyctl/inside/layout.py", "docs/pauses.md: what a pause does"}
    unread = {"new", "note"} if name != "a module is gone" else {"gone"}
    assert {change.readers for change in changes if change.kind not in unread} <= read_by


@pytest.mark.parametrize("package", LISTS)
def test_what_is_collected_is_what_the_code_reads(script: Any, package: str) -> None:
    reads = script.what_is_read(package, LISTS[package]["code"])
    for message in LISTS[package]["messages"]:
        assert any(message in text for text in reads.constants)
    if package == "vllm":
        assert reads.constants.keys() >= {*METRICS, "/pause", "/finish_weight_update"}
        # in a script that another interpreter runs
        assert ("vllm.entrypoints.openai.cli_args", "make_arg_parser") in reads.imports
    else:
        assert reads.constants.keys() >= {*SGLANG.reserved.server_args, "/weights_checker"}
        assert ("sglang.srt.server_args", "prepare_server_args") in reads.imports


@pytest.mark.parametrize(("symbol", "entry"), WATCHED, ids=[symbol for symbol, _ in WATCHED])
def test_what_is_watched_exists_and_so_do_its_readers(symbol: str, entry: dict[str, Any]) -> None:
    assert all((ROOT / path).is_file() for path in entry["read_by"])
    module, _, name = symbol.partition(":")
    spec = importlib.util.find_spec(module.partition(".")[0])
    if spec is None or spec.origin is None:
        pytest.skip(f"{module.partition('.')[0]} is not installed")
    below = Path(spec.origin).parent.joinpath(*module.split(".")[1:])
    file = below.with_suffix(".py") if below.with_suffix(".py").exists() else below / "__init__.py"
    source = file.read_text(encoding="utf-8")
    for part in filter(None, name.split(".")):
        assert f"class {part}" in source or f"def {part}" in source
