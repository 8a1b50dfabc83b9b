"""Checks this node; arguments: the round's folder, the node's name."""

import sys

from launcher.fleet.preflight.checks import answer

answer(*sys.argv[1:3])
