"""Fields of OpenAI's and vLLM's requests that this server does not use: those that can be ignored, those that can't."""

from __future__ import annotations

from typing import Any

# No effect on the answer: records, caches and speed
IGNORED = frozenset({
    "cache_salt", "metadata", "prediction", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "request_id", "safety_identifier", "service_tier", "store", "user",
})  # fmt: skip

_TOOLS = "an older form of tools and tool_choice: pass those"
_TEXT_ONLY = "this server reads and writes text only: leave the field out"
_NO_BEAMS = "answers are sampled, not searched for: ask for n choices"
_RANKED = "candidates are not ranked here: ask for n choices with logprobs and rank them yourself"
_SPECIAL = "special tokens are never part of the text: ask for logprobs, which name them"
# What would change the answer: (values that change nothing, besides null; why, and what to do instead)
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "allowed_token_ids": ((), "tokens can't be listed: use structured_outputs, or logit_bias"),
    "audio": ((), _TEXT_ONLY),
    "bad_words": (([],), "texts can't be banned: use logit_bias"),
    "best_of": ((1,), _RANKED),
    "chat_template": ((), "the model's own template is used: format the prompt yourself and use /v1/completions"),
    "documents": (([],), "put them into the messages"),
    "function_call": (("none",), _TOOLS),
    "functions": (([],), _TOOLS),
    "include_stop_str_in_output": ((False,), "what ended the answer is not part of it: leave the field out"),
    "length_penalty": ((1.0, 1), _NO_BEAMS),
    "modalities": ((["text"],), _TEXT_ONLY),
    "moderation": ((), "answers are not moderated here: leave the field out"),
    "prompt_logprobs": ((), "ask /v1/completions with echo and logprobs"),
    "return_token_ids": ((False,), "answers are text: ask for logprobs"),
    "skip_special_tokens": ((True,), _SPECIAL),
    "spaces_between_special_tokens": ((True,), _SPECIAL),
    "suffix": (("",), "text can't be inserted: put what follows into the prompt"),
    "truncate_prompt_tokens": ((), "prompts are not cut: send what fits"),
    "use_beam_search": ((False,), _NO_BEAMS),
    "verbosity": ((), "the verbosity can't be set: ask for it in the messages"),
    "web_search_options": ((), "this server searches nothing: leave the field out"),
}
