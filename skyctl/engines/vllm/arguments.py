"""The arguments of the installed vLLM, by its own parser: their names, and which values they take.

vLLM itself refuses a wrong value only after importing for many seconds, in every server.
"""

from __future__ import annotations

import contextlib
import difflib
import hashlib
import inspect
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from skyctl.children import output_of
from skyctl.errors import SkyctlError
from skyctl.store.paths import place_private_file, private_directory, state_root

_FIND_TIMEOUT_S = 20.0
_HELP_TIMEOUT_S = 120.0  # importing vLLM from a cold disk
_FORMAT = 2  # of the kept answer
_ASK = """
import json
try:
    from vllm.entrypoints.common.cli_args import make_arg_parser
except ImportError:  # before 0.33
    try:
        from vllm.entrypoints.launchers.cli_args import make_arg_parser
    except ImportError:  # before 0.32
        from vllm.entrypoints.openai.cli_args import make_arg_parser
try:
    from vllm.utils.argparse_utils import FlexibleArgumentParser
except ImportError:
    from vllm.utils import FlexibleArgumentParser

def kind(converter):
    name = getattr(converter, "__name__", "")
    if name not in ("_optional_type", "_parse_type"):
        return name
    inner = [cell.cell_contents for cell in converter.__closure__]
    return next((kind(each) for each in inner if callable(each)), "")

arguments = {}
for action in make_arg_parser(FlexibleArgumentParser())._actions:
    names = [name[2:] for name in action.option_strings if name.startswith("--")]
    choices = None if action.choices is None else [str(choice) for choice in action.choices]
    words = "switch" if action.nargs == 0 else action.nargs or ""
    for name in names:
        arguments[name] = [kind(action.type), choices, words, name]
    for short in action.option_strings:
        if names and not short.startswith("--"):
            arguments[short] = ["", None, "", names[0]]
print(json.dumps(arguments))
"""
_HUMAN = re.compile(r"[+-]?\d+|\d+(\.\d+)?[kmgt]|\d+[KMGT]")
"""vLLM's `human_readable_int`: decimal suffixes are lower-case, binary ones upper-case."""
_LEVEL = re.compile(r"O\d?")


class Argument(NamedTuple):
    """What vLLM's parser says of one option."""

    kind: str
    """The name of the function that converts its value; "" if unknown."""
    choices: tuple[str, ...] | None
    """The only values it takes; None if it does not list them."""
    words: str
    """argparse's `nargs`: "switch" for none, "" for one, "?", "+" or "*"."""
    name: str
    """Its long name, which may differ from the one that was looked up."""


def known_arguments(
    python: str, note: Callable[[str], None] = lambda line: None, *, cache: Path | None = None
) -> Mapping[str, Argument]:
    """Options by name without `--`, including `no-x` of switches, and by short name with its dash
    (`-cc`); empty if that vLLM does not say.

    The first question takes as long as importing vLLM, and is announced to `note`; the answer is
    kept in `cache` (default: the state directory).
    """
    if python == sys.executable:
        installation = _installed()
    else:
        script = f"import os\n{inspect.getsource(_installed)}\nprint(_installed())"
        installation = _run(python, script, _FIND_TIMEOUT_S)
    if not installation:
        return {}
    key = hashlib.sha256(f"{_FORMAT}\n{python}\n{installation}".encode()).hexdigest()[:16]
    kept = (cache or state_root() / "arguments") / f"{key}.json"
    with contextlib.suppress(OSError, ValueError, TypeError):
        return _parsed(kept.read_text(encoding="utf-8"))
    note("asking vLLM for its arguments (once per installation) …")
    lines = _run(python, _ASK, _HELP_TIMEOUT_S).splitlines()
    try:
        arguments = _parsed(lines[-1] if lines else "{}")
    except (ValueError, TypeError, AttributeError):
        return {}
    if arguments:
        with contextlib.suppress(OSError, SkyctlError):
            private_directory(kept.parent)
            place_private_file(kept, json.dumps(arguments, sort_keys=True).encode())
    return arguments


def _parsed(text: str) -> dict[str, Argument]:
    return {
        name: Argument(kind, None if choices is None else tuple(choices), words, long)
        for name, (kind, choices, words, long) in json.loads(text).items()
    }


