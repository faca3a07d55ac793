"""vLLM's argument names are asked of its parser, once per installation."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skyctl.engines.vllm.engine import accepts, known_arguments

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


def test_the_parser_is_asked_once_until_vllm_is_installed_anew(log: Path, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    python = interpreter(log, "/vllm 1", '["a-b", "no-a-b"]')
    assert known_arguments(python, cache=cache) == {"a-b", "no-a-b"}
    assert known_arguments(python, cache=cache) == {"a-b", "no-a-b"}
    assert questions(log) == 3  # which vLLM twice, its names once
    interpreter(log, "/vllm 2", '["c"]')
    assert known_arguments(python, cache=cache) == {"c"}


@pytest.mark.parametrize("answer", ["", "no JSON", "[]", "7"])
def test_no_answer_is_not_kept(log: Path, tmp_path: Path, answer: str) -> None:
    cache = tmp_path / "cache"
    assert known_arguments(interpreter(log, "/vllm 1", answer), cache=cache) == frozenset()
    assert known_arguments(interpreter(log, "/vllm 1", '["c"]'), cache=cache) == {"c"}


def test_without_vllm_or_interpreter_nothing_is_asked(log: Path, tmp_path: Path) -> None:
    assert known_arguments(interpreter(log, "", '["c"]'), cache=tmp_path) == frozenset()
    assert questions(log) == 1
    assert known_arguments(str(tmp_path / "none"), cache=tmp_path) == frozenset()


@pytest.mark.parametrize(
    ("name", "accepted"),
    [("max-len", True), ("max-l", True), ("max", False), ("max-len.x", True), ("x", False)],
)
def test_names_fields_and_unique_beginnings_are_accepted(name: str, accepted: bool) -> None:
    assert accepts(name, {"max-len", "max-size"}) is accepted


@pytest.mark.real
def test_the_installed_vllm_says_its_names(tmp_path: Path) -> None:
    known = known_arguments(sys.executable, cache=tmp_path)
    assert {"max-model-len", "enforce-eager", "no-enforce-eager", "enable-scale-out"} <= known
    assert "max-modle-len" not in known
