"""The machines: their ledger, checks and drains."""
