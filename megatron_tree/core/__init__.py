"""Tree attention itself: needs torch, and Triton on GPUs; nothing of the other rooms, and no framework.

To be read from the bottom up: energy.py, merge.py, layout/, kernels/, comm/ and plan/, attention/, recurrence/, cache/.
"""
