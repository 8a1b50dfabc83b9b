"""A zygote, in the interpreter that runs this, and one worker of it: prints what both say."""

from __future__ import annotations

import json
import os
import sys
import time

from elastic_trainer.agent.workers.zygote_client import ZygoteClient

env, cwd = dict(os.environ), sys.argv[1]
zygote = ZygoteClient.spawned(preload="shim_worker", env=env, cwd=cwd)
deadline = time.monotonic() + float(sys.argv[2])
said: dict[str, dict[str, object]] = {}


def until(event: str) -> None:
    while event not in said and time.monotonic() < deadline:
        said.update({message["event"]: message for message in zygote.receive(1.0)})


try:
    until("ready")
    zygote.send(
        op="start",
        epoch=1,
        local_rank=0,
        kind="main",
        target="shim_worker",
        args=[],
        env={"HOLDFAST_HEARTBEAT": f"{cwd}/0.heartbeat"},
        log=f"{cwd}/0.log",
        cwd=cwd,
        fresh=False,
    )
    until("exited")
    sys.stdout.write(json.dumps({"zygote": zygote.pid, **said}))
finally:
    zygote.close(5.0)
