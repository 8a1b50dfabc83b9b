# ruff: noqa: E402, ICN001, NPY002  what is there at first comes first, and names stay
"""A script that writes down all that it can see of its own process, as JSON; twice, by a restart.

    dump_process.py FOLDER [MARK]

With MARK rank 0 kills itself once, so that there is a second epoch.

Each worker writes FOLDER/<epoch>-<rank>.json: `first`, when its first line runs, `imported`, with
the modules of FOLDER/modules.json, and of its children `subprocess`, `fork` and `spawn`. Each is
name -> value, of what processes that are alike have alike. `drawn` is what they draw by chance.
"""

from __future__ import annotations

import sys

AT_FIRST = {"modules": list(sys.modules), "main": dict(vars(sys.modules["__main__"]))}

import atexit
import contextlib
import ctypes
import decimal
import faulthandler
import gc
import importlib
import json
import locale
import logging
import multiprocessing
import os
import random
import resource
import secrets
import signal
import ssl
import subprocess
import tempfile
import threading
import uuid
import warnings
from pathlib import Path

PRCTL = {"dumpable": 3, "parent-death signal": 2, "subreaper": 37, "no new privileges": 39}


def prctl(number):
    value, libc = ctypes.c_int(0), ctypes.CDLL(None)
    if number in {3, 39}:
        return libc.prctl(number, 0, 0, 0, 0)
    assert libc.prctl(number, ctypes.byref(value), 0, 0, 0) == 0
    return value.value


def read(path):
    try:
        return Path(path).read_text(errors="replace").replace("\0", " ").strip()
    except OSError as error:
        return type(error).__name__


def named(value):
    """Return what tells a function, a class or an object from another kind."""
    return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value))}"


def of_the_kernel():
    status = dict(line.split(":", 1) for line in read("/proc/self/status").splitlines())
    seen = {f"status {key}": status[key].split() for key in ("SigBlk", "SigIgn", "SigCgt")}
    seen |= {key: status[key].split() for key in ("Umask", "Cpus_allowed_list", "NoNewPrivs")}
    seen |= {"tasks": int(status["Threads"]), "name": status["Name"].strip()}
    seen |= {f"prctl {name}": prctl(number) for name, number in PRCTL.items()}
    names = sorted(name for name in dir(resource) if name.startswith("RLIMIT_"))
    seen |= {name: resource.getrlimit(getattr(resource, name)) for name in names}
    descriptors = [Path(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd")]  # noqa: PTH208
    opened = {path.name: str(path.readlink()) for path in descriptors if path.exists()}
    seen["descriptors"] = sorted(fd for fd, to in opened.items() if "/proc/" not in to)
    for name in ("coredump_filter", "oom_score_adj", "timerslack_ns", "cgroup", "personality"):
        seen[name] = read(f"/proc/self/{name}")
    seen["nice"], seen["policy"] = os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)
    seen["session of its own"] = os.getsid(0) == os.getpgid(0) == os.getpid()
    seen["cwd"], seen["command line"] = str(Path.cwd()), read("/proc/self/cmdline")
    return seen


def of_python():
    seen = {}
    for number in sorted(signal.valid_signals()):
        name = signal.Signals(number).name if number < 32 else f"realtime {number}"
        handler = signal.getsignal(number)
        seen[f"signal {name}"] = named(handler) if callable(handler) else str(handler)
    seen["signal mask"] = sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ()))
    seen["wakeup descriptor"] = signal.set_wakeup_fd(-1)
    seen["timers"] = [signal.getitimer(which) for which in range(3)]
    for name in ("excepthook", "unraisablehook", "displayhook", "breakpointhook"):
        seen[f"sys.{name}"] = named(getattr(sys, name))
    seen["threading.excepthook"] = named(threading.excepthook)
    seen["trace and profile"] = [str(sys.gettrace()), str(sys.getprofile())]
    for name in ("argv", "path", "orig_argv", "warnoptions", "_xoptions", "dont_write_bytecode"):
        seen[f"sys.{name}"] = getattr(sys, name)
    seen |= {
        f"flag {n}": getattr(sys.flags, n)
        for n in dir(sys.flags)
        if n[0] != "_" and n not in {"index", "count"}
    }
    seen["meta path"] = [named(finder) for finder in sys.meta_path]
    seen["limits"] = [sys.getrecursionlimit(), sys.getswitchinterval(), threading.stack_size()]
    seen["threads"] = sorted(thread.name for thread in threading.enumerate())
    seen["faulthandler"] = faulthandler.is_enabled()
    seen["gc"] = [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks)]
    seen["gc frozen"] = gc.get_freeze_count()
    seen["locale"] = [locale.setlocale(c) for c in range(6)] + [locale.getpreferredencoding(False)]
    seen["decimal"] = str(decimal.getcontext())
    seen["atexit"] = atexit._ncallbacks()
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        seen[f"sys.{name}"] = [
            stream.encoding, stream.errors, stream.line_buffering, stream.write_through,
            str(stream.newlines), stream.name, stream.mode, type(stream.buffer).__name__,
            stream is getattr(sys, f"__{name}__"),
        ]  # fmt: skip
    seen["filters"] = sorted(str(entry) for entry in warnings.filters)
    seen["warnings"] = [named(warnings.showwarning), named(warnings.formatwarning)]
    root = logging.getLogger()
    seen["logging"] = [root.level, len(root.handlers), root.disabled, logging.root.manager.disable]
    seen["logging class"] = [named(logging.getLoggerClass()), named(logging.getLogRecordFactory())]
    seen["logging last"] = [named(logging.lastResort), logging.lastResort.level]
    seen["start method"] = multiprocessing.get_start_method(allow_none=True)
    process = multiprocessing.current_process()
    seen["process"] = [process.name, process.daemon, str(multiprocessing.parent_process())]
    from multiprocessing import resource_tracker

    seen["resource tracker"] = resource_tracker._resource_tracker._pid
    seen["children"] = len(multiprocessing.active_children())
    seen["temporary folder"] = tempfile.tempdir
    return seen


