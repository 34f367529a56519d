"""Training of Transformers models on sharded sequences."""
