"""Makes a forked worker what a new `python -u script` would be, and ends it as one.

Import it before anything else: what a process was started with is noted then. What agent and zygote
change for themselves is undone in the worker. What a preloaded module has changed while it was
imported stays, as if the script had imported it.
"""

from __future__ import annotations

import atexit
import builtins
import contextlib
import ctypes
import io
import json
import os
import pkgutil
import resource
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from importlib.machinery import SourceFileLoader
from pathlib import Path, PurePath
from types import CodeType, FrameType, ModuleType
from typing import Any, Final

HELD: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""Sent to a whole step: zygote and standbys hold them back, workers have them from their start."""
_OF_TORCHRUN: Final[dict[signal.Signals, Any]] = {
    signal.SIGTERM: signal.SIG_DFL,
    signal.SIGINT: signal.default_int_handler,
    signal.SIGHUP: signal.SIG_DFL,
    signal.SIGQUIT: signal.SIG_DFL,
}
"""It handles them itself, so its workers have Python's defaults, whatever it was started with."""
IGNORED_BY_PYTHON: Final = (signal.SIGPIPE, signal.SIGXFSZ)
"""Programs that Python starts do not ignore them (subprocess's `restore_signals`)."""
_MASK: Final = "mask"
_FILES: Final = "open files"
_UNFLUSHED: Final = 120
"""Python's exit code where what was printed cannot be written (Py_FinalizeEx)."""

_libc: Final = ctypes.CDLL(None)  # here, since a forked child should load no library

_Setting = tuple[Callable[[], Any], Callable[[Any], object]]


def _settings() -> Iterator[tuple[str, _Setting]]:
    """Yield name, how to read and how to set it, of what agent or zygote change."""
    for number in sorted(signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}):
        yield str(int(number)), (partial(signal.getsignal, number), partial(signal.signal, number))
    for module, hook in ((threading, "excepthook"), (sys, "excepthook"), (sys, "unraisablehook")):
        name = f"{module.__name__}.{hook}"
        yield name, (partial(getattr, module, hook), partial(setattr, module, hook))
    files = resource.RLIMIT_NOFILE
    yield _FILES, (partial(resource.getrlimit, files), partial(resource.setrlimit, files))


SETTINGS: Final = dict(_settings())


def settings() -> dict[str, Any]:
    """Return what this process has now."""
    return {name: get() for name, (get, _) in SETTINGS.items()}


_started: Final[dict[str, Any]] = {
    **settings(),
    **{str(int(number)): default for number, default in _OF_TORCHRUN.items()},
    _MASK: signal.pthread_sigmask(signal.SIG_BLOCK, ()),
}
"""What this process, the agent or a zygote, was started with."""


def handed_on() -> str:
    """Return what to tell a zygote that starts in a new interpreter."""
    ignored = [name for name, value in _started.items() if value is signal.SIG_IGN]
    mask = sorted(map(int, _started[_MASK]))
    return json.dumps({"ignored": ignored, _MASK: mask, _FILES: _started[_FILES]})


def take_over(told: str) -> None:
    """Have workers of this zygote find what the agent was started with."""
    agent = json.loads(told)
    _started.update(dict.fromkeys(agent["ignored"], signal.SIG_IGN))
    _started.update({_MASK: set(agent[_MASK]), _FILES: tuple(agent[_FILES])})


def undo(ours: dict[str, Any]) -> None:
    """Put back what the process was started with, where what it has now is `ours`."""
    for name, (get, put) in SETTINGS.items():
        if get() == ours[name] != _started[name]:
            put(_started[name])
    # The last one: what came meanwhile is delivered now. What an import holds back stays so.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, set(HELD) - set(_started[_MASK]))


def draw_apart() -> None:
    """Have generators and secrets that were made before the fork be this process's own.

    Python's `random` and tempfile's names see to it themselves. torch's generators of devices are
    made in the worker, and begin with a constant in every process.
    """
    if (process := sys.modules.get("multiprocessing.process")) is not None:
        process.current_process().authkey = os.urandom(32)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.default_generator.seed()


# --- running a script as the interpreter does -----------------------------------------------


def run_as_main(
    kind: str, target: str, args: Sequence[str], *, failed: Callable[[BaseException], object]
) -> int:
    """Run `python -u target args`, or `python -u -m target args`, to the interpreter's own end.

    `kind` is `script` (`target` is a file, or what else Python runs as one) or `module`. `failed`
    is called with an exception that nobody has caught, before the process ends.

    Returns:
        The exit code, or minus a signal's number: that ends the process.
    """
    try:
        _run(kind, target, args)
        code = 0
    except SystemExit as error:
        code = exit_code(error.code)
    except BaseException as error:  # noqa: BLE001  shown, as the interpreter does
        failed(error)
        code = _show(error)
    for step in (threading._shutdown, atexit._run_exitfuncs):  # type: ignore[attr-defined]  # noqa: SLF001
        try:
            step()
        except BaseException:  # noqa: BLE001  nor does it change the interpreter's exit code
            say(traceback.format_exc())
    flushed = flush()
    _libc.fflush(None)
    return code if flushed or code < 0 else _UNFLUSHED


