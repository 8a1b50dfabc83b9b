"""A fleet that runs a job for months: what failures cost it, and what spares are worth."""
