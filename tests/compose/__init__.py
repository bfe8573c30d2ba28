"""Compose tests share the helpers of conftest.py by relative import."""
