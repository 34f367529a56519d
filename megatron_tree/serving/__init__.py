"""The programs behind launch/generate.py and launch/chat.py, and what launch/serve.py shares with them."""
