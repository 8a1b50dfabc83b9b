"""`holdfast metrics`: the runs of a folder for Prometheus."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Final

import click

from launcher.cli.common import EXIT_DONE, EXIT_INTERRUPTED, runs_option
from launcher.spec.errors import UserError

EPILOG = """\b
Examples:
  holdfast metrics --once
  holdfast metrics --runs /shared/runs --listen 10.0.0.5:9464 --targets /srv/targets/holdfast.json
"""
_EVERY_S: Final = 5.0


def _address(_: click.Context, __: click.Parameter, value: str) -> tuple[str, int]:
    address, colon, port = value.rpartition(":")
    if not (address and colon and port.isdecimal() and int(port) < 1 << 16):
        raise click.BadParameter(f"{value!r} is not ADDRESS:PORT")
    return address.strip("[]"), int(port)


@click.command("metrics", epilog=EPILOG)
@runs_option
@click.option(
    "--listen",
    metavar="ADDRESS:PORT",
    callback=_address,
    default="127.0.0.1:9464",
    show_default=True,
    help="Where Prometheus reads; port 0: any that is free.",
)
@click.option(
    "--targets",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write the address there, and those of agents, for Prometheus' file_sd_configs.",
)
@click.option("--once", is_flag=True, help="Print the metrics of now and end.")
def metrics(*, runs: Path, listen: tuple[str, int], targets: Path | None, once: bool) -> int:
    """Serve the metrics of all runs of a folder, and of its users' folders, until interrupted.

    They come from the runs' records, on Slurm as on Kubernetes, so no node is asked, and totals
    outlive every node. Agents that serve metrics of their own (network.metrics_port) are listed in
    FILE, too. Nobody has to prove anything to read them: see docs/metrics.md.
    """
    from prometheus_client import generate_latest

    from elastic_trainer.metrics_server import MetricsServer
    from launcher.runs.reports.metrics import RunsCollector, write_targets

    collector = RunsCollector(runs)
    collector.poll()
    if once:
        click.echo(generate_latest(collector.registry()).decode(), nl=False)
        click.echo("".join(f"{each}\n" for each in collector.problems), nl=False, err=True)
        return EXIT_DONE
    try:
        server = MetricsServer(*listen, collector.collect)
    except OSError as error:
        where = f"{listen[0]}:{listen[1]}"
        raise UserError(
            "HF696", f"cannot listen on {where}: {error.strerror or error}; see --listen"
        ) from error
    server.start()
    address = f"{listen[0]}:{server.port}"
    agents = collector.agents()
    if targets is not None:
        write_targets(targets, address, agents)
    click.echo(f"serving http://{address}/metrics", err=True)
    said: list[str] = []
    try:
        while not threading.Event().wait(_EVERY_S):
            collector.poll()
            problems = list(collector.problems)
            if targets is not None and (found := collector.agents()) != agents:
                try:
                    write_targets(targets, address, found)
                    agents = found
                except UserError as error:  # tried again with the next poll
                    problems.append(f"{error.code}: {error.message}")
            if problems != said:
                said = problems
                click.echo("\n".join(said), err=True)
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    finally:
        server.close()
    return EXIT_DONE
