"""The program behind launch/generate.py: options, the run, and what it reports."""
