"""Adapters to Megatron-core, DeepSpeed and Transformers: the only modules that import those packages."""
