"""Ranks that differ, fail or hang: found out by all ranks together, and named.

- store.py       a client of the job's key-value store, in its own thread
- watchdog.py    what this rank does in a group; it notices other ranks' failures, and interrupts waits
- reports.py     after a failure: what every rank saw, and the conclusion that all come to
- agreement.py   whether all ranks make the same call
- monitored.py   regions in which all ranks of the job conclude together
- gloo.py        giving up gloo's waits, telling its errors from others
"""
