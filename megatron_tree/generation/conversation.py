"""Answers over one row of a sharded cache that is kept from turn to turn: only what is new is prefilled."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from torch import Tensor

from .answers import Answer, Recorder, answer_all
from .requests import Request
from .sampling import SamplingParams
from .scheduler import Scheduler
from .speculation import Speculated, Speculation


class Conversation:
    """A row of a `Runner`'s cache, and what it holds. Create and use it in the same way on all ranks.

    It is a `Scheduler` with one request at a time.

    end_tokens: those of the model. group: of all ranks, with the runner's rank 0, for messages of rank 0.
    timeout_s: limit of one broadcast. speculation: see `Scheduler`.
    """

    def __init__(
        self,
        runner,
        tokenizer,
        *,
        end_tokens: Collection[int],
        group,
        timeout_s: float = 600.0,
        speculation: Speculation | None = None,
    ):
        self.runner = runner
        self._scheduler = Scheduler(
            runner,
            tokenizer,
            max_rows=1,
            max_waiting=1,
            end_tokens=end_tokens,
            plan_group=group,
            timeout_s=timeout_s,
            speculation=speculation,
            executor=Recorder(runner),
        )
        self._row = self._scheduler.keep()
        self.held: list[int] = []
        """Tokens that the cache holds."""

    @property
    def speculated(self) -> Speculated:
        """Numbers of drafted tokens of all answers; on rank 0."""
        return self._scheduler.speculated

    def forget(self) -> None:
        """Start again with an empty row."""
        self._scheduler.forget(self._row)
        self._row, self.held = self._scheduler.keep(), []

    def answer(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        on_text: Callable[[str], None] = lambda text: None,
        progress: Callable[[int, int], None] | None = None,
        cancelled: Callable[[], bool] = lambda: False,
        keep_logits: bool = False,
        images: Mapping[str, Tensor] | None = None,
    ) -> Answer:
        """Answer a prompt, the whole conversation in tokens; what the cache holds of it is not run again.

        on_text, cancelled: on rank 0: gets the text piece by piece; asked before every chunk of the prompt and every
            token whether to end here. progress: on this rank, called as progress(tokens prefilled, all of them).
        images: of the whole conversation, see `Request`.
        Raises: ValueError on all ranks for an empty prompt or one that leaves no position for an answer. `TreeError`
            on all ranks when logits are not finite.
        """
        (answer,) = answer_all(
            self._scheduler,
            [Request(prompt=prompt, sampling=params, row=self._row, images=images)],
            keep_logits=keep_logits,
            progress=progress,
            on_text=on_text,
            cancelled=cancelled,
        )
        self.held = [*prompt, *answer.tokens][: self._scheduler.executor.length(self._row.handle)]
        return answer
