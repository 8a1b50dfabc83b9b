"""A real sshd for one user, without a port or a daemon: each connection starts one (`sshd -i`)."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

SSHD = Path("/usr/sbin/sshd")
SEPARATION = Path("/run/sshd")
"""Where sshd locks in the part of it that talks before the login; Debian makes it at boot."""


def install() -> None:
    """Install Debian's sshd where that is possible and it is missing."""
    if os.geteuid() == 0 and Path("/etc/debian_version").exists():
        env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        command = ["apt-get", "install", "-y", "--no-install-recommends"]
        command += ["openssh-server", "openssh-client"]
        for args in (command, ["apt-get", "update"], command):
            if SSHD.exists() and shutil.which("ssh"):
                break
            subprocess.run(args, env=env, capture_output=True, check=False, timeout=240)
        SEPARATION.mkdir(exist_ok=True)


class Sshd:
    """Hosts for `ssh` of `bin`: login, which is this machine, and down, where nobody listens.

    Args:
        folder: for keys and configuration.

    Raises:
        pytest.skip.Exception: there is no sshd.
    """

    def __init__(self, folder: Path) -> None:
        ssh = shutil.which("ssh", path="/usr/bin:/bin")
        if not SSHD.exists() or ssh is None:
            pytest.skip("a real sshd: as root on Debian, apt-get install -y openssh-server")
        self.bin, self.calls = folder / "bin", folder / "calls"
        self.bin.mkdir(parents=True)
        for name in ("host", "user"):
            make = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)]
            subprocess.run(make, check=True, timeout=30)
        (folder / "keys").write_text((folder / "user.pub").read_text())
        (folder / "known").write_text(f"login {(folder / 'host.pub').read_text()}")
        (folder / "sshd_config").write_text(
            f"HostKey {folder}/host\nAuthorizedKeysFile {folder}/keys\nStrictModes no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nUsePAM no\n"
            "PermitRootLogin yes\nPidFile none\nPrintMotd no\n"
        )
        (folder / "ssh_config").write_text(
            f"Host login\n ProxyCommand {SSHD} -i -f {folder}/sshd_config -E {folder}/log\n"
            f" IdentityFile {folder}/user\n IdentitiesOnly yes\n"
            f" UserKnownHostsFile {folder}/known\n"
            "Host down\n HostName 127.0.0.1\n Port 1\n"
        )
        self.put("ssh", f'echo "$@" >>{self.calls}\nexec {ssh} -F {folder}/ssh_config "$@"\n')

    def put(self, name: str, script: str) -> Path:
        """Write a program; return its path."""
        path = self.bin / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
        return path

    def put_holdfast(self, python: str, root: Path, home: Path, **env: str) -> Path:
        """Write the `holdfast` of the site, with a home and an environment of its own."""
        home.mkdir(exist_ok=True)
        given = {"HOME": str(home), "PYTHONPATH": str(root), **env}
        lines = [f"export {name}={shlex.quote(value)}" for name, value in given.items()]
        lines.append(f'exec {shlex.quote(python)} -m launcher.cli.main "$@"')
        return self.put("holdfast-there", "\n".join(lines) + "\n")
