"""Ranks that differ, fail or hang: found out together and named."""
