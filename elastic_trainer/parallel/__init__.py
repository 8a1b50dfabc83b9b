"""Cutting the model over ranks: the mesh, and one module an axis."""
