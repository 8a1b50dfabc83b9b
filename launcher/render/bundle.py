"""What rendering makes: file name -> text. Nothing is contacted, nothing is written."""

from __future__ import annotations

Bundle = dict[str, str]
"""File name, relative to the run directory -> its text."""
