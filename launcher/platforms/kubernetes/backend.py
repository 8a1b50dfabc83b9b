"""Kubernetes by its API: submits PyTorchJobs, JobSets and TrainJobs, watches and ends them.

A cluster that does not answer makes jobs UNKNOWN, never failed. Where the launcher does not see the
pods' storage, it sends the run's first files there and fetches the others, by exec.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Final, TypeVar

from launcher.platforms.base import (
    Backend,
    JobId,
    JobRef,
    JobState,
    JobStatus,
    Machine,
    PlatformEvent,
)
from launcher.platforms.commands import CommandResult
from launcher.platforms.kubernetes.admission import look_at, problems, request_of
from launcher.platforms.kubernetes.api import KubernetesApi, connect, watch_until
from launcher.platforms.kubernetes.documents import (
    EVENT,
    MANAGED_BY,
    NODE,
    POD,
    RESOURCES,
    WORKLOADS,
    Bundle,
    Object,
    Resource,
    attempt_of,
    mounted_secret,
    read_bundle,
    stamped,
)
from launcher.platforms.kubernetes.errors import NotThereError
from launcher.platforms.kubernetes.files import Fetched
from launcher.platforms.kubernetes.pods import (
    OUTLIVED_S,
    has_ended,
    host_of,
    is_ending,
    is_true,
    label_of,
    made_at,
    name_of,
    phase_of,
    runs,
    time_of,
    trouble_of,
    uid_of,
)
from launcher.platforms.kubernetes.status_text import (
    DRAIN_REASON,
    ApiView,
    as_machines,
    description_of,
    events_of,
    status_of,
)
from launcher.platforms.kubernetes.storage import Storage
from launcher.platforms.kubernetes.submit import Creation
from launcher.record import stop_request
from launcher.render.kubernetes_names import MANAGED_LABEL, QUEUE_LABEL, RUN_LABEL
from launcher.render.local import JOB_FILE, MANIFESTS
from launcher.spec.errors import PlatformError, Problem, UserError

_Item = TypeVar("_Item")

CANCEL_S: Final = 30.0
"""Grace period of a cancelled job's pods; as Slurm's KillWait."""
_FIRST_PODS_S: Final = 5.0
"""Pods made later than this after the start of a job are not its first."""
_AT_ONCE: Final = 16
"""Parallel calls."""
_RECENT_S: Final = 9.0
"""`fetch` uses a view of a job for this long: thousands of pods are megabytes."""
_ROUND_S: Final = 20.0
"""An abandoned watch ends within this."""
_MOST_NAMES: Final = 40
"""Jobs in a selector; for more, all of ours are listed."""
_MOST_NODES: Final = 16
"""Nodes that are looked up one by one."""
_DRAIN_OPTIONS: Final = (
    "--ignore-daemonsets",
    "--delete-emptydir-data",  # /dev/shm is one
    f"--pod-selector={MANAGED_LABEL}={MANAGED_BY}",
)


class KubernetesBackend(Backend):
    """Submits RUN/manifests.yaml, whose documents say the job's kind, and watches the job."""

    def __init__(
        self,
        connected: Callable[[str], KubernetesApi] = connect,
        *,
        sleep: Callable[[float], None] = time.sleep,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._sleep, self._wall = sleep, wall
        self._api = cache(connected)
        self._bundles: dict[str, Bundle] = {}
        self._last: dict[JobRef, tuple[float, ApiView]] = {}
        """The last view of a job, and its time."""

    def find_problems(
        self, files: Mapping[str, str], *, without: Sequence[str] = ()
    ) -> list[Problem]:
        """Return problems that the dry run of the documents does not see; see `Backend`.

        HF753, HF756, HF757, HF760; nothing about a cluster that cannot be reached.
        """
        del without
        bundle = read_bundle(files)
        try:
            api = self._api(bundle.context)
        except UserError:
            return []  # `submit` says so
        job = request_of(bundle, files.get("job.json", ""), bundle.namespace or api.namespace)
        return problems(job, look_at(api, job))

    def check(self, files: Mapping[str, str]) -> list[str]:
        """Let the server check all documents (dry run); nothing is made.

        Raises:
            UserError: HF750 to HF757 why it would not take them.
            PlatformError: it is away.
        """
        creation = self._creation(read_bundle(files), files)
        creation.dry_run()
        context = creation.api.context
        where = f"context {context}" if context else "this cluster"
        return [f"Kubernetes would take it, in namespace {creation.namespace} of {where}"]

    def machines(self, files: Mapping[str, str] | None = None) -> list[Machine]:
        """Return the nodes of the bundle's cluster, or of the current context's."""
        context = "" if files is None else read_bundle(files).context
        return as_machines(self._api(context).list_all(NODE, "")[0])

    def register_server(self, of: Mapping[str, str] | JobRef) -> KubernetesApi:
        """Return the client of the cluster of a bundle or a job."""
        return self._at(of).api if isinstance(of, JobRef) else self._api(read_bundle(of).context)

    def drain_machines(self, names: Sequence[str], reason: str) -> None:
        """Cordon nodes and delete our pods there, which leave at a step boundary.

        Nothing is done without a cordon: the new pods could come back to the same nodes.

        Raises:
            UserError: HF693 the user may not; with an administrator's command.
            PlatformError: the cluster is away.
        """
        api = self._api("")
        # With the date: nothing takes the annotation away when the node is uncordoned.
        said = f"{reason} [{time.strftime('%Y-%m-%d %H:%M', time.localtime(self._wall()))}]"
        about = {"metadata": {"annotations": {DRAIN_REASON: said}}, "spec": {"unschedulable": True}}

        def cordon(name: str) -> None:
            with contextlib.suppress(NotThereError):  # it has gone since it was listed
                api.patch(NODE, "", name, about)

        def delete(pod: Object) -> None:  # its agent leaves the job, its state is saved
            api.delete(POD, pod["metadata"]["namespace"], name_of(pod))

        try:
            _at_once(cordon, names)
            _at_once(delete, self._pods_on(names))
        except UserError as error:
            if error.code != "HF753":
                raise
            command = shlex.join(["kubectl", "drain", *names, *_DRAIN_OPTIONS])
            raise UserError("HF693", f"{error.message}; or an administrator: {command}") from error

    def still_on(self, names: Sequence[str]) -> dict[str, str]:
        """Return the nodes with pods of ours, and which."""
        found: dict[str, str] = {}
        for pod in self._pods_on(names):
            node = str(host_of(pod))
            found[node] = f"{found[node]}, {name_of(pod)}" if node in found else name_of(pod)
        return found

    def _pods_on(self, names: Sequence[str]) -> list[Object]:
        """Return our live pods on nodes, of all namespaces, also those yet to start."""
        found, _ = self._api("").list_all(POD, "", labels=f"{MANAGED_LABEL}={MANAGED_BY}")
        ended = ("Succeeded", "Failed")
        return [pod for pod in found if host_of(pod) in names and phase_of(pod) not in ended]

    def nodes_run_dir(self, run_dir: Path, files: Mapping[str, str]) -> str:
        """Return where the pods see `run_dir`."""
        del run_dir
        return read_bundle(files).run_dir

    def only_data_is_shared(self, files: Mapping[str, str]) -> bool:
        """Return whether the pods mount the run's Secret: the board is a ConfigMap then."""
        return mounted_secret(read_bundle(files).documents) is not None

    def submit(
        self,
        run_dir: Path,
        files: Mapping[str, str],
        *,
        tasks: Sequence[int] | None = None,
        without: Sequence[str] = (),
    ) -> JobRef:
        """Check and make the documents; when this raises, none of them is left.

        Raises:
            UserError: HF611, HF615, HF750 to HF759.
            PlatformError: the cluster is away.
        """
        assert tasks is None, "there are no arrays here"
        bundle = read_bundle(files)
        self._bundles.pop(str(run_dir), None)  # it may ask for something else than it did
        creation = self._creation(bundle, files, without)
        creation.dry_run()
        creation.clear()
        if bundle.run_dir == str(run_dir):
            made = creation.make()
        else:
            storage = self._storage(creation.api, creation.namespace, bundle)
            made = self._submit_elsewhere(run_dir, creation, storage, fresh=not attempt_of(files))
        return JobRef(
            id=JobId(bundle.name),
            submit_time=made_at(made),
            run_dir=str(run_dir),
            cluster=f"{creation.api.context}/{creation.namespace}",
        )

    def _submit_elsewhere(
        self, run_dir: Path, creation: Creation, storage: Storage, *, fresh: bool
    ) -> Object:
        """Send the run to the pods' storage, then make the documents."""
        fetched = Fetched.load(run_dir)
        with storage.pod() as pod:
            storage.put(pod, fetched, fresh=fresh)
            try:
                return creation.make()
            except BaseException:
                if fresh:
                    with contextlib.suppress(UserError, PlatformError):  # the first error counts
                        storage.drop(pod)
                raise

    def status(self, jobs: Sequence[JobRef]) -> dict[JobRef, JobStatus]:
        """Return the status of each job; see `Backend.status`."""
        answers: dict[JobRef, JobStatus] = {}
        for cluster in dict.fromkeys(job.cluster for job in jobs):
            asked = []
            for job in [one for one in jobs if one.cluster == cluster]:
                try:
                    self._bundle(job)
                except UserError as error:  # of this run; the others must show
                    answers[job] = JobStatus(state=JobState.UNKNOWN, reason=error.message)
                else:
                    asked.append(job)
            try:
                seen = self._seen(asked)
            except (UserError, PlatformError) as error:
                words = "nothing is known of it now"
                away = JobStatus(state=JobState.UNKNOWN, reason=str(error), words=words)
                answers |= dict.fromkeys(asked, away)
                continue
            for job in asked:
                self._last[job] = (time.monotonic(), seen[job])
                answers[job] = status_of(
                    seen[job],
                    now_unix=self._wall(),
                    stop_asked=stop_request.asked(Path(job.run_dir)),
                )
        return answers

    def ask_to_save(self, job: JobRef) -> bool:
        """Delete the job: its pods save while they end. False: it does not run.

        Only a deletion reaches every pod, and their grace period is as long as a save may take.
        RUN/stop.json says that the whole run ends.
        """
        seen = self._seen([job])[job]
        if seen.job is None or has_ended(seen.job):
            return False
        if not is_ending(seen.job) and not any(map(runs, seen.pods)):
            return False
        self._delete(job, seen)
        return True

    def cancel(self, job: JobRef) -> None:
        """Delete the job, if it has not ended already; its pods have 30 s."""
        here, seen = self._at(job), self._seen([job])[job]
        if seen.job is not None:
            if has_ended(seen.job) and not is_ending(seen.job):
                return
            self._delete(job, seen)

        def end(pod: Object) -> None:
            here.api.delete(POD, here.namespace, name_of(pod), grace_s=CANCEL_S)

        _at_once(end, seen.pods)

    def output_files(self, job: JobRef) -> list[Path]:
        """Return the fetched output of the pods, oldest first."""
        found = (Path(job.run_dir) / "logs" / "pods").glob("*.log")
        return sorted(found, key=lambda path: path.stat().st_mtime)

    def describe(self, job: JobRef) -> dict[str, str]:
        """Return the API's record of the job and its pods."""
        found = description_of(self._seen([job])[job])
        context = self._at(job).api.context or "in the cluster"
        return {"Context": context, **found} if found else {}

    def events(self, job: JobRef) -> list[PlatformEvent]:
        """Return the events of the job and its pods; clusters keep them for an hour or so."""
        return events_of(self._seen([job], details=True)[job])

    def fetch(self, job: JobRef) -> None:
        """Bring the run's new files, and its pods' output, into `job.run_dir`.

        Raises:
            UserError: HF753, HF759: they cannot be had.
            PlatformError: the cluster is away.
        """
        storage = self._at(job)
        asked_at, seen = self._last.pop(job, (float("-inf"), None))
        if seen is None or time.monotonic() - asked_at > _RECENT_S:
            asked_at, seen = time.monotonic(), self._seen([job])[job]
        storage.fetch(Path(job.run_dir), seen, mark=f"{job.id} {job.submit_time}")
        self._last[job] = (asked_at, seen)  # only what led to files is used again

    def run_on(
        self, job: JobRef, node: str, argv: Sequence[str], *, timeout_s: float
    ) -> CommandResult:
        """Run a command in the pod called `node`, beside its agent; raises as `PodExec.run`."""
        return self._at(job).exec.run(node, argv, timeout_s=timeout_s)

    def terminal_on(self, job: JobRef, node: str, argv: Sequence[str]) -> int:
        """Run a command in the pod called `node` with this terminal; raises as `PodExec.run`."""
        return self._at(job).exec.terminal(node, argv)

    @contextlib.contextmanager
    def noticing(self, job: JobRef) -> Iterator[threading.Event]:
        """Set the event whenever the job or a pod of it changes.

        A user who may not watch is not notified: polling continues anyway.
        """
        here, labels = self._at(job), f"{RUN_LABEL}={job.id}"
        changed, over = threading.Event(), threading.Event()
        watched = partial(watch_until, here.api, for_s=_ROUND_S, labels=labels)

        def on_change(objects: Mapping[str, Object]) -> bool:
            del objects
            changed.set()
            return over.is_set()

        def watch(resource: Resource) -> None:
            with contextlib.suppress(UserError, PlatformError):
                while not over.is_set():
                    watched(resource, here.namespace, on_change)

        for resource in (POD, RESOURCES[here.bundle.kind]):
            threading.Thread(target=watch, args=(resource,), daemon=True).start()
        try:
            yield changed
        finally:
            over.set()

    def remote_paths(self, job: JobRef) -> tuple[str, str]:
        """Return the interpreter with holdfast and the run directory, as in the pods."""
        bundle = self._bundle(job)
        return bundle.python, bundle.run_dir

    def _seen(self, jobs: Sequence[JobRef], *, details: bool = False) -> dict[JobRef, ApiView]:
        """Return views of jobs of one namespace."""
        if not jobs:
            return {}
        bundles, here = {str(job.id): self._bundle(job) for job in jobs}, self._at(jobs[0])
        look = _Look(api=here.api, namespace=here.namespace, now_unix=self._wall())
        found = look.at(bundles, details=details)
        return {job: _same(found[str(job.id)], job) for job in jobs}

    def _delete(self, job: JobRef, seen: ApiView) -> None:
        """Tell the agents that the run ends, where their storage is elsewhere; delete the job.

        Not in the foreground: Trainer's webhook refuses to let go of a TrainJob whose
        TrainingRuntime has gone before it. Another deletion frees a job that is stuck so.
        """
        assert seen.job is not None
        here, run_dir, pods = self._at(job), Path(job.run_dir), seen.reached
        if here.bundle.run_dir != job.run_dir and pods and stop_request.asked(run_dir):
            # Should it not get there: the deletion, which every pod is notified of, is enough.
            with contextlib.suppress(UserError, PlatformError):
                here.put_stop(pods[0], run_dir)
        here.api.delete(RESOURCES[here.bundle.kind], here.namespace, job.id, uid=uid_of(seen.job))

    def _bundle(self, job: JobRef) -> Bundle:
        """Return what was submitted, from the files in the run directory (HF613)."""
        if job.run_dir not in self._bundles:
            files = {}
            for name in (JOB_FILE, MANIFESTS):
                with contextlib.suppress(FileNotFoundError):
                    path = Path(job.run_dir) / name
                    files[name] = path.read_text(encoding="utf-8", errors="replace")
            self._bundles[job.run_dir] = read_bundle(files)
        return self._bundles[job.run_dir]

    def _at(self, job: JobRef) -> Storage:
        """Return the storage of a submitted job, with its cluster, namespace and bundle."""
        context, _, namespace = job.cluster.rpartition("/")
        return self._storage(self._api(context), namespace, self._bundle(job))

    def _creation(
        self, bundle: Bundle, files: Mapping[str, str], without: Sequence[str] = ()
    ) -> Creation:
        api = self._api(bundle.context)
        namespace = bundle.namespace or api.namespace
        documents = stamped(
            bundle,
            namespace=namespace,
            attempt=attempt_of(files),
            submission=os.urandom(8).hex(),
            without=without,
            secret=os.urandom(32),
        )
        return Creation(api=api, namespace=namespace, documents=documents, sleep=self._sleep)

    def _storage(self, api: KubernetesApi, namespace: str, bundle: Bundle) -> Storage:
        return Storage(api=api, namespace=namespace, bundle=bundle, wall=self._wall)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Looks at jobs of one namespace."""

    api: KubernetesApi
    namespace: str
    now_unix: float

    def at(self, bundles: Mapping[str, Bundle], *, details: bool = False) -> dict[str, ApiView]:
        """Return views of jobs, by name; with `details` also events of jobs that are well.

        Raises:
            UserError, PlatformError: the cluster cannot be asked.
        """
        labels = f"{MANAGED_LABEL}={MANAGED_BY}"
        if len(bundles) <= _MOST_NAMES:
            labels += f",{RUN_LABEL} in ({','.join(sorted(bundles))})"
        jobs: dict[tuple[str, str], Object] = {}
        for kind in sorted({bundle.kind for bundle in bundles.values()}):
            found, _ = self.api.list_all(RESOURCES[kind], self.namespace, labels=labels)
            # Objects in lists do not say what they are.
            said = {"apiVersion": RESOURCES[kind].api, "kind": kind}
            jobs |= {(kind, name_of(one)): one | said for one in found}
        pods, _ = self.api.list_all(POD, self.namespace, labels=labels)
        by_run: dict[str, list[Object]] = {}
        for pod in pods:
            by_run.setdefault(label_of(pod, RUN_LABEL), []).append(pod)
        seen = {
            name: ApiView(
                job=jobs.get((bundle.kind, name)),
                pods=tuple(by_run.get(name, ())),
                num_pods=bundle.num_pods,
            )
            for name, bundle in bundles.items()
        }
        return self._explained(seen, details=details)

    def _explained(self, seen: dict[str, ApiView], *, details: bool) -> dict[str, ApiView]:
        """Add why jobs do not run, as far as the user's rights allow."""
        unwell = [name for name, one in seen.items() if self._is_unwell(one)]
        events = self._optional(EVENT) if details or unwell else ()
        queued = any(label_of(seen[name].job or {}, QUEUE_LABEL) for name in unwell)
        workloads = self._optional(*WORKLOADS) if queued else ()
        hosts = {
            host_of(pod)
            for name in unwell
            for pod in seen[name].pods
            if host_of(pod) and (is_ending(pod) or not is_true(pod, "Ready"))
        }
        ready = {host: self._answers(host) for host in sorted(hosts)[:_MOST_NODES]}
        known = {host: answers for host, answers in ready.items() if answers is not None}
        return {
            name: replace(one, events=events, workloads=workloads, ready=known)
            if details or name in unwell
            else one
            for name, one in seen.items()
        }

    def _is_unwell(self, seen: ApiView) -> bool:
        """Return whether more has to be asked about it."""
        if seen.job is None or has_ended(seen.job):
            return False
        return sum(map(runs, seen.pods)) < (seen.num_pods or 1) or any(
            self._is_young_successor(pod, seen.job)
            or trouble_of(pod, now_unix=self.now_unix) is not None
            or not is_true(pod, "Ready")
            for pod in seen.pods
        )

    def _is_young_successor(self, pod: Object, job: Object) -> bool:
        """Return whether a PyTorchJob's pod replaced another: only events tell how that ended."""
        if job["kind"] != "PyTorchJob":
            return False  # Jobs keep pods that have failed
        made, started = made_at(pod), time_of((job.get("status") or {}).get("startTime"))
        if made is None or started is None or made <= started + _FIRST_PODS_S:
            return False
        return self.now_unix - made < OUTLIVED_S

    def _optional(self, *versions: Resource) -> Sequence[Object]:
        """Return all objects of a kind, by the first readable version, if any."""
        for resource in versions:
            with contextlib.suppress(UserError, PlatformError):
                return self.api.list_all(resource, self.namespace)[0]
        return ()

    def _answers(self, host: str) -> bool | None:
        """Return whether a node answers; None: unknown (a separate right)."""
        try:
            node = self.api.get(NODE, "", host)
        except (UserError, PlatformError):
            return None
        return False if node is None else is_true(node, "Ready") is not None


def _at_once(act: Callable[[_Item], object], items: Iterable[_Item]) -> None:
    """Act on all items, whatever one of them raises; then raise the first error, if any."""
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        acts = [pool.submit(act, item) for item in items]
    for each in acts:
        each.result()


def _same(seen: ApiView, job: JobRef) -> ApiView:
    """Return `seen` without an object that is a later submission under the same name."""
    if seen.job is None or job.submit_time is None:
        return seen
    made = made_at(seen.job)
    later = made is not None and made > job.submit_time + 1.0
    return replace(seen, job=None, pods=()) if later else seen
