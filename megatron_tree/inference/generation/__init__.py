"""The one loop that generates: a scheduler of requests over a runner, sampling, and where an answer ends."""
