"""Merging lists of states (out [..., s, h, d], lse [..., h, s]) as the library does."""

import torch

from megatron_tree.core import merge


def merged(parts):
    """The merge of all parts, in order."""
    packed = [merge.pack_state(out, lse, lse.dtype) for out, lse in parts]
    return merge.unpack_state(merge.merge_packed(torch.stack(packed)), packed[0].dtype)
