"""Images of prompts: from data URLs and files to what the model takes, by the model's own processor."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from pathlib import Path

from torch import Tensor

from ..integrations.transformers.models import load_processor

MOST_IMAGES = 64  # of one prompt
MOST_PIXELS = 1 << 26  # of one image: a small file may hold very many


def from_data_url(url: str) -> bytes:
    """The bytes of a data: URL in base64. Raises: ValueError for other URLs, of which none is opened."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ValueError(
            f"{url[:40]!r} is not of the form data:image/png;base64,...: this server opens no other addresses"
        )
    try:
        return base64.b64decode(data, validate=True)
    except binascii.Error as error:
        raise ValueError(f"the data after {head!r} is not base64: {error}") from None


class ImagePrompts:
    """Makes prompts with images for the model in a folder; not for several threads at once.

    The processor and the packages that it needs are loaded with the first image.
    """

    def __init__(self, folder: Path):
        self._folder, self._processor = folder, None

    def __call__(self, text: str, images: Sequence[bytes]) -> tuple[list[int], dict[str, Tensor]]:
        """(tokens, what the model takes beside them) of a text from the chat template, with images in their files'
        bytes. Raises: ValueError for what can't be read, or doesn't fit together."""
        if len(images) > MOST_IMAGES:
            raise ValueError(f"{len(images)} images are more than {MOST_IMAGES}: send fewer in one prompt")
        if self._processor is None:
            self._processor = load_processor(self._folder)
        pictures = [_picture(image) for image in images]
        try:
            made = self._processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # each processor has errors of its own
            raise ValueError(f"the model's processor refuses them: {error}") from error
        made = {name: x for name, x in made.items() if isinstance(x, Tensor)}
        return made.pop("input_ids")[0].tolist(), {name: x for name, x in made.items() if name != "attention_mask"}


def _picture(data: bytes):
    from PIL import Image, UnidentifiedImageError  # an optional package, which load_processor has asked for

    try:
        picture = Image.open(io.BytesIO(data))
        if picture.width * picture.height > MOST_PIXELS:
            raise ValueError(f"an image of {picture.width} x {picture.height} is too large: {MOST_PIXELS:,} pixels fit")
        return picture.convert("RGB")
    except (UnidentifiedImageError, Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ValueError(f"an image can't be read: {error}") from None
