"""The programs megatron-tree generate, megatron-tree chat and (http/) megatron-tree serve."""
