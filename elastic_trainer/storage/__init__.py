"""Files as shared storage needs them."""
