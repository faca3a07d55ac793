"""Every command line that skyctl prints or documents can be typed: no unknown command or option, no
missing argument. Found in the source, so that a new hint is checked without a test of its own.
"""

from __future__ import annotations

import ast
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import typer.main

from skyctl.cli import app as app_module
from skyctl.core.diagnosis import assess, from_intent, from_routing, from_weights
from skyctl.core.status import FleetStatus, ReplicaStatus, RouterStatus
from skyctl.doctor.running import RunningFacts, check_running
from skyctl.errors import PreflightError
from skyctl.http.client import ControlClient
from skyctl.http.target import ServerTarget
from skyctl.push.request import PushFleet, PushObserver, PushRequest, PushServer
from skyctl.push.rolling import push_rolling
from skyctl.states import ReplicaState
from skyctl.store.state import ServerRow

ROOT = Path(__file__).parents[3]
DOCUMENTS = [
    *(ROOT / "skyctl/help").glob("*.txt"),
    # one is about mistakes, one has the usage of each command
    *(p for p in (ROOT / "docs").rglob("*.md") if p.name not in ("mistakes.md", "commands.md")),
    *(ROOT / name for name in ("README.md", "SECURITY.md", "CHANGELOG.md", "fleet.yaml.example")),
]
PLACEHOLDERS = {"N": "2", "LEVEL": "2", "SECONDS": "2"}
# what an f-string puts in the place of a command; anything else is filled with a 1
FILLED = {"command": "restart", "mode.command": "jobs show", "verb": "pause", "asked.verb": "pause"}
FILLED |= {"option": "-f", "BEHIND_THE_COMMAND[option]": "fleet.yaml", "ca": " --ca ca.pem"}
# options of other programs, where a message names them
OF_OTHERS = {"--local-dir", "--ipc", "--shm-size", "--ulimit", "--gpus", "--port", "--host"}
OF_OTHERS |= {"--served-model-name", "--load-format", "--worker-extension-cls"}
OF_OTHERS |= {"--enable-sleep-mode", "--no-flag", "--revision", "--config"}
OTHERS = ("skyctl/engines/", "skyctl/launch/", "skyctl/core/check.py", "skyctl/core/urls.py")
_MENTION = re.compile(r"(?<![\w/.\-])skyctl (?=[a-z-])")
_WORD = r"\s(?:or|and|to|before|in|for|with)\s"
_END = re.compile(rf"[;,()`\n|<>\\]|&&|: |\s#|\s{{2,}}|\.(?:\s|$)|{_WORD}| …")
_OFFER = re.compile(r"(?:`|\b(?:type|then|it|again|why|look|with): )$")
_OPTION = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


class Mention(NamedTuple):
    """One command line in a text."""

    place: str
    """File and line."""
    line: str
    """What follows `skyctl `, up to the end of the command."""
    offered: bool
    """Whether it must be a command: after `type:`, `then:` … or a backtick, in the source."""


@pytest.fixture(scope="module")
def root() -> Any:
    app_module.register(app_module.VERBS)
    return typer.main.get_command(app_module.app)


def texts() -> Iterator[tuple[str, str, bool]]:
    """Every string of the source (the third is whether a user sees it), and every document."""
    for path in sorted((ROOT / "skyctl").rglob("*.py")):
        place = str(path.relative_to(ROOT))
        tree = ast.parse(path.read_text())
        inner: set[int] = set()
        docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if id(node) in inner or (text := text_of(node)) is None:
                continue
            inner |= {id(child) for child in ast.walk(node)}
            examples = "\\b" in text or "\b" in text
            yield f"{place}:{node.lineno}", text, examples or id(node) not in docstrings  # type: ignore[attr-defined]
    for path in DOCUMENTS:
        yield str(path.relative_to(ROOT)), path.read_text(), True


