"""Start and end a command quickly; processes that it starts are not affected."""

from __future__ import annotations

import _thread
import atexit
import contextlib
import gc
import io
import os
import signal
import sys
import threading
import time
from pathlib import Path

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
_IMPORT_PATH = "PYTHONPATH"
_AGAIN_S = 0.01  # longer than a finalizer
_ours: set[str] = set()  # variables that this module set
_commands = False


def is_command() -> bool:
    """Whether this process is a command or a supervisor of skyctl, and not a program that uses it:
    nothing else is lost when it is killed.
    """
    return _commands


def become_command() -> None:
    """This process is one."""
    global _commands
    _commands = True


def ensure_std_streams() -> None:
    """Open /dev/null as each of stdin, stdout and stderr that was closed (`>&-`), and have stdout
    write a character that its encoding lacks as an escape, as Python's stderr does.
    """
    # Python has None for a closed one, and the next file that is opened would take its number
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        # another file may have taken stdout's number: `reconfigure` asks for its position
        with contextlib.suppress(OSError):
            sys.stdout.reconfigure(errors="backslashreplace")


def speed_up_imports() -> None:
    """Have this process collect garbage less often, and pydantic look for no plugins.

    Imports make many objects and no garbage. Pydantic looks for plugins in every package that is
    installed, which are hundreds beside vLLM.
    """
    gc.set_threshold(100_000)
    if _PLUGINS not in os.environ:
        os.environ[_PLUGINS] = "__all__"
        _ours.add(_PLUGINS)


def hold_interrupts(hold: bool) -> None:
    """Block SIGINT until the command can report it; `hold=False` unblocks it."""
    how = signal.SIG_BLOCK if hold else signal.SIG_UNBLOCK
    signal.pthread_sigmask(how, {signal.SIGINT})


def repeat_lost_interrupts() -> None:
    """Send SIGINT again when Python could not raise KeyboardInterrupt.

    In a finalizer or a weak reference's callback (each import has one) Python reports the exception
    and goes on.
    """

    def unraisable(report: sys.UnraisableHookArgs) -> None:
        if not issubclass(report.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(report)
            return
        while True:
            # `threading.Thread` waits for its start: a second Ctrl-C can arrive during that
            try:
                _thread.start_new_thread(_interrupt_again, ())
                return
            except KeyboardInterrupt:
                continue

    sys.unraisablehook = unraisable


def _interrupt_again() -> None:
    time.sleep(_AGAIN_S)
    main = threading.main_thread().ident
    assert main is not None  # it runs
    signal.pthread_kill(main, signal.SIGINT)


def skip_final_collection() -> None:
    """Spare a process that ends the interpreter's last garbage collection, some 60 ms.

    Not beside torch, which takes seconds to import anyway: a library of torch's would report all
    uncollected objects as leaks.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def exit_now(code: object) -> None:
    """End this process without the interpreter's cleanup of modules, some 10 ms.

    Returns where the interpreter has more to do: other threads, output that cannot be written.
    """
    if not isinstance(code, int) or threading.active_count() > 1 or "torch" in sys.modules:
        return
    try:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError):
        return
    os._exit(code)


def inherited_environment() -> dict[str, str]:
    """The environment as this process was given it, for those that it starts. Relative entries of
    PYTHONPATH become absolute, because a supervisor and a guardian run in another directory.
    """
    environment = {name: value for name, value in os.environ.items() if name not in _ours}
    if entries := environment.get(_IMPORT_PATH):
        with contextlib.suppress(FileNotFoundError):  # the working directory was removed
            absolute = [entry and str(Path(entry).absolute()) for entry in entries.split(":")]
            environment[_IMPORT_PATH] = ":".join(absolute)
    return environment
