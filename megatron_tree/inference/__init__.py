"""Generating text over a sharded cache: generation/ is the loop, serving/ the programs around it."""
