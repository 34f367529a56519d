"""Images of a request: in turns, in the keys of what the cache holds, and where a chunk of the prompt may end."""

from __future__ import annotations

import base64
import functools
import hashlib
from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

DTYPES = {str(x): x for x in (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)}
NAME_BITS = 24  # of a token's number in its name


def bytes_of(x: Tensor) -> bytes:
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()


def runs_of(marked: Tensor) -> list[tuple[int, int]]:
    """(first, one past the last) of every run of True; marked: bool [n]."""
    changes = F.pad(marked.int(), (1, 1)).diff().nonzero().flatten().tolist()
    return list(zip(changes[::2], changes[1::2], strict=True))


def outside(runs: Sequence[tuple[int, int]], first: int, end: int) -> int:
    """Where a chunk from `first` on ends, if not inside of a run: instead of at `end` before it, or behind it if the
    chunk begins in it."""
    for begin, stop in runs:
        if begin < end < stop:
            end = begin if begin > first else stop
    return end


def packed(images: Mapping[str, Tensor]) -> dict[str, list]:
    """Tensors as JSON has them."""
    found = {}
    for name, x in images.items():
        found[name] = [str(x.dtype), list(x.shape), base64.b64encode(bytes_of(x)).decode()]
    return found


def unpacked(images: Mapping[str, list]) -> dict[str, Tensor]:
    """The tensors of `packed`."""
    return {
        name: torch.frombuffer(bytearray(base64.b64decode(data)), dtype=DTYPES[dtype]).view(shape)
        for name, (dtype, shape, data) in images.items()
    }


class PromptImages:
    """The images of a prompt. prompt: int64 [n]; inputs: what the model's processor returned beside it; image_tokens:
    those that stand for images. joined: whether an image's tokens see each other, so that no chunk ends inside.

    Attributes: inputs. end: tokens up to the last one of an image, this one included.
    """

    def __init__(self, prompt: Tensor, inputs: Mapping[str, Tensor], image_tokens: Sequence[int], *, joined: bool):
        self.inputs, self._joined = inputs, joined
        self._runs = runs_of(torch.isin(prompt, torch.tensor(image_tokens)))
        self._first, self.end = self._runs[0][0], self._runs[-1][1]

    @functools.cached_property
    def _digests(self) -> list[int]:
        """Six numbers of 39 bits that tell the images apart; a request that is only checked needs none."""
        digest = hashlib.sha256()
        for name in sorted(self.inputs):
            x = self.inputs[name]
            digest.update(f"{name} {x.dtype} {list(x.shape)}".encode())
            digest.update(bytes_of(x))
        parts = [digest.digest()[i : i + 5] for i in range(0, 30, 5)]
        return [int.from_bytes(part, "big") >> 1 << NAME_BITS for part in parts]

    def named(self, tokens: Sequence[int], first: int) -> list[int]:
        """Numbers that tell apart what the cache holds of these tokens, from position `first` on: those behind an image
        differ with the images."""
        count, digests = max(self._first - first, 0), self._digests
        behind = enumerate(tokens[count:], first + count)
        return [*tokens[:count], *(-1 - digests[at % len(digests)] - token for at, token in behind)]

    @property
    def longest(self) -> int:
        """Tokens of the longest image that no chunk ends in."""
        return max(stop - begin for begin, stop in self._runs) if self._joined else 0

    def chunk(self, first: int, size: int) -> int:
        """How many tokens to run from position `first` on: `size`, but whole images if these are joined."""
        return outside(self._runs if self._joined else (), first, first + size) - first
