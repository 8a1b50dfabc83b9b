"""What a run has written of itself: events and ledgers, read and folded. Mostly pure."""
