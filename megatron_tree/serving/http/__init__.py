"""The program behind launch/serve.py: an HTTP server that speaks OpenAI's API, over the scheduler of all ranks."""
