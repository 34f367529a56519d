"""Tree attention: what users call, and the schedules underneath. Read `functional.py` first, then `cell.py`.

- functional.py              public functions of training; decode.py, prefill.py: over a sharded KV cache
- selection.py               the keys that an index selects, for `selected`, and the slots of a cache that it selects
- index_loss.py              the loss that trains an index
- sequences.py               cutting a sequence into shards and joining them
- call.py                    one planned attention call
- tuning.py                  repeated calls that measure their plans
- validate.py                checks of arguments, and of values; the mathematics that they ask for
- autograd.py                forward and backward of training
- passes.py                  the same by a plan; with heads exchanged for tokens before and after
- cell.py, rows.py           gather rows, attend, return the results; which rows travel, and how
- gather.py                  rows are gathered and nothing is merged, for the same bits on any number of ranks
- ring.py                    the baseline
"""
