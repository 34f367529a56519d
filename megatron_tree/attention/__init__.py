"""Tree attention: what users call, and the schedules underneath. Read `functional.py` first, then `cell.py`.

- functional.py              public functions of training; decode.py, prefill.py: over a sharded KV cache
- selection.py               the keys that an index selects, for `selected`
- sequences.py               cutting a sequence into shards and joining them
- call.py, topology.py       one planned attention call, and the network it is planned for
- tuning.py                  repeated calls that measure their plans
- validate*.py, spec.py      checks of arguments, and of values (finite.py); the mathematics that they ask for
- autograd.py                forward and backward of training
- passes.py, exchanged.py    the same by a plan; with heads exchanged for tokens before and after (heads.py)
- cell.py, rows.py           gather rows, attend, return the results; which rows travel, and how
- ring.py                    the baseline
- prefill_cell.py            the cell of a prompt's chunk
- decode_call.py             one decode call, planned and run; decode_ring.py: the ring of decoding
"""
