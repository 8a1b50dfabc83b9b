"""What performs membership: sockets, proofs of identity, and one thread that serves them."""