def _run(kind: str, target: str, args: Sequence[str]) -> None:
    main = ModuleType("__main__")
    main.__dict__.update(__builtins__=builtins, __annotations__={})
    sys.modules["__main__"] = main
    option = ["-m"] if kind == "module" else []
    sys.argv = [*(option or [target]), *args]
    sys.orig_argv = [sys.executable, "-u", *option, target, *args]
    if kind == "module":
        _look_first_in(os.getcwd())  # noqa: PTH109  as Python has it
        runpy._run_module_as_main(target)  # type: ignore[attr-defined]  # noqa: SLF001  as -m does
        return
    file = os.path.join(os.getcwd(), target)  # noqa: PTH109, PTH118  links and ./ stay
    if pkgutil.get_importer(file) is not None:  # a directory or an archive
        sys.path.insert(0, file)
        runpy._run_module_as_main("__main__", alter_argv=False)  # type: ignore[attr-defined]  # noqa: SLF001
    else:
        _look_first_in(str(Path(target).resolve().parent))
        code = _code_of(file)
        main.__dict__.update(__file__=file, __cached__=None)
        main.__loader__ = SourceFileLoader("__main__", file)
        exec(code, main.__dict__)  # noqa: S102


def _look_first_in(folder: str) -> None:
    if not os.environ.get("PYTHONSAFEPATH"):
        sys.path.insert(0, folder)


def _code_of(file: str) -> CodeType:
    try:
        with io.open_code(file) as stream:
            compiled = pkgutil.read_code(stream)
            stream.seek(0)
            source = stream.read()
    except OSError as error:
        why = f"[Errno {error.errno}] {error.strerror}"
        say(f"{sys.executable}: can't open file {file!r}: {why}\n")
        raise SystemExit(2) from error
    return compiled or compile(source, file, "exec", dont_inherit=True)


def _show(error: BaseException) -> int:
    """Show an exception that nobody has caught, and return the exit code that it means."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    error.__traceback__ = trace
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, trace
    try:
        sys.excepthook(type(error), error, trace)
    except SystemExit as leaving:
        return exit_code(leaving.code)
    except BaseException:  # noqa: BLE001  both are shown
        original = "".join(traceback.format_exception(error))
        say(f"Error in sys.excepthook:\n{traceback.format_exc()}\n")
        say(f"Original exception was:\n{original}")
    return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1


def exit_code(value: object) -> int:
    """Return what the interpreter makes of `sys.exit(value)`; a text is written to stderr."""
    if value is None:
        return 0
    if isinstance(value, int):
        return value & 0xFF
    say(f"{value}\n")
    return 1


def say(text: str) -> None:
    """Write `text` to stderr, if there is one that takes it."""
    with contextlib.suppress(Exception):  # stderr may be anything, or closed
        sys.stderr.write(text)


def flush() -> bool:
    """Flush the standard streams; return whether it was possible. None and closed ones count."""
    flushed = True
    for stream in (sys.stdout, sys.stderr):
        if stream is None or getattr(stream, "closed", False):
            continue
        try:
            stream.flush()
        except Exception as error:  # noqa: BLE001  as the interpreter does
            flushed = False
            if stream is sys.stdout:
                say(f"Exception ignored in: {stream!r}\n{type(error).__name__}: {error}\n")
    return flushed


def die_of(number: int) -> None:
    """End this process by a signal, as the interpreter does after a KeyboardInterrupt."""
    signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)


# -- SIGTERM and SIGINT where the agent answers them ----------------------------------------------

_LEFT: Final = (signal.SIGTERM, signal.SIGINT)


def leave_stops_to_the_agent() -> None:
    """Have SIGTERM and SIGINT mean nothing from here on, where no handler of the script's is set.

    To this process alone: what it starts or forks has Python's defaults, so that it can be ended.
    """
    if threading.current_thread() is not threading.main_thread():
        return
    for number in _LEFT:
        if signal.getsignal(number) in (signal.SIG_DFL, _OF_TORCHRUN[number]):
            # A handler, since programs that are executed would go on to ignore what is ignored.
            signal.signal(number, _ignore)
            signal.siginterrupt(number, False)
    os.register_at_fork(after_in_child=_as_python_has_them)


def _ignore(_number: int, _frame: FrameType | None) -> None:
    """The agent has it too."""


def _as_python_has_them() -> None:
    for number in _LEFT:
        if signal.getsignal(number) is _ignore:
            signal.signal(number, _OF_TORCHRUN[number])


# -- Where a job's own modules are imported from --------------------------------------------------
# Pure. The agent tells its workers by two environment variables; see
# launcher/runs/submitting/freeze.py.


CODE: Final = "HOLDFAST_CODE"
"""The frozen copy, absolute; unset where nothing was frozen."""
SOURCE: Final = "HOLDFAST_CODE_SOURCE"
"""The folder it was copied from, absolute."""


def frozen_entry(entry: str, env: Mapping[str, str]) -> str:
    """Return an entry of `sys.path`; one within the source is that of the copy."""
    code, source = env.get(CODE), env.get(SOURCE)
    if not code or not source:
        return entry
    path = PurePath(entry)
    # The copy may be within the source, as ./runs does by default.
    if path.is_relative_to(code) or not path.is_relative_to(source):
        return entry
    return str(PurePath(code) / path.relative_to(source))


def frozen_path(entries: Iterable[str], env: Mapping[str, str]) -> list[str]:
    """Return `sys.path` with the frozen copy in place of its source, and at the end.

    At the end, so that no module of the job shadows a library, yet before what an editable
    install (`pip install -e`) would find in the source: its finder is asked last.
    """
    code = env.get(CODE)
    if not code:
        return list(entries)
    path = [frozen_entry(entry, env) for entry in entries]
    return path + [entry for entry in (code, str(PurePath(code) / "src")) if entry not in path]


def frozen_python_path(env: Mapping[str, str]) -> dict[str, str]:
    """Return the PYTHONPATH of a worker that is started by exec; empty: as it is.

    Python has no way to add to the end of its path from outside, so the copy is not added
    where the job did not have its source there.
    """
    given = env.get("PYTHONPATH")
    if not given or not env.get(CODE):
        return {}
    entries = given.split(os.pathsep)
    return {"PYTHONPATH": os.pathsep.join(frozen_entry(entry, env) for entry in entries)}
