"""Renderers: (spec, plan) to a bundle of texts. Pure."""
