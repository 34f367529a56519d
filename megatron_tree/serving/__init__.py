"""The programs launch/generate.py, chat.py and (http/) serve.py."""
