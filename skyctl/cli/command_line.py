"""What can be told from the arguments before any command runs. Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

# They go with every command, and may stand before or after it.
EVERYWHERE = ("-q", "--quiet", "--no-color", "--debug")


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


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """Before `--`, and from it on."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]
