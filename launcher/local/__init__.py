"""Runs on this machine's emulated nodes, with faults on purpose."""