def _installed() -> str:
    """The vLLM that this interpreter has, without importing it; "" for none.

    Names change only with a new installation. Runs in other interpreters as well: see above.
    """
    import importlib.util

    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.origin:
        return ""
    beside = os.path.join(os.path.dirname(spec.origin), "_version.py")  # noqa: PTH118, PTH120
    status = os.stat(beside if os.path.exists(beside) else spec.origin)  # noqa: PTH110, PTH116
    return f"{spec.origin} {status.st_mtime_ns} {status.st_size}"


def argument_problem(name: str, value: Any, arguments: Collection[str]) -> str:
    """Why vLLM's parser would refuse `--name` with this value; "" if it would not.

    `name` may be a field of an option (`x.y`) or a unique prefix. Where `arguments` has names only,
    values are not checked.
    """
    head, dot, _ = name.partition(".")
    option = f"no-{name}" if value is False else name
    if not (option in arguments or head in arguments or _is_prefix(head, arguments)):
        return f"vLLM has no argument {name!r}{_suggestion(name, arguments)}"
    argument = arguments.get(head) if isinstance(arguments, Mapping) else None
    if value is False and option not in arguments:
        return f"{name!r} cannot be false: vLLM has no --no-{name}"
    if argument is None or dot or value is None or value is False:
        return ""
    reason = _value_problem(value, argument)
    return f"{name}: {reason}" if reason else ""


def _is_prefix(head: str, arguments: Collection[str]) -> bool:
    return sum(each.startswith(head) for each in arguments) == 1


def _suggestion(name: str, arguments: Collection[str]) -> str:
    head, dot, field = name.partition(".")
    short = arguments.get(f"-{head}") if isinstance(arguments, Mapping) else None
    if short is not None:
        return f"; write `{short.name}{dot}{field}`"
    if _LEVEL.fullmatch(head):
        return "; write `optimization-level: N`"
    if near := difflib.get_close_matches(name, arguments, n=1):
        return f"; did you mean {near[0]!r}?"
    return ""


def _value_problem(value: Any, argument: Argument) -> str:
    """Why the argument does not take a value other than null and false; "" if it does."""
    if argument.words == "switch":
        return "" if value is True else f"takes true or false, not {value!r}"
    if value is True:
        return "" if argument.words == "?" else "needs a value, not true"
    if isinstance(value, list):
        if argument.kind in ("loads", "parse_dataclass"):
            return f"takes JSON as one text: '{json.dumps(value)}'"
        if argument.words not in ("+", "*") and len(value) > 1:
            return "takes one value"
        return next((reason for item in value if (reason := _value_problem(item, argument))), "")
    if argument.choices is not None and str(value) not in argument.choices:
        near = difflib.get_close_matches(str(value), argument.choices, n=1)
        listed = ", ".join(argument.choices)
        return f"{value!r} is not one of {listed}" + (
            f"; did you mean {near[0]!r}?" if near else ""
        )
    return _conversion_problem(value, argument.kind)


def _conversion_problem(value: Any, kind: str) -> str:
    text = json.dumps(value) if isinstance(value, dict) else str(value)
    if text == "None":
        return ""
    try:
        match kind:
            case "int":
                int(text)
            case "float":
                float(text)
            case "human_readable_int" | "human_readable_int_or_auto":
                if not (_HUMAN.fullmatch(text) or (kind.endswith("auto") and text == "auto")):
                    raise ValueError
            case "loads" | "parse_dataclass":
                json.loads(text)
    except ValueError:
        expected = {"int": "a whole number", "float": "a number", "loads": "JSON"}
        expected |= {"parse_dataclass": "a mapping"}
        return f"{text!r} is not {expected.get(kind, 'a whole number, such as 4096 or 4k')}"
    return ""


def _run(python: str, script: str, timeout_s: float) -> str:
    """The script's output; "" if it failed. vLLM refuses wrong names itself, only later."""
    try:
        printed = output_of(
            python, script, timeout_s=timeout_s, variables={"VLLM_LOGGING_LEVEL": "ERROR"}
        )
    except (OSError, subprocess.SubprocessError):
        return ""
    return printed.strip()
