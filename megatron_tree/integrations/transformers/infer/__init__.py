"""Inference with Transformers models over a sharded KV cache."""
