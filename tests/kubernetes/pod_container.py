"""Real processes as containers: namespaces of their own, a root over this machine's files.

A sandbox holds what the containers of a pod share: network, host name, memory volumes. A container
is process 1 of its own process namespace, in a root that is an overlay of this machine's: what it
writes outside of its volumes is gone with it. All of it dies with the thread that started it.
"""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO

import pod_image
from api_resources import Object, now_micro
from pod_inside import Mount, Volumes, hidden_by, mount_script
from pod_network import PATH, PodNetwork

_START_S = 30.0
_MAX_LINE = 16 << 10
"""A longer line of a log is split, as container runtimes do."""
_TOOLS = {"PATH": PATH}
_PAUSE = """\
set -eu
hostname "$1"; ip link set lo up
mount --make-rprivate /
{memory}
until ip link set eth0 up 2>/dev/null; do sleep .01; done
ip addr add "$2/16" dev eth0; ip route add default via "$3"
: > "$4"
exec sleep infinity
"""
_ROOT = """\
set -eu
exec 2>&1
mount --make-rprivate /
mount -t tmpfs -o mode=755 root "$1"
mkdir "$1/up" "$1/work" "$1/root"
mount -t overlay root -o "lowerdir={lower},upperdir=$1/up,workdir=$1/work" "$1/root"
R="$1/root"
mount -t proc proc "$R/proc"
mount --rbind /sys "$R/sys"; mount --rbind /dev "$R/dev"
mount -t tmpfs -o size=64m shm "$R/dev/shm"
[ -e "$R/etc/hosts" ] || : > "$R/etc/hosts"
mount --bind "$2" "$R/etc/hosts"
# No name service is here: this one refuses at once, as one of a cluster answers at once.
rm -f "$R/etc/resolv.conf"; echo nameserver 127.0.0.1 > "$R/etc/resolv.conf"
{mounts}
{last}
cd "$R"; : > "$3"; shift 3
exec chroot "$R" {user} "$@"
"""


class Sandbox:
    """What the containers of a pod share.

    Raises:
        AssertionError: it did not start in time.
    """

    def __init__(
        self, network: PodNetwork, name: str, address: str, volumes: Volumes, folder: Path
    ) -> None:
        self.address = address
        self._network = network
        up = folder / "up"
        memory = "\n".join(
            f"mount -t tmpfs -o mode=1777{f',size={size}' if size else ''} shm "
            f"{shlex.quote(str(path))}"
            for path, size in volumes.memory
        )
        with (folder / "sandbox.log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    *("setpriv", "--pdeathsig", "KILL"),
                    *("unshare", "-n", "-i", "-u", "-m", "--fork", "--kill-child"),
                    *("sh", "-c", _PAUSE.format(memory=memory), "pause"),
                    *(name, address, network.gateway, str(up)),
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=_TOOLS,
                start_new_session=True,
            )
        self.pid = _wait_for(lambda: _child(self._process), self._process, "the sandbox")
        network.plug(address, self.pid)
        _wait_for(up.exists, self._process, (folder / "sandbox.log").read_text)

    def end(self) -> None:
        """End the sandbox and take its link away; may be called twice."""
        self._process.kill()
        self._process.wait(timeout=_START_S)
        self._network.unplug(self.address)


