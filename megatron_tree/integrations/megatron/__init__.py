"""Tree attention for Megatron-core: what users import.

The shortest way. It works with any layer spec, also with Mamba and gated delta nets in it, and with Megatron-LM's
`--cp-comm-type tree`:

    from megatron_tree.integrations import megatron as tree
    tree.install()
    config = TransformerConfig(..., context_parallel_size=4, cp_comm_type="tree", attention_dropout=0.0)

Or through the spec, without patching Megatron's classes. Then "p2p" (ring) and "all_gather" (KV gather) are ours, too:

    model = GPTModel(config=config, transformer_layer_spec=tree.get_gpt_layer_tree_spec(), ...)
    model = GPTModel(config=config, transformer_layer_spec=tree.use_tree_attention(your_spec), ...)

`MegatronRunner` serves a trained model, with its KV cache sharded over the same ranks. docs/megatron-lm.md has four
ways to run Megatron-LM's own scripts. On a machine without an accelerator wrap everything in `megatron_on_cpu()`.
"""

from ...core.config import CP_COMM_TYPES
from .compat import UnsupportedMegatronError, hide_import_notices

with hide_import_notices():
    from .attention import TreeDotProductAttention, tree_config_for
    from .cpu import megatron_on_cpu
    from .documents import dispatch_batch, use_dispatched_documents
    from .inference import MegatronRunner
    from .norm import SequenceParallelNorm, use_sequence_parallel_norm
    from .spec import (
        core_attention_for_tree,
        get_gpt_layer_tree_spec,
        install,
        is_installed,
        uninstall,
        use_tree_attention,
    )

__all__ = [
    "CP_COMM_TYPES",
    "MegatronRunner",
    "SequenceParallelNorm",
    "TreeDotProductAttention",
    "UnsupportedMegatronError",
    "core_attention_for_tree",
    "dispatch_batch",
    "get_gpt_layer_tree_spec",
    "install",
    "is_installed",
    "megatron_on_cpu",
    "tree_config_for",
    "uninstall",
    "use_dispatched_documents",
    "use_sequence_parallel_norm",
    "use_tree_attention",
]