def of_main():
    main = AT_FIRST["main"]
    known = {"__name__", "__doc__", "__package__", "__loader__", "__spec__", "__annotations__"}
    known |= {"__builtins__", "__file__", "__cached__"}
    seen = {f"main {k}": str(main.get(k, "absent")) for k in known}
    seen["main __loader__"] = named(type(main.get("__loader__")))
    seen["main __builtins__"] = str(type(main.get("__builtins__")))
    seen["main others"] = sorted(main.keys() - known - {"AT_FIRST"})
    seen["main is the module"] = sys.modules["__main__"].__dict__ is globals()
    return seen


def of_torch():
    import numpy
    import torch
    import torch.distributed
    import torch.nn.parallel

    optimizer = importlib.import_module("torch.optim.optimizer")
    import torch.utils.data.distributed

    seen = {}
    for name in (
        "get_num_threads", "get_num_interop_threads", "get_default_dtype", "is_grad_enabled",
        "is_inference_mode_enabled", "are_deterministic_algorithms_enabled", "get_default_device",
        "get_float32_matmul_precision", "is_anomaly_enabled", "is_warn_always_enabled",
        "get_deterministic_debug_mode", "is_autocast_enabled",
    ):  # fmt: skip
        seen[f"torch.{name}"] = str(getattr(torch, name)())
    result = []
    aside = threading.Thread(target=lambda: result.append(torch.get_num_threads()))
    aside.start()
    aside.join()
    seen["torch.get_num_threads, in a thread"] = result
    for name in ("cudnn", "cuda.matmul", "mkldnn", "mkl", "openmp", "nnpack", "opt_einsum"):
        module = torch.backends
        for part in name.split("."):
            module = getattr(module, part)
        for key in ("enabled", "benchmark", "deterministic", "allow_tf32", "flags", "verbose"):
            value = getattr(module, key, None)
            if isinstance(value, bool | int | str):
                seen[f"torch.backends.{name}.{key}"] = value
    seen["torch.multiprocessing"] = torch.multiprocessing.get_sharing_strategy()
    seen["torch.distributed"] = torch.distributed.is_initialized()
    seen["torch.cuda"] = [torch.cuda.is_initialized(), torch.cuda._is_in_bad_fork()]
    seen["torch hooks"] = len(optimizer._global_optimizer_post_hooks)
    seen["loggers of torch"] = sorted(
        [name, logger.level, len(logger.handlers), logger.propagate]
        for name, logger in logging.root.manager.loggerDict.items()
        if name.startswith("torch") and isinstance(logger, logging.Logger)
    )
    seen["torch classes"] = [
        named(torch.distributed.distributed_c10d.ProcessGroupGloo),
        named(torch.distributed.destroy_process_group),
    ]
    seen["parallel info"] = [
        line for line in torch.__config__.parallel_info().splitlines() if "get_max_threads" in line
    ]
    seen["numpy"] = [numpy.geterr(), numpy.get_printoptions()["precision"]]
    maps = Path("/proc/self/maps").read_text().splitlines()
    [blas] = {line.split()[-1] for line in maps if "openblas" in line}
    seen["numpy BLAS threads"] = ctypes.CDLL(blas).scipy_openblas_get_num_threads64_()
    return seen


