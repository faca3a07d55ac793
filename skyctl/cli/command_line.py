"""What can be told from the arguments before any command runs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

# They go with every command, and may stand before or after it.
EVERYWHERE = ("-q", "--quiet", "--no-color", "--debug")
WITHOUT_FLEET = ("", "init", "schema", "help")
BEHIND_THE_COMMAND = ("-f", "--file", "--fleet", "--json")


def options_first(arguments: Sequence[str]) -> list[str]:
    """The same arguments with the options that go with every command at the front."""
    options, rest = _split(arguments)
    everywhere = [word for word in options if word in EVERYWHERE]
    return [*everywhere, *(word for word in options if word not in EVERYWHERE), *rest]


def given(option: str, arguments: Sequence[str]) -> bool:
    """Whether an option stands among the arguments (after `--` there are none)."""
    return option in _split(arguments)[0]


def command_name(arguments: Sequence[str], groups: Mapping[str, Collection[str]]) -> str:
    """`jobs show` of `skyctl -q jobs -f x show push-1`; `groups` maps a group to its commands."""
    words = [word for word in _split(arguments)[0] if not word.startswith("-")]
    if not words:
        return "skyctl"
    below = next((word for word in words[1:] if word in groups.get(words[0], ())), None)
    return f"{words[0]} {below}" if below else words[0]


def explain(complaint: str, command: str) -> tuple[str, str]:
    """What the parser complains of, as a message and a hint; `command` is "" when unknown."""
    help_hint = f"skyctl {command} --help" if command else "skyctl --help"
    message, _, guess = complaint.replace("Value error, ", "").partition(" Did you mean ")
    message = message[:1].lower() + message[1:].removesuffix(".")
    if guess:
        return message, f"did you mean {guess.replace(chr(39), '')}"
    if message.startswith("no such option: ") and message.split()[-1] in BEHIND_THE_COMMAND:
        return message, f"it goes behind the command, as in: skyctl status {message.split()[-1]} …"
    if message.startswith("got unexpected extra argument") and command not in WITHOUT_FLEET:
        return message, f"a fleet is named with --fleet NAME or -f FILE; all options: {help_hint}"
    return message, help_hint


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Before `--`, and from it on."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]
