"""What a command does to start quickly stays its own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from skyctl import startup


@pytest.fixture(autouse=True)
def _as_before(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    before = gc.get_threshold()
    monkeypatch.setattr(startup, "_ours", set())
    yield
    gc.set_threshold(*before)


def test_those_it_starts_get_the_environment_as_it_was(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "")  # taken back at the end, as is all of it
    monkeypatch.delenv("PYDANTIC_DISABLE_PLUGINS")
    startup.speed_up_imports()
    assert os.environ["PYDANTIC_DISABLE_PLUGINS"] == "__all__"
    assert "PYDANTIC_DISABLE_PLUGINS" not in startup.inherited_environment()
    assert startup.inherited_environment()["PATH"] == os.environ["PATH"]


def test_what_the_user_said_of_plugins_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "logfire")
    startup.speed_up_imports()
    assert startup.inherited_environment()["PYDANTIC_DISABLE_PLUGINS"] == "logfire"


def test_a_command_that_needed_torch_ends_without_a_word_of_leaks(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    done = subprocess.run(
        [sys.executable, "-m", "skyctl", "init", "--tiny", str(tmp_path / "demo")],
        env={**os.environ, "SKYCTL_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "leaked" not in done.stdout + done.stderr


@pytest.mark.parametrize("closed", [">&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize("arguments", ["", "jobs --json"])
def test_a_closed_stream_changes_no_exit_code(tmp_path: Path, closed: str, arguments: str) -> None:
    command = f"{sys.executable} -m skyctl {arguments}"
    whole, lacking = [
        subprocess.run(
            ["sh", "-c", f"{command} {redirected}"],
            env={**os.environ, "SKYCTL_HOME": str(tmp_path / "home")},
            cwd=tmp_path,
            capture_output=True,
            timeout=60,
            check=False,
        )
        for redirected in ("", closed)
    ]
    assert whole.returncode == lacking.returncode
    assert b"Traceback" not in lacking.stderr


_CTRL_C_DURING_IMPORT = """
import signal, sys
from importlib.abc import MetaPathFinder

imported = sys.argv.pop(1)

class CtrlC(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == imported:
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, CtrlC())
from skyctl.__main__ import main

main()
"""


@pytest.mark.parametrize("imported", ["skyctl.cli.app", "typer", "skyctl.output"])
def test_ctrl_c_amid_imports_shows_no_traceback(tmp_path: Path, imported: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _CTRL_C_DURING_IMPORT, imported, "down", "--json"],
        env={**os.environ, "SKYCTL_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    envelope = json.loads(done.stdout)
    assert (envelope["exit_code"], done.returncode, done.stderr) == (130, 130, "")
    assert envelope["error"]["hint"] == "what it began may go on: skyctl status"


def test_a_locale_without_our_characters_is_no_bug(tmp_path: Path) -> None:
    (tmp_path / "fleet.yaml").write_text("name: a\nservers: ['http://127.0.0.1:9']\n")
    done = subprocess.run(
        [sys.executable, "-m", "skyctl", "weights"],
        env={**os.environ, "SKYCTL_HOME": str(tmp_path), "PYTHONIOENCODING": "latin-1"},
        cwd=tmp_path,
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u2013" in done.stdout


_CTRL_C_AMID = """
import signal, sys
from importlib.abc import MetaPathFinder

def ctrl_c(*_):
    signal.raise_signal(signal.SIGINT)

class CtrlC(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "skyctl.service":
            {here}

sys.meta_path.insert(0, CtrlC())
from skyctl.__main__ import main

main()
"""


@pytest.mark.parametrize(
    "here",
    [
        "type('Gone', (), {'__del__': ctrl_c})()",
        "type('Body', (), {'field': type('Field', (), {'__set_name__': ctrl_c})()})",
        "raise ValueError('SchemaError: Field:' + chr(10) + '  KeyboardInterrupt: ')",
        "import socket; of = socket.socketpair; socket.socketpair = lambda: (ctrl_c(), of())[1]",
    ],
    ids=["a finalizer", "a class body", "pydantic", "an event loop that is made"],
)
def test_ctrl_c_is_not_lost_where_it_cannot_be_raised(tmp_path: Path, here: str) -> None:
    """Python ignores it in the first, where the command would wait on; others make errors of it."""
    (tmp_path / "fleet.yaml").write_text("name: far\nservers: ['http://127.0.0.1:1']\n")
    done = subprocess.run(
        [sys.executable, "-c", _CTRL_C_AMID.format(here=here), "wait", "--timeout", "30", "--json"],
        env={**os.environ, "SKYCTL_HOME": str(tmp_path)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (json.loads(done.stdout)["exit_code"], done.returncode) == (130, 130)
    assert not {"ignored", "Traceback"} & set(done.stderr.split())
