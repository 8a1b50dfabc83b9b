"""`python -m elastic_trainer.agent`: the same as `holdfast-agent`."""

from __future__ import annotations

from elastic_trainer.agent.main import main

main()
