"""Tree attention for Hugging Face Transformers: what users import.

Importing it registers ``attn_implementation="tree"``:

    import megatron_tree.integrations.transformers as tree_hf

    model.set_attn_implementation("tree")
    cache = tree_hf.TreeCache(model.config, cp_group=group)
    model(input_ids=tokens, past_key_values=cache)                # every rank runs the tokens, attends to its shard

`Runner` runs rows of such a cache, `generate` generates. `register_sequence_parallel` trains on sharded sequences, by
`train_on_shards` and `shard_batch`; `token_log_probs` and `gather_tokens` are for losses other than the cross entropy.

attention.py is what every model calls. families/table.py lists the models that do more, and what is replaced in them.
"""

from .attention import check_model, tree_attention
from .infer.cache import TreeCache
from .infer.generation import Generation, generate
from .infer.runner import Runner
from .train.batch_shards import shard_batch
from .train.loss import gather_tokens, log_probs_of_hidden, token_log_probs
from .train.sequence_parallel import SequenceParallel, register_sequence_parallel
from .train.train_on_shards import train_on_shards

__all__ = [
    "Generation",
    "Runner",
    "SequenceParallel",
    "TreeCache",
    "check_model",
    "gather_tokens",
    "generate",
    "log_probs_of_hidden",
    "register_sequence_parallel",
    "shard_batch",
    "token_log_probs",
    "train_on_shards",
    "tree_attention",
]
