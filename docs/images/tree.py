"""Draws tree.svg, the README's picture: python docs/images/tree.py"""

from pathlib import Path

WIDTH, HEIGHT, RANKS, COLUMN = 760, 300, 4, 180
COLORS = ("#cfe3f7", "#d5efd3", "#fbe6c8", "#ead7f2")
TOKENS = 6  # drawn on each rank


def text(x, y, words, size=14, anchor="middle"):
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}">{words}</text>'


def box(x, y, width, height, color):
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" fill="{color}" stroke="#444"/>'


def line(x0, y0, x1, y1):
    return f'<path d="M {x0:g} {y0:g} L {x1:g} {y1:g}" stroke="#444" stroke-width="1.5" marker-end="url(#arrow)"/>'


def drawing():
    """The SVG file's text: tokens on four ranks, a partial result from each, and a tree that merges them."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">',
        "<title>Each rank attends to its own keys and values; a tree merges the partial results</title>",
        '<defs><marker id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M 0 0 L 8 4 L 0 8 z" fill="#444"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    centers = [20 + COLUMN * (rank + 0.5) for rank in range(RANKS)]
    for rank, (x, color) in enumerate(zip(centers, COLORS)):
        parts.append(text(x, 24, f"rank {rank}"))
        parts += [box(x - 72 + 24 * i, 34, 24, 24, color) for i in range(TOKENS)]
        parts += [text(x, 76, "keys and values stay here", 12), line(x, 84, x, 106)]
        parts += [box(x - 72, 110, 144, 30, color), text(x, 130, "partial (out, lse)", 13)]
    merges = [((centers[i] + centers[i + 1]) / 2, centers[i : i + 2]) for i in range(0, RANKS, 2)]
    for x, below in merges:
        parts += [line(child, 142, x + (child - x) * 0.25, 182) for child in below]
        parts += [box(x - 50, 186, 100, 30, "#f2f2f2"), text(x, 206, "merge", 13)]
    middle = WIDTH / 2
    parts += [line(x, 218, middle + (x - middle) * 0.3, 254) for x, _ in merges]
    parts += [box(middle - 110, 258, 220, 30, "#f2f2f2"), text(middle, 278, "exact attention over all tokens", 13)]
    return "\n".join([*parts, "</svg>"]) + "\n"


if __name__ == "__main__":
    Path(__file__).with_suffix(".svg").write_text(drawing())
