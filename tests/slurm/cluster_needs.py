"""What an emulated cluster needs of this machine, and what a killed one has left on it."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
COMMANDS = ("slurmctld", "slurmd", "sbatch", "munged", "ip", "unshare", "nsenter", "setpriv")
SYSTEM_PATH = "/usr/sbin:/usr/bin:/sbin:/bin"


def why_not() -> str | None:
    """Return why no cluster can be built here, with the way out; None: it can."""
    if missing := [name for name in COMMANDS if shutil.which(name, path=SYSTEM_PATH) is None]:
        return (
            f"a real Slurm needs {', '.join(missing)}: as root on Debian, apt-get install -y "
            f"--no-install-recommends {' '.join(PACKAGES)} iproute2 util-linux"
        )
    if os.geteuid() != 0:
        return "a real Slurm of several nodes needs root (namespaces); run the tests as root"
    done = subprocess.run(
        ["unshare", "-n", "-m", "-u", "-i", "-p", "--fork", "--mount-proc", "true"],
        capture_output=True,
        text=True,
        check=False,
        timeout=30,
    )
    if done.returncode:
        return f"a real Slurm of several nodes needs namespaces: {done.stderr.strip()}"
    return None


def install() -> None:
    """Install Debian's packages where that is possible and they are missing."""
    missing = any(shutil.which(name, path=SYSTEM_PATH) is None for name in COMMANDS)
    if not missing or os.geteuid() != 0 or not Path("/etc/debian_version").exists():
        return
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    command = ["apt-get", "install", "-y", "--no-install-recommends"]
    command += [*PACKAGES, "iproute2", "util-linux"]
    for args in (command, ["apt-get", "update"], command):
        done = subprocess.run(args, env=env, capture_output=True, check=False, timeout=240)
        if args is command and done.returncode == 0:
            return


def remove_leftovers() -> None:
    """Remove the directories of clusters whose process was killed."""
    for path in Path(tempfile.gettempdir()).glob("hfslurm-*-*"):
        owner = path.name.split("-")[1]
        if not Path(f"/proc/{owner}").exists():
            shutil.rmtree(path, ignore_errors=True)
