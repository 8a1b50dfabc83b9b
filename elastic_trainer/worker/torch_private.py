"""All that Holdfast uses of torch without torch's promise to keep it: names that begin with `_`.

Any release may rename or drop them. Everything here was seen in torch 2.11, 2.13, 2.14 and 2.15
unless its docstring says otherwise, and either falls back to what is public, or names the versions
that were tested (`TorchVersionError`). Operators (`torch.ops`, `torch._foreach_...`) are not meant:
their schemas are versioned. tests/unit/elastic_trainer/test_torch_private.py keeps private names
out of other modules.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch
from torch import Tensor
from torch import distributed as dist
from torch.distributed import distributed_c10d

TESTED: Final = "2.11 to 2.15 (the trainer: 2.13 to 2.15)"

_NAMES: Final[Mapping[str, str]] = {
    # Public in name, in modules that are not.
    "FakeStore": "torch.testing._internal.distributed.fake_pg",
    "TorchDispatchMode": "torch.utils._python_dispatch",
    "AsyncCollectiveTensor": "torch.distributed._functional_collectives",
    "all_gather_single_autograd": "torch.distributed._functional_collectives",
    "all_reduce": "torch.distributed._functional_collectives",
    "all_to_all_single_autograd": "torch.distributed._functional_collectives",
    "checkpoint_wrapper": "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
    "compute_local_shape_and_global_offset": "torch.distributed.tensor._utils",
    "reduce_scatter_single_autograd": "torch.distributed._functional_collectives",
    # Private in name.
    "_StorageInfo": "torch.distributed.checkpoint.filesystem",
    "_StoragePrefix": "torch.distributed.checkpoint.filesystem",
    "_parse_rendezvous_config": "torch.distributed.elastic.rendezvous.utils",
}
"""Name -> its module. They are imported from here, and there when somebody asks for them."""


class TorchVersionError(ImportError):
    """This torch has no such name: it is older or newer than what was tested."""

    def __init__(self, name: str) -> None:
        super().__init__(
            f"torch {torch.__version__} has no {name}: use a tested version, {TESTED}", name=name
        )


def __getattr__(name: str) -> Any:
    """Return a name of the table, wherever torch has it.

    Raises:
        TorchVersionError: torch has it no more, or not yet.
    """
    if name not in _NAMES:
        raise AttributeError(name)
    try:
        return getattr(importlib.import_module(_NAMES[name]), name)
    except (ImportError, AttributeError) as error:
        raise TorchVersionError(f"{_NAMES[name]}.{name}") from error


# -- process groups ---------------------------------------------------------------------


class _Gloo(type):
    # torch asks whether groups are of the class whose name OneThreadGloo takes.
    def __instancecheck__(cls, group: object) -> bool:
        return isinstance(group, dist.ProcessGroupGloo)


class OneThreadGloo(metaclass=_Gloo):
    """Makes gloo groups whose collectives run on one thread, for torch's two.

    Two write the name of the collective that has ended, `lastCompletedWorkName`, without a lock
    (`ProcessGroupGloo::runLoop`). Names above 15 characters, as of a coalesced all-gather, are on
    the heap: the worker dies of SIGSEGV or an abort of malloc.
    """

    def __new__(
        cls,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta = distributed_c10d.default_pg_timeout,
        **more: Any,
    ) -> dist.ProcessGroupGloo:
        """Return a group of torch's own class; `more` are arguments of newer versions.

        The number of threads is an option that only the private constructor takes. Where torch has
        no such option, or asks for more than is known of (`more`, which grew with 2.14), the group
        has torch's two threads.
        """
        gloo = dist.ProcessGroupGloo
        options: Any = getattr(gloo, "_Options", object)()
        known = all(hasattr(options, f"_{name}") for name in ("timeout", "threads", "devices"))
        if not known or not all(hasattr(options, name) for name in more):
            return gloo(store, rank, size, timeout, **more)
        for name, value in more.items():
            setattr(options, name, value)
        interfaces = filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(","))
        options._timeout, options._threads = timeout, 1
        options._devices = [gloo.create_device(interface=name) for name in interfaces] or [
            gloo.create_default_device()
        ]
        return gloo(store, rank, size, options)


def use_one_thread() -> None:
    """Have torch make gloo groups as OneThreadGloo does."""
    distributed_c10d.ProcessGroupGloo = OneThreadGloo


def keep_process_groups() -> None:
    """Have `destroy_process_group` end groups as ever, but free none that was the last to end.

    The destructor of a gloo group waits, with Python's lock held, for its threads; one that still
    lets go of the last collective waits for that lock (`~ProcessGroupGloo` joins what runs
    `~AsyncWork`). It needs a busy machine, and about one end of a script in fifty met it on one.
    The process must end by os._exit, which frees nothing, as forked workers do.
    """
    destroy, kept = distributed_c10d.destroy_process_group, list[Any]()

    @functools.wraps(destroy)
    def destroy_and_keep(group: Any = None) -> None:
        kept[:] = all_groups()
        destroy(group)

    distributed_c10d.destroy_process_group = destroy_and_keep
    dist.destroy_process_group = destroy_and_keep


def all_groups() -> list[Any]:
    """Return the process groups of this process; none where torch keeps them elsewhere."""
    return list(getattr(getattr(distributed_c10d, "_world", None), "pg_map", ()))


def set_timeout(group: dist.ProcessGroup, timeout: timedelta) -> None:
    """Set the time-out of `group`, which torch has made already; public from 2.14."""
    set_it = getattr(dist, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_it(timeout, group)


def connect_nccl(group: dist.ProcessGroup, device: torch.device) -> None:
    """Make the communicator of NCCL `group` now; collective."""
    group._get_backend(device).eager_connect_single_device(device)


def flatten(mesh: Any, name: str, backend: str) -> Any:
    """Return the axes of a DeviceMesh as one, called `name`."""
    return mesh._flatten(name, backend)


def concatenate(meshes: Sequence[Any]) -> Any:
    """Return the axes of several DeviceMeshes as those of one."""
    return type(meshes[0])._concatenate(list(meshes))


def flight_recorder(device: str) -> Callable[[], bytes]:
    """Return what dumps the recorder of the collectives on `device`: NCCL has another one.

    Where torch has none, what it dumps is empty.
    """
    recorders = torch._C._distributed_c10d
    name = "_dump_nccl_trace_json" if device == "cuda" else "_dump_fr_trace_json"
    recorder: Callable[[], bytes] = getattr(recorders, name, bytes)
    return recorder


# -- DTensors ---------------------------------------------------------------------------


def local_of(tensor: Tensor) -> Tensor:
    """Return the local part of a DTensor, or `tensor`; outside autograd, unlike `to_local`."""
    return getattr(tensor, "_local_tensor", tensor)


def dtensor_like(local: Tensor, like: Any) -> Any:
    """Return DTensor `like` with another local part, on that one's device and of its dtype.

    `DTensor.from_local` would move it to the mesh's device.
    """
    spec = like._spec
    if local.dtype != like.dtype:
        meta = spec.tensor_meta._replace(dtype=local.dtype)
        spec = dataclasses.replace(spec, tensor_meta=meta)
    return type(like)(local, spec, requires_grad=False)


# -- the compiler -----------------------------------------------------------------------


def when_compiling(begin: Callable[[Any], None], end: Callable[[Any], None]) -> None:
    """Have torch.compile call `begin` and `end` around each compilation, where it can tell."""
    try:
        from torch._dynamo.callback import callback_handler  # late: it takes a second
    except ImportError:
        return
    callback_handler.register_start_callback(begin)
    callback_handler.register_end_callback(end)


def compile_in_this_process() -> None:
    """Have no pool of compiling processes: up to 32 a worker, which import torch each.

    Not by TORCHINDUCTOR_COMPILE_THREADS: it is read with the trainer's imports.
    """
    from torch._inductor import config

    if hasattr(config, "compile_threads"):
        config.compile_threads = 1


def find_cpu_instructions() -> None:
    """Find the vector instructions of this CPU once: it starts Python and takes 1.7 s."""
    try:
        from torch._inductor.cpu_vec_isa import pick_vec_isa
    except ImportError:
        return  # each worker that compiles finds them then
    pick_vec_isa()


def forget_compiled() -> None:
    """Drop all that torch.compile has compiled in this process."""
    torch._dynamo.reset()
