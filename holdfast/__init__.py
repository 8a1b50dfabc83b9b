"""Launch training jobs from programs, as `holdfast.submit("job.yaml").result()`: docs/api.md."""

from launcher.api import (
    FailedRunError,
    Run,
    find_site,
    load_job,
    open_run,
    plan,
    render,
    submit,
    submit_sweep,
)
from launcher.spec.errors import HoldfastError, PlatformError, TemporaryError, UserError

__all__ = [
    "FailedRunError",
    "HoldfastError",
    "PlatformError",
    "Run",
    "TemporaryError",
    "UserError",
    "find_site",
    "load_job",
    "open_run",
    "plan",
    "render",
    "submit",
    "submit_sweep",
]
