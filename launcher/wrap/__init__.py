"""Other people's scripts and manifests."""
