"""Batches of rows that begin alike: what a `PrefixTree` puts into a batch, and which models take it."""

from __future__ import annotations

from ....layout import PrefixTree
from ..architectures import INDEXED, POOLED, layers_of
from ..families.rope import rope_rule


def with_tokens(batch: dict) -> dict:
    """A batch with its prefix tree's tokens, if it has one.

    Raises: ValueError for anything beside the tree, and another object than a `PrefixTree`.
    """
    if (tree := batch.get("prefix_tree")) is None:
        return batch
    if others := sorted(set(batch) - {"prefix_tree"}):
        raise ValueError(f"batch has {others} beside prefix_tree, which has tokens and labels: leave them out")
    if not isinstance(tree, PrefixTree):
        raise ValueError(f"batch['prefix_tree'] is a {type(tree).__name__}: it must be what prefix_tree(rows) returned")
    return {"prefix_tree": tree} | {name: getattr(tree, name) for name in ("input_ids", "position_ids", "labels")}


def check_takes_tree(model, tree: PrefixTree) -> None:
    """Raise ``ValueError`` for a model that can't compute rows that share tokens as one packed row."""
    text, reason = model.config.get_text_config(decoder=True), None
    dropout = getattr(text, "attention_dropout", 0.0) or getattr(text, "attn_pdrop", 0.0)
    lengths, rule = (tree.row_index >= 0).sum(1), rope_rule(text)
    if any(layer.num_states for layer in layers_of(model.config)):
        reason = "layers with a recurrent state, which would have to part where rows do"
    elif text.model_type in INDEXED or text.model_type in POOLED:
        reason = "attention to keys that an index selects"
    elif dropout and model.training:
        reason = f"attention dropout={dropout}, for which ranges have no mask (set it to 0)"
    elif rule is not None and len(rule.representatives(lengths).unique()) > 1:
        reason = f"a rotary embedding that differs for rows of {int(lengths.min())} and {int(lengths.max())} tokens"
    if reason:
        raise ValueError(
            f"{type(model).__name__} has {reason}: it takes no prefix_tree. Pass the rows one by one (input_ids), or "
            "packed one after another (position_ids that start again)"
        )
