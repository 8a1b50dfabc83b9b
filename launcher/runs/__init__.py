"""What operators do with runs: summaries, reports."""
