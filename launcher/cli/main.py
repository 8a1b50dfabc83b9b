"""The `holdfast` command. Commands are imported by name when they are used."""

from __future__ import annotations

import gc
import importlib
import io
import os
import sys
from typing import TYPE_CHECKING, Final

import click

from launcher.cli.common import EXIT_FAILED, EXIT_INTERRUPTED, exit_with_problems
from launcher.cli.terminal import VisibleStream
from launcher.spec.errors import HoldfastError, UserError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

GROUPS: Final[dict[str, dict[str, tuple[str, str]]]] = {
    "Jobs": {
        "check": ("job", "Check a job file; report every problem at once."),
        "plan": ("job", "Show layout, placement and ladder of a job."),
        "simulate": ("simulate", "Simulate months of a fleet that runs a job."),
        "render": ("job", "Show what would be submitted: the script, and job.json."),
        "submit": ("submit", "Submit a job to a cluster, or resume a run."),
        "restart": ("cancel", "Let a run save and start again on all its nodes."),
        "cancel": ("cancel", "End a run for good; with --save it saves first."),
        "run": ("run", "Run a job on an emulated cluster of this machine."),
        "rehearse": ("rehearse", "Rehearse failures with a scaled-down job, here."),
        "agent": ("scripts", "Run any torchrun script, with torchrun's flags."),
        "wrap": (
            "scripts",
            "Let a torchrun batch script or PyTorchJob survive lost nodes.",
        ),
        "schema": ("job", "Print the JSON schema of job files, for editors."),
    },
    "Look": {
        "status": ("status", "Show where runs stand."),
        "list": ("status", "List all runs of a folder."),
        "watch": ("watch", "Show a run's screen while it trains."),
        "top": ("watch", "Show all runs of all users while they run."),
        "logs": ("logs", "Show the logs of a run, over restarts and requeues."),
        "describe": ("describe", "Show all that is known about a run."),
        "report": ("report", "Draw what happened in a run."),
        "cost": ("cost", "Print what GPU-hours were spent on, by cause."),
        "metrics": ("metrics", "Serve the metrics of all runs to Prometheus."),
        "track": ("track", "Write the curves of runs to experiment trackers."),
        "notify": ("notify", "Tell a webhook what happens to runs."),
    },
    "Fix": {
        "why": ("doctor", "Say why a run waits, or what failed first."),
        "doctor": ("doctor", "Diagnose logs: what failed first, and what to do."),
        "runbook": ("doctor", "Print what to do about a failure, or a procedure."),
        "stacks": ("workers", "Show what the workers of a running job do now."),
        "shell": ("workers", "Open a shell on the node of a running worker."),
    },
    "Fleet": {
        "preflight": ("preflight", "Check that every node is fit for a job."),
        "calibrate": ("calibrate", "Measure nodes, so that predictions are of them."),
        "nodes": ("nodes", "Show and change which machines jobs are kept off."),
        "drain": ("nodes", "Let jobs leave nodes or a rack at a step boundary."),
    },
    "Checkpoints": {"checkpoint": ("checkpoint", "List, verify, export and import checkpoints.")},
}
"""Command -> module of launcher.cli, one line of help. The function has its name, or `list_`."""
COMMANDS: Final = {name: command for group in GROUPS.values() for name, command in group.items()}
INTERNAL: Final = {"batch": "scripts", "forwarded": "forwarded"}
"""Wrapped scripts, and Holdfast on another machine, call them; no list has them."""

COMPLETE: Final = "_HOLDFAST_COMPLETE"
"""Set by a shell that completes a command line, or wants the script that does."""
MANY_OBJECTS: Final = 200_000
"""More than a short command makes; Python's own figure is 700."""


