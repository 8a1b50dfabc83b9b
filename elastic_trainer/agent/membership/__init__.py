"""Membership: a pure state machine. Who is in, who leads, what a failure counts against."""
