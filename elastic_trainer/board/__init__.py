"""Boards: durable compare-and-swap registers, in a directory or in a ConfigMap."""
