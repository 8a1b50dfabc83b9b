"""What a container finds inside: its environment and its volumes, from the objects of the API."""

from __future__ import annotations

import base64
import os
import re
import shlex
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pod_image
from api_faults import Access, quantity
from api_resources import CLAIMS, CONFIGMAPS, SECRETS, Object, Resource
from api_store import Store

_FIELD = re.compile(r"metadata\.(labels|annotations)\['(.+)'\]$")
_TOKEN_PLACE = "/var/run/secrets/kubernetes.io/serviceaccount"  # noqa: S105  # a directory


class NotReadyError(Exception):
    """Something a container needs is not there; `reason` is what its state says."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Mount(NamedTuple):
    """A host path and where a container sees it."""

    source: Path
    target: str
    read_only: bool = False


class Volumes(NamedTuple):
    """The volumes of a pod: host paths, and those of memory that its sandbox mounts."""

    paths: dict[str, Path]
    memory: list[tuple[Path, int]]
    """Mount point and size in bytes (0: half of the memory)."""


def image_mounts(mountinfo: str, needed: Iterable[Path]) -> list[Mount]:
    """Return the file systems besides the root that hold what the image is made of.

    Args:
        mountinfo: text of /proc/self/mountinfo.
        needed: Python, its packages, this code.
    """
    points = [line.split()[4].replace("\\040", " ") for line in mountinfo.splitlines()]
    found = {
        point for path in needed for point in points if point != "/" and path.is_relative_to(point)
    }
    return [Mount(Path(point), point, read_only=True) for point in sorted(found)]


def hidden_by(mounts: Iterable[Mount], needed: Iterable[Path]) -> list[Mount]:
    """Return mounts that bring back what the image is made of where a pod's volumes hide it.

    A real image has nothing below /tmp; this machine may have this code there.
    """
    over = [Path(os.path.realpath(m.target)) for m in mounts if m.source != Path(m.target)]
    hidden = {path for path in needed for place in over if path.is_relative_to(place)}
    return [Mount(path, str(path), read_only=True) for path in sorted(hidden)]


class Inside:
    """Looks up what pods name.

    Args:
        claims: folder of the persistent volume claims, `NAMESPACE/NAME` in it.
        service: address and port of the API server as pods reach it.
        certificate: file with the server's certificate.
    """

    def __init__(
        self,
        store: Store,
        access: Access,
        *,
        claims: Path,
        service: tuple[str, int],
        certificate: Path,
    ) -> None:
        self._store, self._access = store, access
        self._claims, self._service, self._certificate = claims, service, certificate

    def environment(self, pod: Object, container: Object) -> dict[str, str]:
        """Return a container's environment.

        Raises:
            NotReadyError: a ConfigMap or Secret is missing.
        """
        env = pod_image.environment()
        env["HOSTNAME"] = hostname(pod)
        env["KUBERNETES_SERVICE_HOST"] = self._service[0]
        env["KUBERNETES_SERVICE_PORT"] = str(self._service[1])
        space = pod["metadata"]["namespace"]
        for source in container.get("envFrom") or ():
            for kind, resource in (("configMapRef", CONFIGMAPS), ("secretRef", SECRETS)):
                if ref := source.get(kind):
                    data = self._data(resource, space, ref["name"], ref.get("optional"))
                    prefix = source.get("prefix", "")
                    env |= {prefix + key: _text(value) for key, value in data.items()}
        for entry in container.get("env") or ():
            value = self._value(pod, container, entry, env)
            if value is not None:
                env[entry["name"]] = value
        return env

    def volumes(self, pod: Object, folder: Path) -> Volumes:
        """Write the volumes of a pod below `folder`.

        Raises:
            NotReadyError: a claim, ConfigMap or Secret is missing.
        """
        paths: dict[str, Path] = {}
        memory: list[tuple[Path, int]] = []
        for volume in pod["spec"].get("volumes") or ():
            path = folder / "volumes" / volume["name"]
            if claim := volume.get("persistentVolumeClaim"):
                path = self._claim(pod["metadata"]["namespace"], claim["claimName"])
            elif host := volume.get("hostPath"):
                path = Path(host["path"])
            else:
                path.mkdir(parents=True, exist_ok=True)
            paths[volume["name"]] = path
            if (empty := volume.get("emptyDir")) is not None:
                if empty.get("medium") == "Memory":
                    memory.append((path, int(quantity(empty.get("sizeLimit", 0)))))
                else:
                    path.chmod(0o777)
            self._fill(pod, volume, path)
            self._give_group(pod, volume, path)
        token = folder / "token"
        if pod["spec"].get("automountServiceAccountToken", True):
            self._write_token(pod, token)
        return Volumes(paths, memory)

    def mounts(self, pod: Object, container: Object, volumes: Volumes, folder: Path) -> list[Mount]:
        """Return what to mount into a container."""
        found = image_mounts(Path("/proc/self/mountinfo").read_text(), pod_image.needed())
        for mount in container.get("volumeMounts") or ():
            source = volumes.paths[mount["name"]]
            if part := mount.get("subPath"):
                source /= part
                if not source.exists():
                    source.mkdir(parents=True)
            kinds = {"configMap", "secret", "downwardAPI", "projected"}
            volume = next(v for v in pod["spec"]["volumes"] if v["name"] == mount["name"])
            fixed = bool(kinds & set(volume)) or mount.get("readOnly", False)
            found.append(Mount(source, mount["mountPath"], fixed))
        token = folder / "token"
        if token.exists() and all(m.target != _TOKEN_PLACE for m in found):
            found.append(Mount(token, _TOKEN_PLACE, read_only=True))
        return sorted(found, key=lambda m: m.target.count("/"))

    # Inside

    def _value(
        self, pod: Object, container: Object, entry: Object, env: dict[str, str]
    ) -> str | None:
        source = entry.get("valueFrom")
        if not source:
            return expand(entry.get("value") or "", env)
        if field := source.get("fieldRef"):
            return field_of(pod, field["fieldPath"])
        if ref := source.get("resourceFieldRef"):
            section, _, key = ref["resource"].partition(".")
            values = (container.get("resources") or {}).get(section) or {}
            return str(int(-(-quantity(values.get(key, 0)) // quantity(ref.get("divisor") or 1))))
        kind, resource = (
            ("configMapKeyRef", CONFIGMAPS)
            if "configMapKeyRef" in source
            else ("secretKeyRef", SECRETS)
        )
        ref = source[kind]
        space = pod["metadata"]["namespace"]
        data = self._data(resource, space, ref["name"], ref.get("optional"))
        if ref["key"] in data:
            return _text(data[ref["key"]])
        if ref.get("optional"):
            return None
        text = f"couldn't find key {ref['key']} in {resource.kind} {space}/{ref['name']}"
        raise NotReadyError("CreateContainerConfigError", text)

    def _data(
        self, resource: Resource, space: str, name: str, optional: object
    ) -> dict[str, bytes]:
        obj = self._store.find(resource, space, name)
        if obj is None:
            if optional:
                return {}
            text = f'{resource.kind.lower()} "{name}" not found'
            raise NotReadyError("CreateContainerConfigError", text)
        data = {key: value.encode() for key, value in (obj.get("stringData") or {}).items()}
        plain = obj.get("data") or {}
        if resource == SECRETS:
            return data | {key: base64.b64decode(value) for key, value in plain.items()}
        data |= {key: value.encode() for key, value in plain.items()}
        binary = obj.get("binaryData") or {}
        return data | {key: base64.b64decode(value) for key, value in binary.items()}

    def _claim(self, space: str, name: str) -> Path:
        claim = self._store.find(CLAIMS, space, name)
        if claim is None:
            raise NotReadyError("FailedMount", f'persistentvolumeclaim "{name}" not found')
        path = self._claims / space / name
        path.mkdir(parents=True, exist_ok=True)
        path.chmod(0o777)
        return path

    def _fill(self, pod: Object, volume: Object, path: Path) -> None:
        sources = (volume.get("projected") or {}).get("sources") or [volume]
        space = pod["metadata"]["namespace"]
        for source in sources:
            for kind, resource in (("configMap", CONFIGMAPS), ("secret", SECRETS)):
                if (ref := source.get(kind)) is None:
                    continue
                name = ref.get("name") or ref.get("secretName")
                try:
                    data = self._data(resource, space, name, ref.get("optional"))
                except NotReadyError as error:
                    text = f'MountVolume.SetUp failed for volume "{volume["name"]}" : {error}'
                    raise NotReadyError("FailedMount", text) from None
                items = ref.get("items") or [{"key": key, "path": key} for key in data]
                for item in items:
                    _write(path / item["path"], data[item["key"]], ref.get("defaultMode"))
            for item in (source.get("downwardAPI") or {}).get("items") or ():
                text = field_of(pod, item["fieldRef"]["fieldPath"])
                _write(path / item["path"], text.encode(), None)

    def _give_group(self, pod: Object, volume: Object, path: Path) -> None:
        group = (pod["spec"].get("securityContext") or {}).get("fsGroup")
        if group is None or "hostPath" in volume:
            return
        for place in [path, *path.rglob("*")]:
            os.chown(place, -1, group, follow_symlinks=False)
            if not place.is_symlink():
                place.chmod(place.stat().st_mode | (0o2070 if place.is_dir() else 0o060))

    def _write_token(self, pod: Object, folder: Path) -> None:
        space = pod["metadata"]["namespace"]
        account = pod["spec"].get("serviceAccountName") or "default"
        token = self._access.token(f"system:serviceaccount:{space}:{account}")
        _write(folder / "token", token.encode(), 0o644)
        _write(folder / "ca.crt", self._certificate.read_bytes(), 0o644)
        _write(folder / "namespace", space.encode(), 0o644)


def hostname(pod: Object) -> str:
    return str(pod["spec"].get("hostname") or pod["metadata"]["name"])[:63]


def names_of(pod: Object) -> list[str]:
    """Return the names under which the cluster's DNS has a pod."""
    name = hostname(pod)
    if not (subdomain := pod["spec"].get("subdomain")):
        return [name]
    full, space = f"{name}.{subdomain}", pod["metadata"]["namespace"]
    return [name, full, f"{full}.{space}.svc", f"{full}.{space}.svc.cluster.local"]


