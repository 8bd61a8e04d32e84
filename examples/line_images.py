"""Images of lines of Python's standard library, in several resolutions: some need more patches than others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from PIL import Image, ImageDraw, ImageFont
from read_text import END, GLYPH, HEIGHT, SHIFT
from torch import Tensor

import fzero as fz

PATCH = 6  # pixels of a side
SCALES = (1.0, 1.25, 1.5)  # of Pillow's own bitmap font, whose characters are GLYPH pixels wide
CHARACTER = 12  # by how much two characters' places differ


class Batch(NamedTuple):
    """Images and their lines.

    Attributes:
        images: of each image its patches: "patches" [n, PATCH * PATCH], and "places" [n, 2], the x and y of their
            middles, where CHARACTER is a character's width in any resolution.
        tokens: [n] of each line: END, its characters, END.
    """

    images: fz.Ragged
    tokens: fz.Ragged

    @property
    def count(self) -> int:
        """Patches and characters."""
        return int(self.images.lengths.sum() + self.tokens.lengths.sum())

    @property
    def lines(self) -> list[str]:
        return [bytes(line[1:-1].tolist()).decode() for line in self.tokens.values.split(self.tokens.lengths.tolist())]


def random_batch(lines: list[str], count: int, seed: int) -> Batch:
    """One that depends on the seed alone, so that a run that is resumed sees what it would have seen."""
    generator = torch.Generator().manual_seed(seed)
    chosen = [lines[i] for i in torch.randint(len(lines), (count,), generator=generator).tolist()]
    scales = [SCALES[i] for i in torch.randint(len(SCALES), (count,), generator=generator).tolist()]
    drawn = [render(line, scale, generator) for line, scale in zip(chosen, scales, strict=True)]
    cut = [patches_of(image, scale) for image, scale in zip(drawn, scales, strict=True)]
    patches, places = [one_after_the_other(each) for each in zip(*cut, strict=True)]
    images = fz.Ragged({"patches": patches.values, "places": places.values}, patches.lengths)
    return Batch(images, one_after_the_other([torch.tensor([END, *line.encode(), END]) for line in chosen]))


def one_after_the_other(examples: Sequence[Tensor]) -> fz.Ragged:
    return fz.Ragged(torch.cat([*examples]), torch.tensor([len(rows) for rows in examples]))


def render(line: str, scale: float, generator: torch.Generator) -> Tensor:
    """An image [h, w] in whole patches: ink is 1, more or less dark, and paper 0 with noise."""
    right, down = torch.randint(SHIFT, (2,), generator=generator).tolist()
    small = Image.new("L", ((len(line) + 1) * GLYPH, HEIGHT))
    ImageDraw.Draw(small).text((right, down + 2), line, fill=255, font=ImageFont.load_default_imagefont())
    width, height = [round(scale * side) for side in small.size]
    image = Image.new("L", (-(-width // PATCH) * PATCH, -(-height // PATCH) * PATCH))
    image.paste(small.resize((width, height), Image.Resampling.BILINEAR))
    ink = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(image.height, image.width) / 255
    darkness = 0.5 + 0.5 * torch.rand((), generator=generator)
    return darkness * ink + 0.1 * torch.randn(ink.shape, generator=generator)


def patches_of(image: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """The patches of an image, [n, PATCH * PATCH], row by row, and their places, [n, 2]."""
    rows, columns = image.shape[0] // PATCH, image.shape[1] // PATCH
    patches = image.view(rows, PATCH, columns, PATCH).transpose(1, 2).flatten(2).flatten(0, 1)
    y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    middles = (torch.stack([x, y], -1).flatten(0, 1) + 0.5) * PATCH / scale
    return patches, (CHARACTER / GLYPH * middles).round().long()
