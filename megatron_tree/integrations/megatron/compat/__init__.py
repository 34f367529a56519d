"""Everything this package knows about versions of Megatron-core and Megatron-LM.

Written against megatron-core 0.16.1, the release that the tests run. The slow tests build and run a model with every
release from 0.16 to 0.19. Differences are found by looking at signatures and attributes, not at the version.
"""

# ruff: noqa: F401
from ....core.config import CP_COMM_TYPES, TREE_CP_COMM_TYPES
from .call import (
    batch_on_this_cp_rank,
    check_layout,
    context_parallel_group,
    cuts_packed_rows_as_a_whole,
    data_groups,
    group_of_batch,
    hierarchical_sizes,
    layer_groups,
    loads_causal_masks,
    modules_with,
    refuse_unknown_arguments,
    token_group,
    window_of_layer,
)
from .checkpoint import loading_torch_adam, no_manager_process, sharded_parameters
from .cuda import core_replacements, training_replacements
from .indexed import attach_index_loss, index_epsilon, is_indexed, project_index, refuse_indexed
from .layers import (
    attention_classes,
    decoder_layer_specs,
    fixed_cp_comm_type_list,
    misreads_cp_comm_type_list,
    mla_without_transformer_engine,
    model_classes,
    name_missing_transformer_engine,
    normed_input,
    sequence_parallel_switches,
    switched_off,
)
from .mixers import (
    as_on_one_rank,
    checked_without_exchange,
    chunk_scan,
    cp_comm_type_of_layer,
    exchanges_heads,
    gated_delta_rule,
    is_recurrent,
    l2norm,
    mixer_name,
    short_convolution,
    uses_tree,
)
from .release import (
    UnsupportedMegatronError,
    hide_import_notices,
    is_patched,
    lookup,
    megatron_lm_arguments,
    megatron_version,
)
