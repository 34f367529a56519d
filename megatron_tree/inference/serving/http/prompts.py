"""From requests to tokens: the chat template, the tokenizer, and the limit of length."""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
from concurrent.futures import ThreadPoolExecutor

from torch import Tensor

from transformers import PreTrainedTokenizerBase

from ....core.files import check_text
from ..images import ImagePrompts, from_data_url
from ..messages import chat_text
from .errors import ApiError, bad_value, busy
from .protocol import ChatRequest, CompletionRequest
from .token_texts import Echo, TokenTexts

# Parameters of apply_chat_template that a request does not choose, or by fields of its own
RESERVED = frozenset(inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters) | {"messages"}

CHARACTERS = 4  # of a text per token that may fit: more are tokenized only if these make few enough tokens
SLACK = 64  # tokens that the cut may add at the end
MOST_IMAGE_PROMPTS = 64  # that wait until their images are prepared


class Prompts:
    """Tokenizes prompts in its own thread, so that long texts don't block the event loop, and prepares images in
    another one, a prompt at a time, so that they don't keep texts waiting.

    tokenizer: a Transformers tokenizer; it is copied, since the fast ones can't be shared between threads.
    vocab_size: of the model. max_model_len: tokens of a prompt and its answer together. images: of a model that takes
    some.
    """

    def __init__(self, tokenizer, *, vocab_size: int, max_model_len: int, images: ImagePrompts | None = None):
        self._tokenizer = copy.deepcopy(tokenizer)
        self.token_texts = TokenTexts(copy.deepcopy(tokenizer))
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self._images = images
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")
        self._image_thread, self._num_image_prompts = ThreadPoolExecutor(1, thread_name_prefix="images"), 0

    async def chat_prompt(self, body: ChatRequest) -> tuple[list[int], dict[str, Tensor] | None]:
        """The conversation as the model's chat template formats it, and what the model takes for its images.

        Raises: ApiError: 400 if it can't, 503 while too many others wait for their images.
        """
        if not self._tokenizer.chat_template:
            raise ApiError(
                400,
                "messages: the model's tokenizer has no chat template: use /v1/completions with a prompt of your own",
                param="messages",
                code="no_chat_template",
            )
        self._check_template(body)
        urls = [url for message in body.messages for url in message.image_urls]
        if urls and self._images is None:
            raise bad_value("messages", "image_url: this model reads text only: leave images out")
        text = await self._run(self._apply_template, body)
        return await self._with_images(text, urls) if urls else (await self._run(self._tokens, text, False), None)

    async def completion_prompts(self, body: CompletionRequest) -> list[list[int]]:
        """Every prompt as tokens. Raises: ApiError (400) for empty prompts and tokens that the model does not have."""
        prompts = []
        for prompt in body.prompts():
            if isinstance(prompt, str):
                prompt = await self._run(self._encode, prompt, body.add_special_tokens)
                if not prompt:
                    raise bad_value("prompt", "is empty: the model needs at least one token")
            elif len(prompt) > self.max_model_len:
                raise too_long(f"{len(prompt):,}", body.limit, self.max_model_len)
            elif max(prompt) >= self.vocab_size:
                raise bad_value("prompt", f"token {max(prompt)} does not exist: the model has {self.vocab_size} tokens")
            prompts.append(prompt)
        return prompts

    async def echo(self, body: CompletionRequest, prompts: list[list[int]]) -> list[Echo]:
        """The prompts as they precede the answers: texts as they came, tokens as the text that they stand for."""
        both = zip(body.prompts(), prompts, strict=True)
        return [await self._run(self.token_texts.echo, prompt, tokens) for prompt, tokens in both]

    def max_tokens(self, prompt: list[int], asked: int | None) -> int:
        """Tokens that the answer may have: what is asked for, or else all that fit.

        Raises: ApiError (400) with the numbers when prompt and answer don't fit together.
        """
        left = self.max_model_len - len(prompt)
        if left < (asked or 1):
            raise too_long(f"{len(prompt):,}", asked, self.max_model_len, left)
        return left if asked is None else asked

    def close(self) -> None:
        for thread in (self._thread, self._image_thread):
            thread.shutdown(wait=False, cancel_futures=True)

    async def _run(self, function, *args):
        return await asyncio.get_running_loop().run_in_executor(self._thread, function, *args)

    def _check_template(self, body: ChatRequest) -> None:
        """Raises: ApiError (400) for what the template does not read, and for what is not its business."""
        text = str(self._tokenizer.chat_template)  # or several of them
        if body.active_tools and "tools" not in text:
            raise bad_value("tools", "the model's chat template takes no tools: describe them in the messages")
        if body.reasoning_effort is not None and "reasoning_effort" not in text:
            raise bad_value("reasoning_effort", "the model's chat template takes none: ask for it in the messages")
        reserved = sorted(RESERVED & set(body.chat_template_kwargs))
        if reserved:
            raise bad_value("chat_template_kwargs", f"can't set {', '.join(reserved)}: leave it out")

    def _apply_template(self, body: ChatRequest) -> str:
        messages = [message.for_template() for message in body.messages]
        with _of_parameter("messages"):
            return chat_text(self._tokenizer, messages, **body.template_options)

    async def _with_images(self, text: str, urls: list[str]) -> tuple[list[int], dict[str, Tensor]]:
        if self._num_image_prompts >= MOST_IMAGE_PROMPTS:
            raise busy(f"{self._num_image_prompts} prompts wait until their images are prepared")
        self._num_image_prompts += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._image_thread, self._prepare, text, urls)
        finally:
            self._num_image_prompts -= 1

    def _prepare(self, text: str, urls: list[str]) -> tuple[list[int], dict[str, Tensor]]:
        try:
            return self._images(text, [from_data_url(url) for url in urls])
        except ValueError as error:
            raise bad_value("messages", f"image_url: {error}") from error

    def _encode(self, text: str, special: bool) -> list[int]:
        with _of_parameter("prompt"):
            check_text("prompt", text)
        return self._tokens(text, special)

    def _tokens(self, text: str, special: bool) -> list[int]:
        """Raises: ApiError (400) for a text that is too long; only its beginning is tokenized then."""
        size = CHARACTERS * (self.max_model_len + SLACK)
        while size < len(text):
            if len(self._tokenizer(text[:size], add_special_tokens=False).input_ids) > self.max_model_len + SLACK:
                raise too_long(f"more than {self.max_model_len:,}", None, self.max_model_len)
            size *= 2
        return self._tokenizer(text, add_special_tokens=special).input_ids


def too_long(prompt: str, asked: int | None, limit: int, left: int = 0) -> ApiError:
    """400 for a prompt of so many tokens with an answer that don't fit. left: what does."""
    answer = "at least 1 token of answer" if asked is None else f"{asked:,} tokens of answer"
    return ApiError(
        400,
        f"a prompt of {prompt} tokens and {answer} exceed this server's limit of {limit:,} tokens together: "
        "shorten the prompt" + (f" or ask for {left:,} tokens at most" if left > 0 else ""),
        param="max_tokens" if left > 0 else None,
        code="context_length_exceeded",
    )


@contextlib.contextmanager
def _of_parameter(name: str):
    """A ``ValueError`` about it ("name: what is wrong") becomes the answer 400."""
    try:
        yield
    except ValueError as error:
        raise bad_value(name, str(error).partition(": ")[2]) from error
