"""For all tests. Hypothesis measures no time: on a busy machine that says nothing of the code.

Properties are tried with 25 examples in `make test`, the same ones each time, and with 200 others
in `make chaos` (`--hypothesis-profile chaos`). A test that needs more says how many times as many.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter
from itertools import chain

import pytest
from _pytest.terminal import TerminalReporter
from hypothesis import HealthCheck, settings
from order import dealt

for _profile, _examples in (("holdfast", 25), ("chaos", 200)):
    settings.register_profile(
        _profile,
        max_examples=_examples,
        derandomize=_profile == "holdfast",
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
settings.load_profile("holdfast")

# A shell starts what it puts into the background with SIGINT ignored, nohup with SIGHUP; so would
# be all that the tests start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

gc.disable()  # what is imported stays, and is a million objects to look at


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.hookimpl(tryfirst=True)  # before those that leave tests out
def pytest_itemcollected(item: pytest.Item) -> None:
    """Take real clusters for slow, but the few tests of them that `make test` runs."""
    if {"cluster", "slurm"} & {*item.path.parts} and not item.get_closest_marker("scenario"):
        item.add_marker("process")


@pytest.hookimpl(trylast=True)  # after those that leave tests out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Deal the tests out to the workers of `-n`; without, their order is that of the files."""
    num_workers = int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1"))
    if num_workers > 1:
        items[:] = dealt([(item.nodeid.partition("::")[0], item) for item in items], num_workers)


def pytest_terminal_summary(terminalreporter: TerminalReporter) -> None:
    """Show where the time went, by folder."""
    seconds: Counter[str] = Counter()
    for report in chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            seconds[report.nodeid.partition("::")[0].rpartition("/")[0]] += report.duration
    terminalreporter.write_sep("=", "seconds by folder, of all workers together")
    for folder, spent in seconds.most_common():
        terminalreporter.write_line(f"{spent:8.1f} {folder}")
