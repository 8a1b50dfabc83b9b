"""What happened: events, failures, signatures. Pure, but for the log of events."""
