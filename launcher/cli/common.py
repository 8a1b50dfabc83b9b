"""What the commands share: exit codes, options, how problems are printed."""

from __future__ import annotations

import functools
import itertools
import json
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from launcher.spec.errors import Problem, UserError

if TYPE_CHECKING:
    from types import FrameType

    from click.shell_completion import CompletionItem

    from launcher.platforms.sites import Site

EXIT_DONE: Final = 0
EXIT_FAILED: Final = 1
EXIT_USER: Final = 2
EXIT_INTERRUPTED: Final = 130

_Function = TypeVar("_Function", bound=Callable[..., Any])


class AsGiven(click.Command):
    """A command with options before words that stay as they are: click drops their first `--`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the options, each with its value after `=`, then the words."""
        own = {name for param in self.params for name in param.opts if name.startswith("--")}
        options = tuple(itertools.takewhile(lambda word: word.partition("=")[0] in own, args))
        super().parse_args(ctx, [*options])
        [words] = [param for param in self.params if isinstance(param, click.Argument)]
        ctx.params[str(words.name)] = tuple(args[len(options) :])
        return []


job_argument = click.argument("job", type=click.Path(path_type=str))
"""Adds the argument JOB: path of a job file."""


TARGETS_HELP: Final = (
    "slurm, pytorchjob, jobset, trainjob or local  [default: the site's, or slurm]"
)


def target_on(site: Site | None, target: str | None) -> str | None:
    """Return the platform that `--to` names, or else `--site`; None: neither does."""
    return target or (None if site is None else site.target)


def target_option(text: str) -> Callable[[_Function], _Function]:
    """Add `--to TARGET`, a platform's name or None, as `target`."""
    return click.option("--to", "target", metavar="TARGET", help=text)


set_option = click.option(
    "--set",
    "sets",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a value, as train.steps=50. Repeatable.",
)
"""Adds `--set`, as `sets`."""


def site_option(function: _Function) -> _Function:
    """Add `--site NAME`, as `site`: a launcher.platforms.sites.Site, or None.

    On a site that is reached over SSH the command runs there, and `function` is not called.
    """
    text = "The cluster, of sites.yaml: its defaults count where JOB says nothing."
    return _with_site(function, text, takes_site=True)


def _with_site(function: _Function, text: str, *, takes_site: bool) -> _Function:
    @functools.wraps(function)
    def here_or_there(*, site: str | None, **given: Any) -> Any:
        found = None
        if site is not None:
            from launcher.platforms.sites import find_site

            found = find_site(site)
            if found.ssh is not None:
                return _there(found, click.get_current_context(), given)
        return function(**given, site=found) if takes_site else function(**given)

    return click.option("--site", metavar="NAME", help=text)(_reporting(here_or_there))


def _reporting(function: Callable[..., Any]) -> Any:
    """Return a command that reports a UserError as its `--json` asks, and ends with code 2."""

    @functools.wraps(function)
    def reporting(**given: Any) -> Any:
        try:
            return function(**given)
        except UserError as error:
            return exit_with_problems(error, as_json=given.get("as_json", False))

    return reporting


def _there(site: Site, ctx: click.Context, given: dict[str, Any]) -> int:
    """Run the command on the site, with the files and the site's defaults where it takes a job."""
    from launcher.runs import over_ssh

    if given.get("upgrade"):
        raise UserError(
            "HF205",
            f"--upgrade: changed code is not sent to a run that is there; log in to {site.ssh}, "
            "change it in the `source` of the run's code.json, and run this there without --site",
        )
    if given.get("job") is None:
        return over_ssh.run_there(site, words_of(ctx, given))
    from launcher.plan.loading import load_spec
    from launcher.runs.submitting.submit import sweep_tasks

    # Of a sweep the first task is looked at here, and all of them there.
    [first, *_] = sweep_tasks(given.get("sweep", ()))
    swept = [f"{key}={value}" for key, value in first.items()]
    spec = load_spec(given["job"], [*given["sets"], *swept], site=site)
    sent = over_ssh.pack(spec)
    print_problems(sent.warnings)
    sets = spec.sets[: len(spec.sets) - len(swept)]
    asked = {**given, "job": sent.job, "sets": (*sets, *sent.sets)}
    if "target" in given:
        asked["target"] = given["target"] or site.target
    with sent.archive:
        return over_ssh.run_there(site, words_of(ctx, asked), sent)


