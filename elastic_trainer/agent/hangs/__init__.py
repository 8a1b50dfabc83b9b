"""Workers that stand still: how it is noticed, and what they were doing."""
