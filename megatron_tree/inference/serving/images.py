"""Images of prompts: from data URLs and files to what the model takes, by the model's own processor."""

from __future__ import annotations

import base64
import binascii
import io
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from ...integrations.transformers.models import load_processor

MOST_IMAGES = 64  # of one prompt
MOST_PIXELS = 1 << 25  # of all of them: a small file may hold very many, and a processor takes up to 20 bytes for each
FORMATS = {
    "image/png": "PNG", "image/jpeg": "JPEG", "image/jpg": "JPEG", "image/webp": "WEBP", "image/gif": "GIF",
}  # fmt: skip
"""Pillow's names of the formats that are read."""


class ImageFile(NamedTuple):
    """An image as it came."""

    data: bytes
    format: str | None = None
    """Of `FORMATS`; None: any of them."""


def from_data_url(url: str) -> ImageFile:
    """The image of a data: URL in base64. Raises: ValueError for other URLs, of which none is opened."""
    head, comma, data = url.partition(",")
    if not head.startswith("data:image/") or not head.endswith(";base64") or not comma:
        raise ValueError(
            f"{url[:40]!r} is not of the form data:image/png;base64,...: this server opens no other addresses"
        )
    kind = head.removeprefix("data:").partition(";")[0].lower()
    if kind not in FORMATS:
        raise ValueError(f"{kind[:40]!r} is not supported: send one of {', '.join(FORMATS)}")
    try:
        return ImageFile(base64.b64decode(data, validate=True), FORMATS[kind])
    except binascii.Error as error:
        raise ValueError(f"the data after {head!r} is not base64: {error}") from None


class ImagePrompts:
    """Makes prompts with images for the model in a folder; not for several threads at once.

    The processor and the packages that it needs are loaded with the first image.
    """

    def __init__(self, folder: Path):
        self._folder, self._processor = folder, None

    def __call__(self, text: str, images: Sequence[ImageFile]) -> tuple[list[int], dict[str, Tensor]]:
        """(tokens, what the model takes beside them) of a text from the chat template, with images.

        Raises: ValueError for what can't be read, is too large, or doesn't fit together."""
        if len(images) > MOST_IMAGES:
            raise ValueError(f"{len(images)} images are more than {MOST_IMAGES}: send fewer in one prompt")
        if self._processor is None:
            self._processor = load_processor(self._folder)
        pictures = [_opened(image) for image in images]
        pixels = sum(picture.width * picture.height for picture in pictures)
        if pixels > MOST_PIXELS:
            sizes = ", ".join(f"{picture.width} x {picture.height}" for picture in pictures[:3])
            raise ValueError(
                f"{pixels:,} pixels in all ({sizes}{', ...' * (len(pictures) > 3)}) are more than {MOST_PIXELS:,}: "
                "make the images smaller, or send fewer in one prompt"
            )
        pictures = list(map(_decoded, pictures))
        try:
            fields = self._processor(text=[text], images=pictures, return_tensors="pt", add_special_tokens=False)
        except Exception as error:  # each processor has errors of its own
            raise ValueError(f"the model's processor refuses them: {error}") from error
        fields = {name: x for name, x in fields.items() if isinstance(x, Tensor)}
        return fields.pop("input_ids")[0].tolist(), {name: x for name, x in fields.items() if name != "attention_mask"}


def _opened(file: ImageFile):
    """A picture of which only the size has been read."""
    from PIL import Image, UnidentifiedImageError  # an optional package, which load_processor has asked for

    formats = [file.format] if file.format else sorted(set(FORMATS.values()))  # others' readers may start programs
    try:
        return Image.open(io.BytesIO(file.data), formats=formats)
    except UnidentifiedImageError:
        raise ValueError(f"an image can't be read: it is no {' or '.join(formats)}") from None
    except (Image.DecompressionBombError, OSError, SyntaxError) as error:
        raise ValueError(f"an image can't be read: {error}") from None


def _decoded(picture):
    try:
        return picture.convert("RGB")
    except (OSError, SyntaxError) as error:
        raise ValueError(f"an image can't be read: {error}") from None
