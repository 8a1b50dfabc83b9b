"""What tests look for in lines of problems: code, key and values, and no words between them."""

from __future__ import annotations

import re
from collections.abc import Iterable


def has_parts(lines: Iterable[str], parts: str) -> bool:
    """Return whether a line has the parts, between ` ... `, in this order."""
    pattern = ".*".join(map(re.escape, parts.split(" ... ")))
    return any(re.search(pattern, line) for line in lines)
