"""Snapshots in memory: their format, who keeps copies, which one a restore takes. No torch."""