def of_the_environment():
    return {f"variable {name}": value for name, value in os.environ.items()}


def drawn():
    """Return what no other process draws."""
    seen = {
        "random": random.random(),
        "secrets": secrets.token_hex(8),
        "SystemRandom": random.SystemRandom().random(),
        "uuid4": str(uuid.uuid4()),
        "uuid1": str(uuid.uuid1()),
        "temporary name": next(tempfile._get_candidate_names()),
        "authkey": multiprocessing.current_process().authkey.hex(),
        "ssl": ssl.RAND_bytes(8).hex(),
    }
    if "torch" in sys.modules:
        import numpy
        import torch
        from torch.utils.data import RandomSampler

        seen |= {
            "torch": torch.rand(1).item(),
            "torch seed": torch.initial_seed(),
            "torch dropout": torch.nn.functional.dropout(torch.ones(64)).tolist(),
            "torch sampler": list(RandomSampler(range(64))),
            "torch loader": torch.empty((), dtype=torch.int64).random_().item(),
            "numpy": numpy.random.rand(),
            "numpy generator": numpy.random.default_rng().random(),
        }
    return seen


def look(*parts):
    seen = {}
    for part in parts:
        seen |= part()
    return json.loads(json.dumps(seen, default=str))


def child():
    return look(of_the_kernel, of_python, of_the_environment)


def of_a_child(path):
    Path(path).write_text(json.dumps(child()))


def import_all(modules):
    for name in json.loads(modules.read_text()) if modules.exists() else ():
        with contextlib.suppress(Exception):  # those of parts that say so themselves
            importlib.import_module(name)


def main():
    folder = Path(sys.argv[1])
    epoch, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    found = {"first": look(of_the_kernel, of_python, of_main, of_the_environment)}
    found["modules"] = AT_FIRST["modules"]
    found["first"]["torch is imported"] = "torch" in AT_FIRST["modules"]
    import_all(folder / "modules.json")
    found["imported"] = look(of_torch, of_python)
    found["drawn"] = drawn()
    part = folder / f"{epoch}-{rank}"
    done = subprocess.run(
        [sys.executable, __file__, "child"], capture_output=True, text=True, check=True
    )
    found["subprocess"] = json.loads(done.stdout)
    for method in ("fork", "spawn"):
        path = part.with_suffix(f".{method}")
        process = multiprocessing.get_context(method).Process(target=of_a_child, args=(path,))
        process.start()
        process.join()
        assert process.exitcode == 0, method
        found[method] = json.loads(path.read_text())
    part.with_suffix(".part").write_text(json.dumps(found))
    part.with_suffix(".part").rename(part.with_suffix(".json"))
    if len(sys.argv) > 2 and not Path(sys.argv[2]).exists():
        while len(list(folder.glob(f"{epoch}-*.json"))) < int(os.environ["WORLD_SIZE"]):
            threading.Event().wait(0.01)
        if rank == "0":
            Path(sys.argv[2]).touch()
            os.kill(os.getpid(), signal.SIGKILL)
        threading.Event().wait(60)


if __name__ == "__main__":
    if sys.argv[1] == "child":
        sys.stdout.write(json.dumps(child()))
    else:
        main()
