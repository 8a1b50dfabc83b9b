"""Brings a run's files from where its nodes write them, before anything reads them here.

On platforms that share storage with this machine there is nothing to do.
"""

from __future__ import annotations

from launcher.backends.base import Backend, JobRef
from launcher.errors import HoldfastError, UserError


def fetched(backend: Backend, job: JobRef) -> str:
    """Bring what is new of the run of `job`; return what kept it from coming, or nothing.

    What cannot be had now is reported beside what is known: it must not hide that.
    """
    if not job.id:
        return ""
    try:
        backend.fetch(job)
    except OSError as error:
        return f"{job.run_dir} cannot be written: {error.strerror or error}"
    except HoldfastError as error:
        said = error.message if isinstance(error, UserError) else str(error)
        return f"the run's files could not be fetched: {said}"
    return ""
