"""Every command line in README.md and docs/ is run on the real fleet, and what it prints compared.

Fenced ```console blocks are read: lines after `$ ` are commands, those below are what is printed.
`…` matches anything in a line, and as a line of its own any lines; runs of spaces count as one.
The documents' fleet is called demo, as in the tutorial. A block behind `<!-- not run: why -->` is
not run; nor are, in the README, commands that make, start or end a fleet or are not skyctl's.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.integration.fleet_cli import COMMAND_TIMEOUT_S, SKYCTL, FleetCli

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: \S.* -->")
BLOCK = re.compile(r"^(?P<before>[^\n]*)\n```console\n(?P<body>.*?)^```$", re.M | re.S)
# a terminal of their own, or the end of the fleet that other tests share
NEVER = {"init", "up", "down", "restart", "scale", "smoke", "top"}


@dataclass(frozen=True)
class Line:
    """One command of a page and what the page says it prints (None: nothing is said)."""

    page: str
    command: str
    printed: str | None

    @property
    def fails(self) -> bool:
        return (self.printed or "").startswith("error: ")


def lines_of(page: str, text: str) -> Iterator[Line]:
    """The commands of a page that are run, in order."""
    for block in BLOCK.finditer(text):
        if NOT_RUN.fullmatch(block["before"].strip()):
            continue
        for part in re.split(r"^\$ ", block["body"], flags=re.M)[1:]:
            command, _, printed = part.partition("\n")
            if page != "README.md" or runs_anywhere(command):
                yield Line(page, command, printed.strip("\n") or None)


def runs_anywhere(command: str) -> bool:
    words = shlex.split(command, comments=True)
    return words[0] == "skyctl" and words[1] not in NEVER and "-f" not in words


def matches(documented: str, real: str) -> bool:
    """Whether `real` is what the page says, with `…` for anything."""
    pattern = ""
    for line in documented.splitlines():
        if line.strip() == "…":
            pattern += r"(?:.*\n)*?"
        else:
            parts = (re.escape(" ".join(part.split())) for part in line.strip().split("…"))
            pattern += r"\s*" + r"\s*.*?\s*".join(parts) + r"[^\S\n]*\n"
    squeezed = "".join(" ".join(line.split()) + "\n" for line in real.splitlines() if line.strip())
    return re.fullmatch(pattern, squeezed) is not None


LINES = {
    path: [*lines_of(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8"))]
    for path in PAGES
}


TRIAL = "prompts:\n  - prompt_token_ids: [5, 9, 13]\n"  # whose answer must be finite


@pytest.fixture
def tidy_fleet(real_fleet: FleetCli) -> Iterator[FleetCli]:
    """The shared fleet, running and at its first weights when the page is done.

    Beside its file there is what pages speak of: a trainer's step, and a canary.
    """
    directory = real_fleet.directory
    shutil.copytree(directory / "checkpoints/b", directory / "runs/step-200", dirs_exist_ok=True)
    (directory / "trial.yaml").write_text(TRIAL)
    yield real_fleet
    real_fleet.run("resume")
    real_fleet.run("sync-weights", "checkpoints/a")


@pytest.mark.real
@pytest.mark.parametrize(
    "path", [p for p in PAGES if LINES[p]], ids=lambda p: str(p.relative_to(ROOT))
)
def test_the_commands_of_a_page_do_what_it_says(path: Path, tidy_fleet: FleetCli) -> None:
    for line in LINES[path]:
        done = subprocess.run(
            ["bash", "-c", line.command],
            cwd=tidy_fleet.directory,
            env={**tidy_fleet.env, "PATH": f"{Path(SKYCTL).parent}:{os.environ['PATH']}"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=COMMAND_TIMEOUT_S,
            check=False,
        )
        shown = f"$ {line.command}\n{done.stdout}(exit code {done.returncode})"
        assert (done.returncode != 0) == line.fails, shown
        if line.printed is not None:
            wanted = re.sub(r"\bdemo\b", tidy_fleet.directory.name, line.printed)
            assert matches(wanted, done.stdout), f"{shown}\n--- {line.page} says:\n{line.printed}"


def test_pages_have_commands_that_are_run() -> None:
    pages = {line.page for lines in LINES.values() for line in lines}
    assert {"README.md", "docs/tutorial.md", "docs/how-to/rl-loop.md"} <= pages


@pytest.mark.parametrize(
    ("documented", "real", "same"),
    [
        ("ok  …  done", "ok   5 ms  done", True),
        ("a\n…\nd", "a\nb\nc\nd", True),
        ("…", "anything\nat all", True),
        ("a\nb", "a\nc", False),
        ("a", "a\nmore", False),
        ("took … ms", "took 5 s", False),
    ],
)
def test_dots_match_anything_and_nothing_else_does(documented: str, real: str, same: bool) -> None:
    assert matches(documented, real) is same


def test_marked_blocks_are_not_run_and_comments_are_no_commands() -> None:
    text = "<!-- not run: why -->\n```console\n$ skyctl down\n```\n"
    text += "\n```console\n$ skyctl urls # x\n```\n"
    assert [line.command for line in lines_of("docs/x.md", text)] == ["skyctl urls # x"]
    text = "\n```console\n$ pip install .\n$ skyctl down\n$ skyctl status   # rows\n```\n"
    assert [line.command for line in lines_of("README.md", text)] == ["skyctl status   # rows"]
