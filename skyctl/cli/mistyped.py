"""A command line that the parser refuses: its complaint as a message and a hint."""

from __future__ import annotations

import difflib
import re

WITHOUT_FLEET = ("", "init", "schema", "help")
BEHIND_THE_COMMAND = {"-f": "FILE", "--file": "FILE", "--fleet": "NAME", "--json": ""}
TAKES_SERVERS = ("pause", "resume", "sleep", "wake", "wait", "restart", "logs")

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


def explain(complaint: str, command: str) -> tuple[str, str]:
    """The parser's complaint as a message and a hint; `command` is "" when unknown."""
    help_hint = f"skyctl {command} --help" if command else "skyctl --help"
    message, _, guess = complaint.replace("Value error, ", "").partition(" Did you mean ")
    message = message[:1].lower() + message[1:].removesuffix(".")
    if match := re.fullmatch(r"no such command '(.*)'", message):
        return message, _other_command(match[1], guess.replace("'", ""), command)
    if match := re.fullmatch(r"(no such option: (\S+))(?: \(Possible options: (.*)\))?", message):
        message, option, offered = match.groups()
        if hint := _place_of_option(option, command):
            return message, hint
        if offered:
            near = difflib.get_close_matches(option, offered.split(", "), 1, 0.75)
            guess = f"did you mean {near[0]}; " if near else ""
            return message, f"{guess}all options: {help_hint}"
    if guess:
        return message, f"did you mean {guess.replace(chr(39), '')}"
    if command == "logs" and message == "option '-f' requires an argument":
        return message, "-f names the fleet file; to follow: skyctl logs --follow"
    extra = re.match(r"got unexpected extra arguments? *\((\S+)", message.replace("(s)", "s"))
    if extra and command == "generate":
        return message, 'several words are one prompt in quotes: skyctl generate "the fleet is up"'
    if extra and command not in WITHOUT_FLEET:
        word = extra[1].rstrip(")")
        return message, f"{fleet_option(word)}; all options: {help_hint}"
    return message, help_hint


def fleet_option(word: str) -> str:
    """The option to type before `word`, which names a fleet or its file."""
    if word.endswith((".yaml", ".yml")) or "/" in word:
        return f"a fleet file is named with: -f {word}"
    return f"a fleet is named with: --fleet {word}"


def _place_of_option(option: str, command: str) -> str:
    """A hint at where what `option` stands for is given; "" if that is not known."""
    if option in IN_THE_FILE:
        return IN_THE_FILE[option]
    if option in BEHIND_THE_COMMAND:
        example = f"skyctl status {option} {BEHIND_THE_COMMAND[option]}".rstrip()
        return f"it goes behind the command, as in: {example}"
    if option == "--server" and command in TAKES_SERVERS:
        return f"servers are named without an option: skyctl {command} SERVER"
    return ""


def _other_command(typed: str, guess: str, group: str) -> str:
    """A hint at the command that an unknown name probably stands for; `group`: it was typed behind
    this one.
    """
    if group:
        return f"did you mean {guess}" if guess else f"its commands: skyctl {group} --help"
    if typed == "attach":
        return _ATTACH
    if typed in _SAME:
        return f"did you mean: skyctl {_SAME[typed]}"
    if guess:
        return f"did you mean {guess}"
    return "every command: skyctl --help"
