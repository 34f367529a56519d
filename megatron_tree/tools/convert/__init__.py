"""Weights of Hugging Face models in and out of checkpoints of Megatron's GPTModel: `megatron-tree convert`.

`options` translates a model's configuration, `weights` the tensors, `checkpoints` reads and writes both formats.
"""
