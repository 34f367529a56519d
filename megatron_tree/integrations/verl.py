"""verl's Megatron workers with tree attention: a module that verl imports, and that installs it.

    export VERL_USE_EXTERNAL_MODULES=megatron_tree.integrations.verl
    python -m verl.trainer.main_ppo ... \\
        actor_rollout_ref.actor.megatron.context_parallel_size=4 \\
        +actor_rollout_ref.actor.megatron.override_transformer_config.cp_comm_type=tree

verl pads each sequence to a multiple of 2 * cp * tp, packs them (thd) and gives a rank two chunks of each: Megatron's
own layout, so nothing else changes. The reference model and the critic take the same two options.
Source: verl/__init__.py, workers/engine/megatron/ and models/mcore/util.py of verl 0.9.
"""

from .megatron import install

install()
