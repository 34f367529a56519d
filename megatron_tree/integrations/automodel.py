"""NeMo Automodel's recipes with tree attention: packed documents and padding keep their masks under cp_size > 1.

    from megatron_tree.integrations.automodel import use_tree_attention

    class Recipe(TrainFinetuneRecipeForNextTokenPrediction):
        def setup(self):
            super().setup()
            use_tree_attention(self.model_parts[0], self.device_mesh["cp"])

For models that Automodel takes from Transformers as they are (force_hf: true), without pipeline parallelism.
Automodel's own context parallelism calls each layer without its mask.
Source: components/distributed/context_parallel/sharder.py and utils.py, recipes/llm/train_ft.py of nemo-automodel 0.7.
"""

from __future__ import annotations

import contextlib

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..core import comm
from ..core.config import TreeConfig
from .transformers import shard_batch, train_on_shards
from .transformers.train.batch_shards import IGNORED

try:
    from nemo_automodel.components.distributed.context_parallel.sharder import ContextParallelSharder, ShardLayout
except ImportError as error:
    raise ImportError(
        "megatron_tree.integrations.automodel needs nemo-automodel 0.7: pip install nemo-automodel"
    ) from error


def use_tree_attention(model: nn.Module, mesh: DeviceMesh, *, tree_config: TreeConfig | None = None) -> None:
    """Give a model its own sharder of batches and tree attention. Call it when the recipe has built the model.

    Batches are Automodel's: labels [b, s] stand at the token before; padding on the right; position_ids that start
    again begin a document. See `shard_batch`.

    Raises: ValueError for a model that doesn't train on shards (`train_on_shards`), and, for a batch, what
        `shard_batch` doesn't take.
    """
    group, latest = comm.process_group(mesh), []
    if comm.group_size(group) == 1:
        return
    train_on_shards(model)

    def shard(cp_mesh, tp_mesh, batch, *, loss_mask=None, padding_token_id=0):
        if loss_mask is not None:
            raise ValueError("loss_mask: set the labels of these tokens to -100 instead")
        inputs = {name: x for name, x in batch.items() if name != "labels"}
        sharded = shard_batch(inputs, cp_group=group, tree_config=tree_config)
        latest[:] = [sharded["sequence_shard"]]
        whole = latest[0].whole
        if batch.get("labels") is not None:
            sharded["labels"] = whole.share(batch["labels"]).masked_fill(whole.rows < 0, IGNORED)
        return contextlib.nullcontext, sharded, ShardLayout()

    def with_shard(layer, args, kwargs):  # Automodel's hook has replaced it by None; a backward calls layers again, too
        return args, {**kwargs, "attention_mask": latest[0]} if latest else kwargs

    model.prepare_model_inputs_for_cp = lambda batch, **options: {
        "cp_sharder": ContextParallelSharder(shard_batch=shard)
    }
    for name, module in model.named_modules():
        if name.endswith("self_attn"):
            module.register_forward_pre_hook(with_shard, with_kwargs=True)
