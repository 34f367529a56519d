"""The program behind megatron-tree serve: an HTTP server that speaks OpenAI's API, over the scheduler of all ranks."""
