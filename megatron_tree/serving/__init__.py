"""Generation: the scheduler and its parts, and the programs launch/generate.py, chat.py and (http/) serve.py."""
