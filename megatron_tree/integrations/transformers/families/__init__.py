"""Families of models that do more than causal attention: table.py lists them, and the other files are theirs."""
