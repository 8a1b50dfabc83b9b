"""Diagnosis: logs -> findings -> what failed first and what to do. Pure but for the bytes read."""
