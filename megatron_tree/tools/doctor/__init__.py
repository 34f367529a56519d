"""`megatron-tree doctor`: reports what is installed, what a configuration would use, and what is missing."""
