"""Tool calls in what a model writes: found in the text of an answer, whole or in pieces."""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Collection
from typing import Any

MARK, END = "<tool_call>", "</tool_call>"
_BLOCK = re.compile(f"{MARK}(.*?)(?:{END}|$)", re.DOTALL)


class ToolText:
    """Splits an answer into text and tool calls.

    Two forms are understood: JSON between <tool_call> and </tool_call> (Hermes, Qwen, SmolLM2), and an answer that is
    JSON and nothing else (Llama 3). What may become a call is held back until the answer ends.

    names: of the functions that may be called. most: calls at most. forced: the whole answer is JSON.
    """

    def __init__(self, names: Collection[str], *, most: int | None = None, forced: bool = False):
        self._names, self._most, self._forced = frozenset(names), most, forced
        self._held, self._sent = "", False

    def add(self, text: str) -> str:
        """The text that is certainly none of a call."""
        self._held += text
        at = self._held.find(MARK)
        if at < 0:
            if self._forced or (not self._sent and self._held.lstrip()[:1] in ("", "{", "[")):
                return ""
            at = next(i for i in range(len(self._held) + 1) if MARK.startswith(self._held[i:]))
        out, self._held = self._held[:at], self._held[at:]
        self._sent |= bool(out.strip())
        return out

    def finish(self) -> tuple[str, list[dict[str, Any]]]:
        """(the rest of the text, the calls in OpenAI's form). A call that can't be read stays text."""
        held, self._held = self._held, ""
        blocks = _BLOCK.findall(held) or [held]
        try:
            found = [call for block in blocks for call in self._calls(block)]
        except (ValueError, RecursionError):
            return held, []
        rest = "" if not held.startswith(MARK) else _BLOCK.sub("", held).strip()
        return rest, found[: self._most]

    def _calls(self, block: str) -> list[dict[str, Any]]:
        values = json.loads(block)
        values = values if isinstance(values, list) else [values]
        if not values:
            raise ValueError("no call")
        return [self._call(value) for value in values]

    def _call(self, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict) or value.get("name") not in self._names:
            raise ValueError("no call of a known function")
        arguments = value.get("arguments", value.get("parameters", {}))
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        function = {"name": value["name"], "arguments": arguments}
        return {"id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
