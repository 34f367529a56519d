"""What `megatron-tree train` is made of: options, data, model, checkpoints, reports and the training loop."""
