"""vLLM's arguments are asked of its parser, once per installation."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skyctl.engines.vllm.arguments import argument_problem, known_arguments
from skyctl.engines.vllm.command import server_flags

_INTERPRETER = """#!/bin/sh
echo asked >> {log}
case "$3" in
*find_spec*) echo "{installation}" ;;
*) echo 'a line of logging'; echo '{answer}' ;;
esac
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


def interpreter(log: Path, installation: str, answer: str) -> str:
    script = log.with_name("python")
    script.write_text(_INTERPRETER.format(log=log, installation=installation, answer=answer))
    script.chmod(0o755)
    return str(script)


def questions(log: Path) -> int:
    return len(log.read_text().splitlines())


def answer(*names: str) -> str:
    return json.dumps({name: ["str", None, "", name] for name in names})


def test_the_parser_is_asked_once_until_vllm_is_installed_anew(log: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    python = interpreter(log, "/vllm 1", answer("a-b", "no-a-b"))
    assert set(known_arguments(python, cache=cache)) == {"a-b", "no-a-b"}
    assert set(known_arguments(python, cache=cache)) == {"a-b", "no-a-b"}
    assert questions(log) == 3  # which vLLM twice, its names once
    interpreter(log, "/vllm 2", answer("c"))
    assert set(known_arguments(python, cache=cache)) == {"c"}


@pytest.mark.parametrize("printed", ["", "no JSON", "{}", "7", '["a"]', '{"a": 1}'])
def test_no_answer_is_not_kept(log: Path, tmp_path: Path, printed: str) -> None:
    cache = tmp_path / "cache"
    assert known_arguments(interpreter(log, "/vllm 1", printed), cache=cache) == {}
    assert set(known_arguments(interpreter(log, "/vllm 1", answer("c")), cache=cache)) == {"c"}


@pytest.mark.parametrize("home", ["common", "launchers", "openai"])  # 0.33, 0.32, before
def test_the_parser_is_where_the_version_has_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, home: str
) -> None:
    parser = "    parser.add_argument('--max-len', type=int)\n    return parser\n"
    for file, source in {
        "__init__.py": "",
        f"entrypoints/{home}/cli_args.py": f"def make_arg_parser(parser):\n{parser}",
        "utils/argparse_utils.py": "from argparse import ArgumentParser as FlexibleArgumentParser",
    }.items():
        path = tmp_path / "vllm" / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    python = tmp_path / "python"  # another interpreter, so that it looks for vLLM itself
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    found = known_arguments(str(python), cache=tmp_path / "cache")
    assert found["max-len"].kind == "int"


def test_without_vllm_or_interpreter_nothing_is_asked(log: Path, tmp_path: Path) -> None:
    assert known_arguments(interpreter(log, "", answer("c")), cache=tmp_path) == {}
    assert questions(log) == 1
    assert known_arguments(str(tmp_path / "none"), cache=tmp_path) == {}


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("max-len", True), ("max-l", True), ("max", False), ("max-len.x", True), ("x", False)],
)
def test_names_fields_and_unique_beginnings_are_accepted(name: str, accepted: bool) -> None:
    assert (argument_problem(name, 1, {"max-len", "max-size"}) == "") is accepted


_PARSE = """
import json, sys
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before 0.33
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = make_arg_parser(FlexibleArgumentParser())
def accepted(flags):
    try:
        parser.parse_args(flags)
    except SystemExit:
        return False
    return True
print(json.dumps([accepted(flags) for flags in json.loads(sys.argv[1])]))
"""
VALUES: list[tuple[str, Any]] = [
    *(("max-model-len", value) for value in (4096, "4k", "4K", "1.5k", "auto", "lots", "k4", -1)),
    *(("max-num-seqs", value) for value in (4, "4", 4.5, "many", True, [4])),
    *(("gpu-memory-utilization", value) for value in (0.5, "0.5", "half")),
    *(("dtype", value) for value in ("float32", "flot32")),
    *(("compilation-config", value) for value in ({"mode": 3}, "x")),
    *(("allowed-origins", value) for value in ('["*"]', ["*"])),
    *(("enforce-eager", value) for value in (True, False)),
    ("enable-scale-out", True),
    ("lora-target-modules", ["q_proj", "v_proj"]),
]


@pytest.mark.real
def test_the_installed_vllm_says_its_arguments_and_agrees_on_values(tmp_path: Path) -> None:
    known = known_arguments(sys.executable, cache=tmp_path)
    assert {"max-model-len", "enforce-eager", "no-enforce-eager", "enable-scale-out"} <= set(known)
    assert "max-modle-len" not in known
    assert argument_problem("cc.mode", 3, known).endswith("write `compilation-config.mode`")
    assert argument_problem("O3", True, known).endswith("write `optimization-level: N`")
    flags = json.dumps([server_flags({name: value}) for name, value in VALUES])
    script = [sys.executable, "-c", _PARSE, flags]
    parsed = subprocess.run(script, capture_output=True, check=True, text=True).stdout
    accepted = [argument_problem(name, value, known) == "" for name, value in VALUES]
    assert list(zip(VALUES, accepted, strict=True)) == list(
        zip(VALUES, json.loads(parsed.splitlines()[-1]), strict=True)
    )
    assert argument_problem("enforce-eager", "yes", known)  # vLLM fails later, at the next word
