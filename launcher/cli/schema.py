"""`holdfast schema`: the JSON schema of job files."""

from __future__ import annotations

import click

from launcher.cli.common import print_json


@click.command(
    epilog="Example: holdfast schema > job.schema.json",
)
def schema() -> None:
    """Print the JSON schema of job files, for editors.

    In an editor with the YAML language server, begin a job file with
    `# yaml-language-server: $schema=job.schema.json`.
    """
    from launcher.spec.schema import job_schema

    print_json(job_schema())
