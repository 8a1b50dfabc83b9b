"""Since when nothing was saved: the clock of `checkpoint.every_s` outlives epochs. Pure."""

from __future__ import annotations


def unsaved_s(
    now_unix: float, now_mono: float, *, committed_unix: float | None, since_mono: float | None
) -> float:
    """Return for how long, in seconds, nothing was saved while the job ran.

    A job that fails more often than every `every_s` seconds would never save if each epoch
    counted anew. The shorter of two times holds: since the newest commit, by the clocks of two
    machines that may differ, and since this node's agent began.

    Args:
        now_unix: seconds since 1970, by this machine.
        now_mono: monotonic seconds of this machine.
        committed_unix: when the newest commit was made, by its writer; None: unknown, or never.
        since_mono: when this node's agent started, by the same monotonic clock; None: unknown.
    """
    times = []
    if committed_unix is not None:
        times.append(now_unix - committed_unix)
    if since_mono is not None:
        times.append(now_mono - since_mono)
    return max(0.0, min(times, default=0.0))