def words_of(ctx: click.Context, given: Mapping[str, Any]) -> list[str]:
    """Return the words that ask for a command with these values, without `--site`."""
    words, arguments = ctx.command_path.split()[1:], ["--"]
    for param in ctx.command.params:
        value = given.get(param.name or "")
        if param.name == "site" or value is None or value is False:
            continue
        values = value if param.multiple or param.nargs == -1 else [value]
        name = max(param.opts, key=len)
        if isinstance(param, click.Argument):
            arguments += map(str, values)
        elif value is True:
            words.append(name)
        else:
            words += [f"{name}={each}" for each in values]
    return [*words, *arguments]


def json_option(function: _Function) -> _Function:
    """Add `--json`, as `as_json`; problems are printed in the same form."""
    option = click.option("--json", "as_json", is_flag=True, help="Print JSON on stdout.")
    return option(_reporting(function))


def path_option(
    *names: str, metavar: str = "DIR", **options: Any
) -> Callable[[_Function], _Function]:
    """Add an option whose value is a Path, not looked at here; `options` as click.option's."""
    return click.option(*names, type=click.Path(path_type=Path), metavar=metavar, **options)


def run_argument(function: _Function) -> _Function:
    """Add the argument RUN and `--runs`: what `find_run` takes."""
    return click.argument("run", metavar="RUN", shell_complete=_run_names)(runs_option(function))


def _run_names(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Return the runs of the folder `--runs` that begin so; elsewhere a run is a folder."""
    from click.shell_completion import CompletionItem

    del param
    folder: Path = ctx.params.get("runs") or Path("runs")
    try:
        found = sorted(path.name for path in folder.iterdir() if path.is_dir())
    except OSError:
        found = []
    names = [CompletionItem(name) for name in found if name.startswith(incomplete)]
    return names or [CompletionItem(incomplete, type="dir")]


def runs_option(function: _Function) -> _Function:
    """Add `--runs DIR`, where runs are looked for, and `--site NAME`, where the command runs."""
    option = path_option(
        "--runs", default=Path("runs"), show_default="./runs", help="Folder of the runs."
    )
    text = "Run it on this cluster, of sites.yaml."
    return option(_with_site(function, text, takes_site=False))


@contextmanager
def handling(
    numbers: Sequence[signal.Signals], handler: Callable[[int, FrameType | None], Any]
) -> Iterator[None]:
    """Let `handler` serve these signals meanwhile."""
    before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, former in before.items():
            signal.signal(number, former)


def say(text: str) -> None:
    """Print a line on stderr: progress, and what is said besides."""
    click.echo(text, err=True)


def print_json(value: Any) -> None:
    """Print a JSON document on stdout."""
    click.echo(json.dumps(value, indent=1))


def print_problems(problems: Iterable[Problem]) -> None:
    """Print one line per problem on stderr; colours only on a terminal."""
    for problem in problems:
        text = str(problem)
        colour = "yellow" if problem.is_warning else "red"
        before, code, after = text.partition(problem.code)
        click.echo(before + click.style(code, fg=colour, bold=True) + after, err=True)


def exit_with_problems(error: UserError, *, as_json: bool) -> int:
    """Report a UserError the way `--json` or its absence asks for; return exit code 2.

    Its warnings come apart from what stops the job, and after it.
    """
    if as_json:
        problems, warnings = dicts(error.problems), dicts(error.warnings)
        print_json({"ok": False, "problems": problems, "warnings": warnings})
    else:
        print_problems(error.problems)
        if error.warnings:
            click.echo(err=True)
        print_problems(error.warnings)
    return EXIT_USER


def dicts(problems: Iterable[Problem]) -> list[dict[str, Any]]:
    """Return problems as plain JSON types."""
    return [problem.to_dict() for problem in problems]