def text_of(node: ast.AST) -> str | None:
    """The text of a string, an f-string or a sum of them, with its placeholders filled."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(
            str(part.value)
            if isinstance(part, ast.Constant)
            else FILLED.get(ast.unparse(part.value), "1")  # type: ignore[attr-defined]
            for part in node.values
        )
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        parts = [text_of(node.left), text_of(node.right)]
        if any(part is not None for part in parts):
            return "".join("1" if part is None else part for part in parts)
    return None


def mentions() -> Iterator[Mention]:
    for place, text, shown in texts():
        for mention in _MENTION.finditer(text) if shown else ():
            before, after = text[: mention.start()], text[mention.end() :]
            end = _END.search(strip_quotes(after))
            offered = ".py:" in place and _OFFER.search(before) is not None
            yield Mention(place, after[: end.start()] if end else after, offered)


def strip_quotes(text: str) -> str:
    """The text with what stands in quotes blanked out: a prompt may have any words."""
    return re.sub(r'"[^"\n]*"|\'[^\'\n]*\'', lambda quoted: "_" * len(quoted[0]), text)


def typed(group: Any, words: list[str], parent: Any = None, name: str = "skyctl") -> None:
    """Parse a command line as the real program does. Raises what it would complain of."""
    context = group.make_context(name, list(words), parent=parent)
    if not hasattr(group, "commands"):
        return
    leftover = [*context._protected_args, *context.args]
    if leftover:
        below, command, arguments = group.resolve_command(context, leftover)
        typed(command, arguments, context, below)
    elif not group.invoke_without_command:
        raise ValueError("missing command")


def complaint(root: Any, line: str) -> str:
    """What is wrong with a command line; "" for one that can be typed."""
    try:
        words = [PLACEHOLDERS.get(word, word) for word in shlex.split(line)]
        typed(root, app_module.options_first(words))
    except typer.Exit:  # of --help
        return ""
    except Exception as error:
        return str(getattr(error, "format_message", error.__str__)())
    return ""


def test_every_command_line_that_is_shown_can_be_typed(root: Any) -> None:
    wrong, lines = [], 0
    for mention in mentions():
        first = mention.line.split(" ")[0]
        if not (mention.offered or first in root.commands or first.startswith("-")):
            continue  # skyctl is the subject of a sentence
        lines += 1
        if problem := complaint(root, mention.line):
            wrong.append(f"{mention.place}: skyctl {mention.line}: {problem}")
    assert wrong == []
    assert lines > 400  # they were found


def test_every_option_that_is_named_exists(root: Any) -> None:
    def options(command: Any) -> Iterator[str]:
        for param in command.params:
            yield from (*param.opts, *param.secondary_opts)
        for below in getattr(command, "commands", {}).values():
            yield from options(below)

    existing = {*options(root), "--help", *OF_OTHERS}
    named = [
        (place, option)
        for place, text, shown in texts()
        if shown and place.startswith("skyctl/") and not place.startswith(OTHERS)
        for option in _OPTION.findall(text)
    ]
    unknown = [f"{place}: {option}" for place, option in named if option not in existing]
    assert not unknown, unknown
    assert len(named) > 200


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("jobs wait --json", "Missing argument 'ID'"),
        ("scale", "Missing argument 'N'"),
        ("resme", "No such command 'resme'"),
        ("status shows how it left them", "unexpected extra argument"),
        ("up --wait-timeout 3", "No such option"),
        ("--token-file FILE", "missing command"),
        ("weights forget --help", ""),
        ("--token-file FILE status --fleet URL", ""),
    ],
)
def test_the_check_finds_what_cannot_be_typed(root: Any, line: str, problem: str) -> None:
    assert problem in complaint(root, line) and bool(problem) == bool(complaint(root, line))


@pytest.mark.parametrize("routed", [True, False])
@pytest.mark.parametrize("front", ["ready", "unreachable"])
@pytest.mark.parametrize(
    "state", ["ready", "paused", "asleep", "updating", "quarantined", "unreachable"]
)
def test_hints_about_an_attached_fleet_name_nothing_that_it_refuses(
    state: str, front: str, routed: bool
) -> None:
    """Its servers were started elsewhere: skyctl cannot start or stop them, and has no logs."""
    pair = [
        ReplicaStatus(f"f-{n}", ReplicaState(state), f"http://h:{n}", routed=routed) for n in (0, 1)
    ]
    router = RouterStatus(ReplicaState(front), "http://h:9")
    health, reasons = assess(pair, router)
    status = FleetStatus("f", health, tuple(pair), router, reasons, None, weight_version="v1")
    for intended in ({}, {"paused": True}, {"sleep_level": 1}):
        rows = [ServerRow(one.name, **intended) for one in pair]
        drift = [*from_intent(pair, rows), *from_weights(status), *from_routing(status)]
        workers = [one.url for one in pair] if routed else []
        versions = {"f-0": "0.32.0", "f-1": "0.31.0"}
        findings = check_running(RunningFacts(status, drift, vllm=versions, workers=workers))
        hints = [one.hint for one in (*reasons, *drift)] + [one.fix for one in findings]
        refused = re.compile(r"skyctl (up|down|restart|scale|logs)\b")
        assert [hint for hint in hints if refused.search(hint)] == []


async def test_a_roll_over_a_single_server_is_refused_with_what_every_fleet_can_do() -> None:
    server = PushServer(ServerTarget("f-0", "http://h:0"), device="cpu")
    request = PushRequest("/c", rolling=1, pause_mode="wait")
    async with ControlClient() as client:
        with pytest.raises(PreflightError) as refused:
            await push_rolling(
                request,
                PushFleet("f", (server,)),
                client=client,
                observer=PushObserver(),
                rotation=None,
            )
    assert refused.value.hint.startswith("leave --rolling out")
