"""Weights of Hugging Face models in and out of checkpoints of Megatron's GPTModel: `python -m megatron_tree.convert`.

`families` translates a model's configuration, `weights` the tensors, `checkpoints` reads and writes both formats.
"""
