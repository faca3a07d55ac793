"""Fleet files that override each other, standard input, and `.env` beside a file."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from skyctl.errors import FleetFileError
from skyctl.fleetfile.load import load_fleet
from skyctl.fleetfile.yaml_source import read_yaml

BASE = """
name: demo
model: ./a
replicas: 2
x-common: &common {max-model-len: 4096, seed: 1}
args: {<<: *common, enforce-eager: true}
env:
  MODE: "017"
  TOKEN: ${TOKEN}
ports: [8000, 8001]
"""


@pytest.fixture(autouse=True)
def directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def written(**texts: str) -> list[Path]:
    files = [Path(f"{name}.yaml") for name in texts]
    for file, text in zip(files, texts.values(), strict=True):
        file.write_text(text)
    return files


def refused(*files: Path, **environ: str) -> FleetFileError:
    with pytest.raises(FleetFileError) as caught:
        load_fleet(*files, environ=environ)
    return caught.value


def test_mappings_are_merged_and_all_else_is_replaced() -> None:
    files = written(
        base=BASE,
        prod="replicas: 1\nargs: {seed: 7}\nenv: {EXTRA: yes}\nports: [9000]\n",
        last="env: {MODE: last}\nmodel:\n",
    )
    loaded = load_fleet(*files[:2], environ={"TOKEN": "t"})
    config = loaded.config
    assert config.args == {"max-model-len": 4096, "seed": 7, "enforce-eager": True}
    assert config.env == {"MODE": "017", "TOKEN": "t", "EXTRA": "yes"}
    assert (config.model, config.replicas, config.ports) == ("./a", 1, [9000])
    (problem,) = refused(*files, TOKEN="t").details["problems"]
    assert problem["message"].startswith("`model` is missing")


def test_a_problem_names_the_file_that_its_value_is_from() -> None:
    base, prod = written(
        base=BASE + "host: 127.0.0.1\n", prod="replicas: none\nrestart:\n  max: x\n"
    )
    lines = refused(base, prod, TOKEN="t").message.splitlines()
    assert lines[0] == (
        "prod.yaml:1: replicas: expected a whole number or a list of groups, got 'none'"
    )
    assert lines[1].startswith("prod.yaml:3: restart: unknown key 'max'")
    base.write_text(BASE + "hots: x\n")
    assert refused(base, prod, TOKEN="t").details["problems"][0]["file"] == "base.yaml"
    prod.write_text("services: {}\n")
    assert refused(base, prod, TOKEN="t").message.startswith(
        "prod.yaml:1: this is a Docker Compose"
    )


def test_the_merged_text_has_variables_as_written_and_loads_as_the_files_do() -> None:
    files = written(base=BASE, prod="args: {seed: '${SEED:-7}'}\nreplicas: ${N:-1}\n")
    environ = {"TOKEN": "s3cret", "N": "3"}
    loaded = load_fleet(*files, environ=environ)
    assert "s3cret" not in loaded.source.text and loaded.config.replicas == 3
    Path("merged.yaml").write_text(loaded.source.text)
    assert load_fleet(Path("merged.yaml"), environ=environ).config == loaded.config


scalars = st.sampled_from(["a", "017", "yes", "1.5", "", "~", "${A}", "x: y", "# z", "2026-01-01"])
documents: Any = st.dictionaries(
    st.sampled_from("abcd"),
    st.recursive(
        scalars | st.none() | st.integers() | st.booleans(),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcd"), inner),
        max_leaves=6,
    ),
    min_size=1,
)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents, documents, st.sampled_from([None, True]))
def test_the_merged_text_of_any_two_files_has_their_merged_values(
    base: Any, other: Any, flow: bool | None
) -> None:
    environ = {"A": "true"}
    first, second = (
        read_yaml(yaml.safe_dump(document, default_flow_style=flow), environ)
        for document in (base, other)
    )
    if first.problems or second.problems:  # a variable that has to be quoted
        return
    both = first.overridden_by(second)
    again = read_yaml(both.text, environ)
    assert (again.problems, again.value) == ([], both.value)


def test_a_file_may_come_from_standard_input(monkeypatch: pytest.MonkeyPatch) -> None:
    from skyctl.fleetfile import load

    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"replicas: 5\n")))
    load._standard_input.cache_clear()
    files = written(base=BASE)
    for _ in range(2):  # a command may look twice
        assert load_fleet(*files, Path("-"), environ={"TOKEN": "t"}).config.replicas == 5
    load._standard_input.cache_clear()


def test_the_env_file_has_what_the_environment_lacks(directory: Path) -> None:
    files = written(base="name: a\nmodel: ${MODEL}\nargs: {x: '${X}', y: '${Y:-y}', z: '${Z-z}'}\n")
    (directory / ".env").write_text(
        "# settings\n\nexport MODEL=./m # the small one\nX='a # ${b}'\nY=\nZ=\n"
    )
    config = load_fleet(*files, environ={}).config
    assert (config.model, config.args) == ("./m", {"x": "a # ${b}", "y": "y", "z": ""})
    assert load_fleet(*files, environ={"X": "", "Z": "e"}).config.args == {
        "x": "",
        "y": "y",
        "z": "e",
    }
    elsewhere = directory / "below"
    elsewhere.mkdir()
    with pytest.raises(FleetFileError, match="MODEL is not set"):
        load_fleet(*files, environ={}, base_dir=elsewhere)


@pytest.mark.parametrize(
    ("line", "value"),
    [
        ('A="x\\ny\\"z" # c', 'x\ny"z'),
        ("A=$HOME#1", "$HOME#1"),
        ('A="p\\${B}q"', "p${B}q"),
        ('A="\\$${HERE}\\$x"', "$yes$x"),
        ("B=b\nA=${B}-${HERE:-no}", "b-yes"),
        ("A=  spaced  ", "spaced"),
        ("A = 'x'", "x"),
    ],
)
def test_values_of_an_env_file_are_read_as_a_shell_does(
    directory: Path, line: str, value: str
) -> None:
    files = written(base="name: a\nmodel: x\nargs: {v: '${A}'}\n")
    (directory / ".env").write_text(line)
    assert load_fleet(*files, environ={"HERE": "yes"}).config.args == {"v": value}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("A: b", "expected NAME=value"),
        ("A='b", "its quote is not closed on this line"),
        ("A=${B:?say which}", "the environment variable B is not set: say which"),
    ],
)
def test_a_wrong_line_of_an_env_file_is_named(directory: Path, line: str, message: str) -> None:
    files = written(base="name: a\nmodel: ${A:-x}\n")
    (directory / ".env").write_text(f"\n{line}\n")
    assert refused(*files).message == f"{files[0].absolute().parent / '.env'}:2: {message}"
    files[0].write_text("name: a\nmodel: x\n")
    assert load_fleet(*files, environ={}).config.model == "x"  # not read without need


def test_a_directory_named_env_is_not_an_env_file(directory: Path) -> None:
    (directory / ".env").mkdir()
    assert load_fleet(*written(base="name: a\nmodel: ${A:-x}\n"), environ={}).config.model == "x"


@pytest.mark.parametrize(
    ("written_as", "environ", "result"),
    [
        ("${A?no}", {"A": ""}, ""),
        ("${A:?no model}", {"A": ""}, "variable A is set to nothing: no model"),
        ("${A?no model}", {}, "variable A is not set: no model"),
        ("${A:+on}", {"A": "1"}, "on"),
        ("${A:+on}", {"A": ""}, ""),
        ("${A+on}", {"A": ""}, "on"),
        ("${A-off}", {"A": ""}, ""),
        ("${A-off}", {}, "off"),
    ],
)
def test_variables_have_the_forms_of_compose_files(
    written_as: str, environ: dict[str, str], result: str
) -> None:
    files = written(base=f"name: a\nmodel: x\nargs: {{v: '{written_as}'}}\n")
    if result.startswith("variable"):
        assert refused(*files, **environ).message.endswith(result)
    else:
        assert load_fleet(*files, environ=environ).config.args == {"v": result}
