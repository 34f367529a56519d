"""`python -m megatron_tree.doctor`: what is installed, what a configuration would use, and what it lacks."""