def finds_program(command: list[str], spec: Object, path: str) -> bool:
    """Return whether a program is there; what lies in volumes is not looked at."""
    targets = [m["mountPath"] for m in spec.get("volumeMounts") or ()]
    if command and any(command[0].startswith(f"{target}/") for target in targets):
        return True
    return bool(command) and pod_image.has_program(command[0], path)


def check_images(pod: Object) -> None:
    """Check that the images are there: all are but those that say no-such.

    Raises:
        NotReadyError: as a container's state says it.
    """
    spec = pod["spec"]
    for container in [*(spec.get("initContainers") or ()), *spec["containers"]]:
        image = container["image"]
        if any(c.isspace() for c in image) or image != image.strip():
            raise NotReadyError(
                "InvalidImageName", f'Failed to apply default image tag "{image}": '
            )
        if "no-such" in image:
            text = f'Back-off pulling image "{image}": ErrImagePull: failed to pull and unpack '
            text += f'image "{image}": failed to resolve reference: not found'
            raise NotReadyError("ImagePullBackOff", text)


def field_of(pod: Object, path: str) -> str:
    """Return a field of the downward API."""
    if match := _FIELD.match(path):
        return str((pod["metadata"].get(match[1]) or {}).get(match[2], ""))
    value: object = pod
    for key in path.split("."):
        value = value.get(key, "") if isinstance(value, dict) else ""
    return str(value)


def expand(text: str, env: dict[str, str]) -> str:
    """Return a text with each $(NAME) that is known replaced; $$ is a dollar."""

    def one(match: re.Match[str]) -> str:
        if match[0] == "$$":
            return "$"
        return env.get(match[1], match[0])

    return re.sub(r"\$\$|\$\(([^)]+)\)", one, text)


def mount_script(mounts: list[Mount]) -> str:
    """Return shell lines that mount everything below $R."""
    lines = []
    for mount in mounts:
        # Links (/var/run) are those of this machine: followed below the root they would lead out.
        inner = shlex.quote(os.path.realpath(mount.target).lstrip("/"))
        target = f'"$R"/{inner}'
        if mount.source.is_dir():
            lines.append(f"mkdir -p {target}")
        else:
            lines.append(f'mkdir -p "$(dirname {target})"; touch {target}')
        lines.append(f"mount --bind {shlex.quote(str(mount.source))} {target}")
        if mount.read_only:
            lines.append(f"mount -o remount,bind,ro {target}")
    return "\n".join(lines)


def _text(value: bytes) -> str:
    return value.decode(errors="replace")


def _write(path: Path, data: bytes, mode: int | None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(0o644 if mode is None else mode)
