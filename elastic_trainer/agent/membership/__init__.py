"""Membership: a pure state machine. Who is in, who leads, who is to blame, what follows."""
