"""What follows from the arguments alone: the command, and options that every command takes."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

# valid with every command, before or after its name
EVERYWHERE = ("-q", "--quiet", "--no-color", "--debug")
EVERYWHERE_WITH_VALUE = ("--token-file", "--ca")


def options_first(arguments: Sequence[str]) -> list[str]:
    """The same arguments with the options that are valid everywhere at the front."""
    options, after = _split(arguments)
    first, others, words = list[str](), list[str](), iter(options)
    for word in words:
        option, equals, _ = word.partition("=")
        if option in EVERYWHERE_WITH_VALUE:
            first += (
                [word] if equals else [word, *(value for value in (next(words, None),) if value)]
            )
        else:
            (first if word in EVERYWHERE else others).append(word)
    return [*first, *others, *after]


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


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str]]:
    """The arguments before `--`, and from it on."""
    end = arguments.index("--") if "--" in arguments else len(arguments)
    return arguments[:end], arguments[end:]
