"""Makes the documents of a bundle on a cluster: all of them, or none.

First the server checks every one of them (dry run). Then they are made in order, the job last, each
with a mark of this call. On any error, Ctrl-C included, everything with the mark is removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from operator import not_
from typing import Final

import tenacity

from launcher.platforms.kubernetes.api import KubernetesApi
from launcher.platforms.kubernetes.documents import (
    MADE_OF,
    MANAGED_BY,
    SUBMISSION,
    Object,
    resource_of,
)
from launcher.platforms.kubernetes.errors import BrokenOffError, ConflictError, NotThereError
from launcher.platforms.kubernetes.pods import (
    annotation_of,
    has_ended,
    is_ending,
    label_of,
    name_of,
    uid_of,
)
from launcher.platforms.retries import polled
from launcher.render.kubernetes_names import KINDS, MANAGED_LABEL, RUN_LABEL
from launcher.spec.errors import PermanentError, PlatformError, TemporaryError, UserError

KEEP: Final = "holdfast.dev/keep"
"""Annotation: it outlives the job. The first such document is the board, which owns the others."""
_TRIES: Final = 5
GONE_S: Final = 180.0
"""Wait for an ended job of the same name to go."""


@dataclass(slots=True, kw_only=True)
class Creation:
    """Documents to be made together, in order, the job last, marked by `stamped`."""

    api: KubernetesApi
    namespace: str
    documents: Sequence[Object]
    sleep: Callable[[float], None] = time.sleep
    made: list[Object] = field(default_factory=list)
    """What may have been made, in order."""

    def dry_run(self) -> None:
        """Let the server check all documents; nothing is made.

        Raises:
            UserError: HF753 to HF757 its refusal.
            PlatformError: it is away.
        """
        for document in self.documents:
            try:
                self.api.create(resource_of(document), self.namespace, document, dry_run=True)
            except ConflictError:
                continue  # it is fine, and there already: see `clear`
            except (NotThereError, UserError) as error:
                if not _lacks_another(document, error) or self._has_all(document):
                    raise

    def clear(self) -> None:
        """Remove the leftovers of a former submission of the same run.

        Raises:
            UserError: HF615 its job is live; HF758 the name is another's.
            PermanentError: the leftovers do not go.
        """
        left = []
        for document in reversed(self.documents):
            if _is_ours_alone(document):
                continue  # what a former submission made goes with its job
            resource, name = resource_of(document), name_of(document)
            found = self.api.get(resource, self.namespace, name)
            if found is None:
                continue
            self._check_ours(document, found)
            if _is_kept(document):
                continue
            is_job = document["kind"] in KINDS.values()
            if is_job and not (is_ending(found) or has_ended(found)):
                raise UserError(
                    "HF615",
                    f"the run has a live job already: {document['kind']} {name} in namespace "
                    f"{self.namespace}; cancel it first (holdfast cancel RUN --save)",
                )
            if is_job or not is_ending(found):  # a job that is stuck in its deletion is freed so
                self.api.delete(resource, self.namespace, name, uid=uid_of(found))
            left.append(document)
        for document in left:
            self._wait_gone(document)

    def make(self) -> Object:
        """Make all documents and let them belong to the job; return the server's job.

        Raises:
            UserError, PlatformError: as the server says; nothing is left then.
        """
        try:
            found: list[Object] = []
            board: Object | None = None
            for document in self.documents:
                kept = _is_kept(document)
                there = self._get(document) if kept else None
                if there is None:
                    # Pods that save while they end still need their right to write the board.
                    owner = board if kept else found[0] if found else None
                    if owner is not None and document is not self.documents[-1]:
                        document["metadata"]["ownerReferences"] = [_owner(owner)]
                    self.made.append(document)  # before: the answer may be lost
                    there = self._create(document)
                    found.append(there)
                board = board or (there if kept else None)
            job = found[-1]
            if len(found) > 1:
                # The first goes with the job, the others with the first: one right to patch is
                # enough. The job's own pods go before all: they save while they end.
                change = {"metadata": {"ownerReferences": [_owner(job)]}}
                self.api.patch(resource_of(found[0]), self.namespace, name_of(found[0]), change)
        except BaseException as error:
            self._undo(error)
            raise
        return job

    def _create(self, document: Object) -> Object:
        """Make one document; one whose answer was lost is recognised."""

        def once() -> Object:
            try:
                return self.api.create(resource_of(document), self.namespace, document)
            except (BrokenOffError, ConflictError) as error:
                if _is_ours_alone(document):
                    if isinstance(error, ConflictError):
                        return document
                    raise
                found = self._get(document)
                if found is not None and _mark(found) == _mark(document):
                    return found
                if found is not None:
                    self._check_ours(document, found)
                raise

        def again(error: BaseException) -> bool:
            # Webhooks, Trainer's and Kueue's, see a new runtime a little later.
            return isinstance(error, BrokenOffError) or _lacks_another(document, error)

        policy = tenacity.Retrying(
            retry=tenacity.retry_if_exception(again),
            stop=tenacity.stop_after_attempt(_TRIES),
            wait=tenacity.wait_fixed(1.0),
            sleep=self.sleep,
            reraise=True,
        )
        return policy(once)

    def _undo(self, error: BaseException) -> None:
        """Remove what was made, last first."""
        left = []
        for document in reversed(self.made):
            try:
                if _is_ours_alone(document):
                    self.api.delete(resource_of(document), self.namespace, name_of(document))
                    continue
                found = self._get(document)
                if found is None or _mark(found) != _mark(document):
                    continue
                uid = uid_of(found)
                self.api.delete(resource_of(document), self.namespace, name_of(document), uid=uid)
            except (PlatformError, UserError):
                left.append(f"{resource_of(document).name}/{name_of(document)}")
        if left:
            raise PermanentError(
                f"{error or type(error).__name__}; and this could not be removed again: kubectl "
                f"delete --namespace {self.namespace} {' '.join(left)}"
            ) from error

    def _has_all(self, document: Object) -> bool:
        """Return whether the document that a dry run compares another one with exists already."""
        wanted = "Role" if document["kind"] == "RoleBinding" else "TrainingRuntime"
        return all(self._get(one) is not None for one in self.documents if one["kind"] == wanted)

    def _get(self, document: Object) -> Object | None:
        return self.api.get(resource_of(document), self.namespace, name_of(document))

    def _check_ours(self, document: Object, found: Object) -> None:
        """Check that `found` belongs to this run (HF758)."""
        mine = document["metadata"]["labels"][RUN_LABEL]
        if label_of(found, MANAGED_LABEL) != MANAGED_BY or label_of(found, RUN_LABEL) != mine:
            raise UserError(
                "HF758",
                f"there is a {document['kind']} {name_of(document)} in namespace {self.namespace} "
                "already, which is not of this run; submit under another name",
            )

    def _wait_gone(self, document: Object) -> None:
        """Wait until a document and all that its controllers have made of it are gone.

        By asking: watching such objects takes rights that submitting does not.
        """
        labels = f"{RUN_LABEL}={document['metadata']['labels'][RUN_LABEL]}"
        made = MADE_OF.get(document["kind"], ())

        def is_there() -> bool:
            return self._get(document) is not None or any(
                self.api.list_all(each, self.namespace, labels=labels)[0] for each in made
            )

        if polled(is_there, not_, for_s=GONE_S, every_s=0.5, sleep=self.sleep):
            what = f"{resource_of(document).name}/{name_of(document)}"
            raise TemporaryError(
                f"{what} of the former submission is still being removed; see holdfast why RUN, "
                "and submit again"
            )


def _lacks_another(document: Object, error: BaseException) -> bool:
    """Return whether a document may be refused only because another is missing, as in a dry run.

    A RoleBinding is compared with its Role, a TrainJob with its runtime: by Trainer's webhook,
    Kueue's, or one that comes before, each in its own words.
    """
    if document["kind"] == "RoleBinding":
        return isinstance(error, NotThereError)
    refused = isinstance(error, NotThereError) or getattr(error, "code", "") == "HF757"
    return document["kind"] == "TrainJob" and refused and "runtime" in str(error).lower()


def _is_ours_alone(document: Object) -> bool:
    """Return whether only this call makes its name: a Secret, which submitting may not read."""
    return bool(document["kind"] == "Secret")


def _is_kept(document: Object) -> bool:
    return annotation_of(document, KEEP).lower() == "true"


def _owner(owner: Object) -> Object:
    """Return the reference to an owner that waits for nothing when it goes."""
    return {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": name_of(owner),
        "uid": owner["metadata"]["uid"],
        "blockOwnerDeletion": False,
    }


def _mark(document: Object) -> str:
    return annotation_of(document, SUBMISSION)
