"""Recurrent layers over a sequence that is sharded across ranks: docs/recurrent.md.

- scan.py   `tree_scan`: the state that every segment begins with, from the affine maps of the segments before it
- halo.py   `tree_halo`: the rows before every segment; `tree_convolution`: short convolutions over the sequence
- shift.py  `tree_shift`: the row after each
- layer.py  `tree_recurrence`: any kernel with an initial and a final state over the whole sequence
"""
