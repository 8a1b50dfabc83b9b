"""A name service that does not answer is waited for once, and not in a recovery.

torch asks for the name of each end of a store's connections, for its messages, until one question
stays unanswered; then it asks no more in that process (`formatSockAddr` in c10d/socket.cpp). Where
the name service is down that costs ten seconds (resolv.conf(5): 5 s, twice), and every worker of
every epoch would wait so long. A worker forked from a process that has waited does not.
"""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Final

_NOBODY: Final = "127.94.3.17"
"""Of this machine alone, and in no hosts file: to know its name a name service is asked."""


def ask_for_a_name() -> None:
    """Have torch ask the name service once: 0.01 s where it answers, 10 s where it does not.

    Leaves no thread and no socket behind. On a machine without that address nothing is learnt.
    """
    from torch.distributed import DistError, TCPStore

    try:
        listener = socket.create_server((_NOBODY, 0))
        store = TCPStore(
            _NOBODY,
            listener.getsockname()[1],
            is_master=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=60),
            master_listen_fd=listener.detach(),  # the store owns it from here
        )
    except (OSError, DistError):
        return  # the first store of the job asks then
    del store