class LazyGroup(click.Group):
    """Imports a command's module when it is asked for: start-up stays short."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the names of the public commands."""
        del ctx
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Return one command, or None where the name is unknown."""
        del ctx
        name = INTERNAL.get(cmd_name) or COMMANDS.get(cmd_name, ("",))[0]
        if not name:
            return None
        try:
            module = importlib.import_module(f"launcher.cli.{name}")
        except ModuleNotFoundError as error:
            # A part that was left out breaks its own command only.
            raise click.ClickException(f"{cmd_name} needs {error.name}: not installed") from error
        command = getattr(module, cmd_name, None) or getattr(module, f"{cmd_name}_")
        assert isinstance(command, click.Command), f"{name}.{cmd_name} is not a command"
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the commands and options that begin so, without importing a command."""
        from click.shell_completion import CompletionItem

        named = [
            CompletionItem(name, help=short)
            for name, (_, short) in COMMANDS.items()
            if name.startswith(incomplete)
        ]
        return [*named, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the list of commands without importing them."""
        del ctx
        width = max(map(len, COMMANDS))
        for title, group in GROUPS.items():
            with formatter.section(title):
                rows = [(name.ljust(width), short) for name, (_, short) in group.items()]
                formatter.write_dl(rows)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown one is answered with the nearest."""
        name = args[0]
        if name not in {*COMMANDS, *INTERNAL} and not name.startswith("-"):
            import difflib

            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"; did you mean {near[0]}?" if near else f"; use {', '.join(COMMANDS)}"
            ctx.fail(f"no such command {name!r}{hint}")
        return super().resolve_command(ctx, args)


def _version(ctx: click.Context, _param: click.Parameter, wanted: bool) -> None:
    if not wanted or ctx.resilient_parsing:
        return
    from launcher.platforms.installed import installed_version

    click.echo(f"holdfast {installed_version() or '(not installed)'}")
    ctx.exit()


@click.group(
    cls=LazyGroup,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Example: holdfast check examples/llama3-405b.yaml",
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_version,
    help="Print the version and exit.",
)
def cli() -> None:
    """Launch large training jobs and keep them running when nodes die."""


def run_cli(args: list[str] | None = None) -> int:
    """Run one command line and return its exit code.

    0 done, 1 it failed, 2 the user's input is wrong, 130 interrupted.
    """
    try:
        # Not cli.main(): it turns a closed pipe into exit code 1, and what it
        # would print of errors is printed here.
        arguments = sys.argv[1:] if args is None else list(args)
        with cli.make_context("holdfast", arguments) as ctx:
            result = cli.invoke(ctx)
    except UserError as error:
        return exit_with_problems(error, as_json=False)
    except HoldfastError as error:
        from launcher.spec.secret_forms import masked

        click.echo(f"holdfast: {masked(str(error))}", err=True)
        return EXIT_FAILED
    except click.ClickException as error:
        from launcher.spec.secret_forms import masked

        said = io.StringIO()
        error.show(said)
        click.echo(masked(said.getvalue()), err=True, nl=False)  # an argument may be a secret
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        click.echo("holdfast: interrupted", err=True)
        return EXIT_INTERRUPTED
    except click.exceptions.Exit as error:
        return error.exit_code
    return result if isinstance(result, int) and not isinstance(result, bool) else 0


def main() -> None:
    """Entry point of the `holdfast` script."""
    # What a command imports stays until its end: looking for garbage in it is a third of its time.
    gc.set_threshold(MANY_OBJECTS)
    if instruction := os.environ.get(COMPLETE):  # cli.main() would look, and is not called
        from click.shell_completion import shell_complete

        sys.exit(shell_complete(cli, {}, "holdfast", COMPLETE, instruction))
    for name in ("stdout", "stderr"):
        # The caller may have closed it, as cron and daemons do.
        stream = getattr(sys, name) or open(os.devnull, "w")  # noqa: SIM115, PTH123
        setattr(sys, name, VisibleStream(stream))
    try:
        code = run_cli()
        sys.stdout.flush()
    except BrokenPipeError:
        # The reader went away, as in `holdfast plan ... | head`: no mistake of anybody's.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 0
    gc.freeze()  # Python looks for garbage at its end too, in all that was imported
    sys.exit(code)


if __name__ == "__main__":
    main()
