"""The picture of a run, as a page or as one PNG."""
