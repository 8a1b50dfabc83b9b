"""Where what is known of sites lies: the files of sites, and the profiles beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

VARIABLE: Final = "HOLDFAST_SITES"
"""Names a file of sites, which is then the only one."""
SYSTEM: Final = Path("/etc/holdfast/sites.yaml")


def files(env: Mapping[str, str]) -> Sequence[Path]:
    """Return the files of sites; a name counts in the first that has it."""
    if named := env.get(VARIABLE):
        return (Path(named),)
    config = Path(env.get("XDG_CONFIG_HOME") or Path.home() / ".config")
    return (config / "holdfast" / "sites.yaml", SYSTEM)


def profile_folders(env: Mapping[str, str]) -> Sequence[Path]:
    """Return the folders of profiles: `profiles` beside each file of sites."""
    return [file.parent / "profiles" for file in files(env)]
