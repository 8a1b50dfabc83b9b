"""Process groups of a script stay until its process ends: to free one can hang it for good.

The destructor of a gloo group waits, with Python's lock held, for its threads; one that still lets
go of the last collective waits for that lock (torch 2.13: `~ProcessGroupGloo` joins what runs
`~AsyncWork`). It needs a busy machine, and about one end of a script in fifty met it on one.
"""

from __future__ import annotations

import functools
from typing import Any


def keep_process_groups() -> None:
    """Have `destroy_process_group` end groups as ever, but free none that was the last to end.

    The process must end by os._exit, which frees nothing, as forked workers do.
    """
    from torch import distributed
    from torch.distributed import distributed_c10d

    destroy, kept = distributed_c10d.destroy_process_group, list[Any]()

    @functools.wraps(destroy)
    def destroy_and_keep(group: Any = None) -> None:
        kept[:] = distributed_c10d._world.pg_map  # noqa: SLF001  torch has no list of groups
        destroy(group)

    distributed_c10d.destroy_process_group = destroy_and_keep
    distributed.destroy_process_group = destroy_and_keep
