"""A module to preload that changes all that dump_process.py looks at, as far as a process may."""

import atexit
import decimal
import faulthandler
import gc
import locale
import logging
import multiprocessing
import os
import random
import resource
import signal
import sys
import tempfile
import threading
import warnings

import numpy as np
import torch


def changed(*_args):
    """Stand for any handler or hook."""


for number in (signal.SIGUSR1, signal.SIGTERM, signal.SIGINT, signal.SIGCHLD, signal.SIGRTMIN):
    signal.signal(number, changed)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.umask(0o027)
os.nice(1)
os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
resource.setrlimit(resource.RLIMIT_NOFILE, (500, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
sys.excepthook = sys.unraisablehook = sys.displayhook = sys.breakpointhook = changed
threading.excepthook = changed
warnings.simplefilter("error")
warnings.showwarning = changed
logging.basicConfig(level=logging.DEBUG)
logging.lastResort = logging.NullHandler()
logging.disable(logging.ERROR)
gc.set_threshold(1)
gc.callbacks.append(changed)
sys.setrecursionlimit(1234)
sys.setswitchinterval(0.25)
decimal.getcontext().prec = 7
locale.setlocale(locale.LC_NUMERIC, "C.UTF-8")
multiprocessing.set_start_method("spawn")
tempfile.tempdir = "/dev/shm"
os.environ["CHANGED"] = "yes"
sys.path.append("/changed")
atexit.register(changed)
opened = os.open("/dev/null", os.O_RDONLY)
faulthandler.enable()
random.seed(1)
np.random.seed(1)  # noqa: NPY002  the one in question
np.seterr(all="ignore")
torch.manual_seed(1)
torch.set_default_dtype(torch.float64)
torch.set_float32_matmul_precision("medium")
torch.use_deterministic_algorithms(True)
torch.set_grad_enabled(False)
torch.backends.cudnn.benchmark = True
multiprocessing.current_process().authkey = b"changed"
