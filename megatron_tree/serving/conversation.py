"""Answers of one row of a sharded cache that is kept from turn to turn: only what is new is prefilled.

Rank 0 chooses the tokens; each travels in one small broadcast, with the news whether the answer ends. `Scheduler` is
for many requests, which forget their rows when they end; this is for one, with times and logits, and may be stopped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..comm import group_rank
from ..comm.wire import share_check
from .sampling import Sampler, SamplingParams
from .stopping import Stopper


@dataclass
class Answer:
    """One answer; times are this rank's, in seconds."""

    prompt_tokens: int
    """Of the whole prompt."""
    new_tokens: int
    """Of them, those that the cache did not hold."""
    tokens: list[int] = field(default_factory=list)
    """The answer's, an end token included; the same on all ranks."""
    text: str = ""
    """On rank 0."""
    finish_reason: str = ""
    """"stop", "length" or "cancelled"."""
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    """From the call to the first token."""
    step_s: list[float] = field(default_factory=list)
    """Of every token after that."""
    logits: list[Tensor] = field(default_factory=list)
    """fp32 [vocab] of every token, if asked for."""


class Conversation:
    """A row of a `Runner`'s cache, and what it holds. Make it, and call its methods, on all ranks alike.

    end_tokens: those of the model. group: of all ranks, same rank 0 as the runner's, for what rank 0 tells.
    timeout_s: limit of one such message.
    """

    def __init__(
        self, runner, tokenizer, *, end_tokens: Collection[int], group, sharded: bool = True, timeout_s: float = 600.0
    ):
        self.runner, self._tokenizer, self._end_tokens = runner, tokenizer, end_tokens
        self._group, self._sharded, self._timeout_s = group, sharded, timeout_s
        self.is_leader = group_rank(group) == 0
        self._row = runner.add()
        self.held: list[int] = []
        """Tokens that the cache holds."""

    def forget(self) -> None:
        """Begin anew, with an empty row."""
        self.runner.remove(self._row)
        self._row, self.held = self.runner.add(), []

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        on_text: Callable[[str], None] | None = None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        keep_logits: bool = False,
    ) -> Answer:
        """Go on from a prompt, the whole conversation in tokens; what the cache holds of it is not run again.

        on_text, cancelled: on rank 0: gets the text piece by piece; asked before every token whether to end here.
        progress: of the prefill, as progress(tokens done, all of them).
        Raises: ValueError on all ranks for an empty prompt or one that leaves no position for an answer.
        """
        prompt = list(prompt)
        limit = self.runner.max_positions
        if not prompt or (limit is not None and len(prompt) + params.max_tokens > limit):
            raise ValueError(
                f"{len(prompt)} prompt tokens and max_tokens={params.max_tokens}: a prompt must have one token or more "
                f"and both together fit into the model's {limit} positions"
            )
        self._keep(prompt)
        result = Answer(len(prompt), len(prompt) - len(self.held))
        pick = (
            _Picker(self._tokenizer, params, self._end_tokens, prompt, on_text, cancelled) if self.is_leader else None
        )
        start = time.perf_counter()
        new = torch.tensor(prompt[len(self.held) :])
        logits = self.runner.prefill(self._row, new, sharded=self._sharded, progress=progress)
        self.held = prompt
        result.prefill_s = self._now() - start
        while True:
            token, result.finish_reason = self._share(lambda logits=logits: pick(logits))
            if token is not None:
                result.tokens.append(token)
                if keep_logits:
                    result.logits.append(logits)
                if len(result.tokens) == 1:
                    result.first_token_s = self._now() - start
                else:
                    result.step_s.append(self._now() - start)
            if result.finish_reason:
                break
            start = self._now()
            logits = self.runner.step([self._row], torch.tensor([[token]]))[0, -1]
            self.held.append(token)
        result.text = "" if pick is None else pick.text
        return result

    def _keep(self, prompt: list[int]) -> None:
        """Forget what the cache holds beyond the beginning that it shares with a prompt, whose last token is run."""
        same, most = 0, min(len(self.held), len(prompt) - 1)
        while same < most and self.held[same] == prompt[same]:
            same += 1
        if same < len(self.held):
            try:
                self.runner.crop(self._row, same)
                self.held = self.held[:same]
            except ValueError:  # layers with a window have let go of what would be needed
                self.forget()

    def _share(self, pick) -> tuple[int | None, str]:
        token, reason = share_check(pick, self._group, device=self.runner.device, timeout_s=self._timeout_s)
        return token, reason

    def _now(self) -> float:
        if self.runner.device.type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


class _Picker:
    """Rank 0's choice of tokens: (the token, or None if it ends without one; why it ends, or "")."""

    def __init__(self, tokenizer, params: SamplingParams, end_tokens, prompt: list[int], on_text, cancelled):
        self._sampler = Sampler(params.with_seed(), torch.tensor(prompt))
        self._stopper = Stopper(tokenizer, params, end_tokens)
        self._on_text, self._cancelled = on_text, cancelled
        self.text = ""

    def __call__(self, logits: Tensor) -> tuple[int | None, str]:
        if self._cancelled():
            self._tell(self._stopper.flush())
            return None, "cancelled"
        token = self._sampler.choose(logits).token
        piece = self._stopper.add(token)
        self._tell(piece.text)
        return token, piece.finish_reason or ""

    def _tell(self, text: str) -> None:
        self.text += text
        if text and self._on_text is not None:
            self._on_text(text)
