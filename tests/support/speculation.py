"""Speculation for tests: a drafter that knows the answers, and decisions that don't depend on this machine."""

from megatron_tree.inference.generation.speculation import DraftCost, Speculation
from support.scheduling import tokens_of


class Told:
    """Drafts the tokens of known answers, every `wrong`-th of them changed."""

    def __init__(self, answers, wrong=None):
        self._answers, self._wrong = answers, wrong

    def ready(self, states):
        return [True] * len(states)

    def draft(self, states, count):
        return [self._next(state.text.tolist(), count) for state in states]

    def _next(self, text, count):
        whole = next(whole for whole in self._answers if whole[: len(text)] == text)
        tokens = [*whole[len(text) :][:count], *[1] * count][:count]
        return [t if self._wrong is None or (len(text) + i) % self._wrong else t + 1 for i, t in enumerate(tokens)]


class Free(DraftCost):
    """A step takes the same time whatever its width: decisions don't depend on this machine."""

    def add(self, tokens, seconds):
        pass


def speculation(drafter, num_tokens=4):
    made = Speculation(num_tokens, drafter)
    made.cost = Free()
    return made


def whole(requests, events):
    """Prompt and answer of all answers."""
    return [
        [*request.prompt, *tokens_of(own, answer)]
        for request, own in zip(requests, events, strict=True)
        for answer in range(request.n)
    ]
