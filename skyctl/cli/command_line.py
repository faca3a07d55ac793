"""Facts that follow from the arguments alone, before any command runs. Pure."""

from __future__ import annotations

import difflib
import inspect
import re
from collections.abc import Collection, Mapping, Sequence

# valid with every command, before or after its name
EVERYWHERE = ("-q", "--quiet", "--no-color", "--debug")
EVERYWHERE_WITH_VALUE = ("--token-file", "--ca")
WITHOUT_FLEET = ("", "init", "schema", "help")
BEHIND_THE_COMMAND = ("-f", "--file", "--fleet", "--json")
TAKES_SERVER = ("pause", "resume", "sleep", "wake")

IN_THE_FILE = {
    "--replicas": "`replicas:` in the fleet file, or for now: skyctl scale N",
    "--model": "`model:` in the fleet file",
    "--gpus": "`gpus:` in the fleet file",
    "--port": "`ports:` and `router: {port: …}` in the fleet file",
}
_ATTACH = "list the servers in a fleet file: name: …, and servers: [http://127.0.0.1:8000, …]"
# the names that docker, kubectl, systemctl, vLLM's routes and trainers use
_ELSEWHERE = {
    "sync-weights CKPT": "push sync update update-weights load load-weights reload set-weights",
    "up": "start run launch deploy apply create serve",
    "down": "stop kill rm delete destroy terminate",
    "status": "ps ls list get info show describe health",
    "resume": "unpause thaw continue unfreeze",
    "pause --mode keep": "freeze suspend hold",
    "wake": "wakeup wake-up unsleep",
    "generate PROMPT": "ask chat complete completion prompt",
    "weights history": "history",
    "sync-weights --rollback": "rollback undo revert",
    "validate": "check lint config",
    "top": "stats monitor watch",
}
_SAME = {word: command for command, words in _ELSEWHERE.items() for word in words.split()}


def options_first(arguments: Sequence[str]) -> list[str]:
    """The same arguments with the options that are valid everywhere at the front."""
    options, rest = _split(arguments)
    first, others, words = list[str](), list[str](), iter(options)
    for word in words:
        option, equals, _ = word.partition("=")
        if option in EVERYWHERE_WITH_VALUE:
            first += (
                [word] if equals else [word, *(value for value in (next(words, None),) if value)]
            )
        else:
            (first if word in EVERYWHERE else others).append(word)
    return [*first, *others, *rest]


def given(option: str, arguments: Sequence[str]) -> bool:
    """Whether an option is among the arguments (there are none after `--`)."""
    return option in _split(arguments)[0]


def command_name(arguments: Sequence[str], groups: Mapping[str, Collection[str]]) -> str:
    """`jobs show` for `skyctl -q jobs -f x show push-1`; `groups` maps a group to its commands."""
    typed = options_first(_split(arguments)[0])
    before = ["", *typed]  # the word before: an option may take this one as its value
    words = [
        word
        for option, word in zip(before, typed, strict=False)
        if not word.startswith("-") and option not in EVERYWHERE_WITH_VALUE
    ]
    if not words:
        return "skyctl"
    below = next((word for word in words[1:] if word in groups.get(words[0], ())), None)
    return f"{words[0]} {below}" if below else words[0]


def explain(complaint: str, command: str) -> tuple[str, str]:
    """The parser's complaint as a message and a hint; `command` is "" when unknown."""
    help_hint = f"skyctl {command} --help" if command else "skyctl --help"
    message, _, guess = complaint.replace("Value error, ", "").partition(" Did you mean ")
    message = message[:1].lower() + message[1:].removesuffix(".")
    if found := re.fullmatch(r"no such command '(.*)'", message):
        return message, _other_command(found[1], guess.replace("'", ""))
    if found := re.fullmatch(r"(no such option: \S+) \(Possible options: (.*)\)", message):
        near = difflib.get_close_matches(found[1].split()[-1], found[2].split(", "), 1, 0.75)
        guess = f"did you mean {near[0]}; " if near else ""
        return found[1], f"{guess}all options: {help_hint}"
    if guess:
        return message, f"did you mean {guess.replace(chr(39), '')}"
    if message.startswith("no such option: ") and message.split()[-1] in IN_THE_FILE:
        return message, IN_THE_FILE[message.split()[-1]]
    if message.startswith("no such option: ") and message.split()[-1] in BEHIND_THE_COMMAND:
        return message, f"it goes behind the command, as in: skyctl status {message.split()[-1]} …"
    extra = re.match(r"got unexpected extra arguments? *\((\S+)", message.replace("(s)", "s"))
    if extra and command in TAKES_SERVER:
        server = extra[1].rstrip(")")
        return message, f"one server: skyctl {command} --server {server}; a fleet: --fleet NAME"
    if extra and command == "generate":
        return message, 'several words are one prompt in quotes: skyctl generate "the fleet is up"'
    if extra and command not in WITHOUT_FLEET:
        return message, f"a fleet is named with --fleet NAME or -f FILE; all options: {help_hint}"
    return message, help_hint


def _other_command(typed: str, guess: str) -> str:
    """The command that was probably meant by an unknown one."""
    if typed == "attach":
        return _ATTACH
    if typed in _SAME:
        return f"did you mean: skyctl {_SAME[typed]}"
    if guess:
        return f"did you mean {guess}"
    return "every command: skyctl --help"


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The arguments before `--`, and from it on."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]


def flowing(docstring: str | None) -> str:
    """Paragraphs on one line each; blocks that begin with `\\b` keep their lines."""
    paragraphs = inspect.cleandoc(docstring or "").split("\n\n")
    return "\n\n".join(
        text if text.startswith("\b") else " ".join(text.split()) for text in paragraphs
    )