class Container:
    """One run of a container.

    Args:
        command: program and arguments.
        mounts: what it sees besides this machine's files.
        options: its `securityContext`, the pod's under it.
        wake: called when it has ended.
    """

    def __init__(
        self,
        sandbox: Sandbox,
        command: list[str],
        env: dict[str, str],
        *,
        mounts: list[Mount],
        options: Object,
        workdir: str,
        hosts: Path,
        folder: Path,
        log: Path,
        wake: Callable[[], None],
    ) -> None:
        self.env, self.options = env, options
        self.log = log
        self._wake = wake
        root = folder / "root"
        root.mkdir(parents=True, exist_ok=True)
        self._started = folder / f"{log.stem}.started"
        workdir = workdir or "/"
        lines = [f'chmod a+x "$R"{shlex.quote(str(path))}' for path in pod_image.closed()]
        lines.append(mount_script([*mounts, *hidden_by(mounts, pod_image.needed())]))
        lines.append(f'mkdir -p "$R"/{shlex.quote(workdir.lstrip("/"))}')
        read_only = options.get("readOnlyRootFilesystem")
        script = _ROOT.format(
            lower=pod_image.IMAGE_ROOT,
            mounts="\n".join(lines),
            last='mount -o remount,ro "$R"' if read_only else "",
            user=shlex.join(as_user(options)),
        )
        inner = ["env", "-i", "-C", workdir, *(f"{k}={v}" for k, v in env.items()), *command]
        self._tools = folder / f"{log.stem}.tools"
        tools = self._tools.open("wb")
        self._process = subprocess.Popen(
            [
                *("setpriv", "--pdeathsig", "KILL"),
                *("nsenter", "-t", str(sandbox.pid), "-n", "-i", "-u", "-m"),
                *("unshare", "-m", "-p", "--fork", "--kill-child"),
                *("sh", "-c", script, "container"),
                *(str(root), str(hosts), str(self._started), *inner),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=tools,
            env=_TOOLS,
            start_new_session=True,
        )
        tools.close()
        self._pump = threading.Thread(target=self._copy, daemon=True)
        self._pump.start()

    @property
    def pid(self) -> int | None:
        """Process 1 of the container, as this machine numbers it; None: not there."""
        return _child(self._process)

    @property
    def exit_code(self) -> int | None:
        """The exit code, 128 + N after a signal; None: it runs."""
        code = self._process.poll()
        if code is None:
            return None
        self._pump.join(timeout=5)
        if code == 1 and b"sigprocmask" in self._tools.read_bytes():
            return 137  # how unshare 2.38 ends when its child is killed
        return code if code >= 0 else 128 - code

    @property
    def started(self) -> bool:
        """Whether its own program was reached."""
        return self._started.exists()

    def signal(self, number: int) -> None:
        """Send a signal to process 1."""
        if (pid := self.pid) is not None:
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                return

    def kill(self) -> None:
        """End it at once, with all of its processes."""
        self.signal(signal.SIGKILL)
        try:
            self._process.wait(timeout=1)
        except subprocess.TimeoutExpired:
            self._process.kill()  # unshare --kill-child takes process 1 with it
            self._process.wait(timeout=_START_S)
        self._pump.join(timeout=5)

    def run(self, command: list[str], *, stdin: bool = False) -> subprocess.Popen[bytes]:
        """Start a command inside, as `kubectl exec` does.

        Raises:
            ProcessLookupError: the container does not run.
        """
        self._reach_program()
        pid = self.pid
        if pid is None:
            raise ProcessLookupError
        user = as_user(self.options)
        return subprocess.Popen(
            [
                *("nsenter", "-t", str(pid), "-m", "-p", "-n", "-i", "-u", "-r", "-w"),
                *(*user, "env", "-i", *(f"{k}={v}" for k, v in self.env.items()), *command),
            ],
            stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,
            env=_TOOLS,
            start_new_session=True,
        )

    def _reach_program(self) -> None:
        """Wait until all is mounted; a real container is not called running before."""
        deadline = time.monotonic() + _START_S
        while not self._is_inside() and self.pid is not None and time.monotonic() < deadline:
            time.sleep(0.01)

    def _is_inside(self) -> bool:
        """Whether process 1 has its own root; a command that is sooner would see this machine's."""
        try:
            return self.started and str(Path(f"/proc/{self.pid}/root").readlink()) != "/"
        except OSError:
            return False

    def _copy(self) -> None:
        """Write each line with its time, as container runtimes keep logs."""
        assert self._process.stdout is not None
        with self._process.stdout as pipe, self.log.open("ab", buffering=0) as out:
            rest = b""
            while data := os.read(pipe.fileno(), 1 << 16):
                rest = _write_lines(out, rest + data)
            if rest:
                out.write(_line(b"P", rest))
        self._wake()


def as_user(options: Object) -> list[str]:
    """Return the command that takes a security context's user and groups."""
    command = ["setpriv", "--pdeathsig", "KILL"]
    user, group = options.get("runAsUser"), options.get("runAsGroup")
    more = options.get("supplementalGroups") or []
    if user or group or more:
        command += ["--reuid", str(user or 0), "--regid", str(group or 0)]
        groups = ",".join(str(g) for g in more)
        command += ["--groups", groups] if more else ["--clear-groups"]
    if options.get("allowPrivilegeEscalation") is False:
        command.append("--no-new-privs")
    return command


def _write_lines(out: IO[bytes], data: bytes) -> bytes:
    *lines, rest = data.split(b"\n")
    for line in lines:
        out.write(_line(b"F", line))
    while len(rest) > _MAX_LINE:
        out.write(_line(b"P", rest[:_MAX_LINE]))
        rest = rest[_MAX_LINE:]
    return rest


def _line(tag: bytes, text: bytes) -> bytes:
    return b"%s %s %s\n" % (now_micro().encode(), tag, text)


def _child(process: subprocess.Popen[bytes]) -> int | None:
    path = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    try:
        words = path.read_text().split()
    except OSError:
        return None
    # setpriv and nsenter become unshare, which has exactly one child.
    return int(words[0]) if words else None


def _wait_for(
    look: Callable[[], object], process: subprocess.Popen[bytes], what: str | Callable[[], str]
) -> int:
    deadline = time.monotonic() + _START_S
    while not (found := look()):
        if process.poll() is not None or time.monotonic() > deadline:
            text = what() if callable(what) else what
            raise AssertionError(f"a pod's sandbox did not start: {text}")
        time.sleep(0.005)
    return int(found)
