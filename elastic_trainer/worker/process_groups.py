"""What torch's gloo groups need before a worker can be trusted to them ."""

from __future__ import annotations

import functools
from datetime import timedelta
from typing import Any

from torch import distributed as dist
from torch.distributed import distributed_c10d

from elastic_trainer.worker.torch_private import all_groups, gloo_on_one_thread


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
        """Return a group of torch's own class; `more` are arguments of newer versions."""
        return gloo_on_one_thread(store, rank, size, timeout, **more)


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
