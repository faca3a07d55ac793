"""What lets a command start and end quickly, and is not for the processes that it starts."""

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

_PLUGINS = "PYDANTIC_DISABLE_PLUGINS"
_AGAIN_S = 0.01  # longer than a finalizer
_ours: set[str] = set()  # variables that were not there before


def have_streams() -> None:
    """A command that was started without stdin, stdout or stderr (`>&-`) gets an empty one: Python
    has None for it, and the next file that is opened would take its number. What a locale has no
    character for is written as its number, as Python does on stderr.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            number = os.open(os.devnull, os.O_RDWR)
            os.set_inheritable(number, True)
            setattr(sys, name, os.fdopen(number, mode))
    if isinstance(sys.stdout, io.TextIOWrapper):
        with contextlib.suppress(OSError):  # another file has taken its number: it is asked where
            sys.stdout.reconfigure(errors="backslashreplace")


def hurry() -> None:
    """For a process that is about to import: look for what it does not need less often.

    Imports make many objects and no garbage. Pydantic looks for plugins in every package that is
    installed, which are hundreds beside vLLM.
    """
    gc.set_threshold(100_000)
    if _PLUGINS not in os.environ:
        os.environ[_PLUGINS] = "__all__"
        _ours.add(_PLUGINS)


def hold_interrupts(hold: bool) -> None:
    """Have Ctrl-C wait, while nothing could answer it but a traceback; or answer it from now on."""
    how = signal.SIG_BLOCK if hold else signal.SIG_UNBLOCK
    signal.pthread_sigmask(how, {signal.SIGINT})


def repeat_lost_interrupts() -> None:
    """Have a Ctrl-C come again where Python has nobody to raise it to: in a finalizer, or in the
    callback of a weak reference, as each import has one. It was reported there, and then ignored.
    """

    def unraisable(what: sys.UnraisableHookArgs) -> None:
        if not issubclass(what.exc_type, KeyboardInterrupt):
            sys.__unraisablehook__(what)
            return
        while True:
            # a `Thread` waits until it has begun: on a busy machine the next one came before that
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


def leave() -> None:
    """For a process that ends: without it the interpreter looks for garbage, for some 60 ms.

    Not beside torch, which has taken seconds by then: a library of its would list all that was not
    collected as leaked.
    """
    if "torch" not in sys.modules:
        gc.freeze()


def end(code: object) -> None:
    """End this process at once: to take apart what was imported takes the interpreter some 10 ms.

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


def inherited() -> dict[str, str]:
    """The environment as this process was given it, for those that it starts."""
    return {name: value for name, value in os.environ.items() if name not in _ours}
