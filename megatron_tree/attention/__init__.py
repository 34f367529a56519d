"""Tree attention: what users call, and the schedules underneath. Read `functional.py` first.

- functional.py              public functions of training; decode.py, prefill.py: over a sharded KV cache
- sequences.py               cutting a sequence into shards and joining them
- call.py, topology.py       one planned attention call, and the network it is planned for
- validate*.py, spec.py      checks of arguments, and of values (finite.py); the mathematics that they ask for
- autograd.py                forward and backward of training
- grid.py, ring.py           the schedules of training; heads.py: exchanges of heads around them
- decode_call.py             one decode call, planned and run; decode_ring.py: the ring of decoding
"""
