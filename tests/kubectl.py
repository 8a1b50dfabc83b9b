"""kubectl for tests: the machine's own, or Debian's package where one can be installed."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

PACKAGE = "kubernetes-client"


def install() -> None:
    """Install Debian's package where that is possible and there is no kubectl."""
    if shutil.which("kubectl") or os.geteuid() != 0 or not Path("/etc/debian_version").exists():
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    # Tests in other processes may install something too: wait for each other.
    command = ["apt-get", "-o", "DPkg::Lock::Timeout=240", "install", "-y"]
    command += ["--no-install-recommends", PACKAGE]
    for args in (command, ["apt-get", "update"], command):
        done = subprocess.run(args, env=env, capture_output=True, check=False, timeout=300)
        if args is command and done.returncode == 0:
            return


def why_not() -> str | None:
    """Return why there is no kubectl, with the way out; None: there is one."""
    if shutil.which("kubectl"):
        return None
    return f"kubectl is not installed: on Debian, apt-get install {PACKAGE}"


def kubectl(
    *args: str | Path, env: dict[str, str] | None = None, timeout_s: float = 60.0, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Run kubectl to its end; nothing is checked."""
    return subprocess.run(
        ["kubectl", *map(str, args)],
        env=env,
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout_s,
    )


def minor_version() -> int:
    """Return n of kubectl 1.n."""
    found = json.loads(kubectl("version", "--client", "--output", "json").stdout)
    return int("".join(filter(str.isdigit, found["clientVersion"]["minor"])))
