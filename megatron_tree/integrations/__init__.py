"""Other people's code: Megatron-core, Transformers and DeepSpeed, a package each."""
