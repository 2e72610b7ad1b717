"""Which rank holds which block: as text, by rich, and as a picture to scale."""

from __future__ import annotations

import colorsys
import itertools
from collections.abc import Sequence
from html import escape
from pathlib import Path

import shardtensor._C as _C
from shardtensor.tensor._tensor import ShardTensor

# Half-open: rows, columns.
_Span = tuple[int, int]
_Block = tuple[_Span, _Span]


def _shown(tensor: ShardTensor, dims: Sequence[int] | None) -> list[int]:
    """The dims down and across: those requested, or the first two, sharded ones before others."""
    layout = _C.layout(tensor)
    if dims is None:
        sharded = {dim for kind, dim, *_ in layout.placements if kind == 1}
        first = sorted(range(tensor.ndim), key=lambda d: (d not in sharded, d))[:2]
        return sorted(first)
    if not 1 <= len(dims) <= 2 or not all(-tensor.ndim <= d < tensor.ndim for d in dims):
        raise ValueError(f"argument 'dims' is {tuple(dims)}; pass one or two of the tensor's dims, of which there are {tensor.ndim}")
    return [d % tensor.ndim for d in dims]


def _blocks(tensor: ShardTensor, dims: list[int]) -> tuple[dict[_Block, list[int]], list[int]]:
    """The ranks that hold each block of those dims, and the ranks that hold nothing."""
    layout = _C.layout(tensor)
    blocks: dict[_Block, list[int]] = {}
    idle = []
    for rank, coordinate in zip(layout.mesh.ranks, itertools.product(*map(range, layout.mesh.shape)), strict=True):
        held = False
        for offsets, sizes in layout.boxes(tensor.shape, coordinate):
            if 0 in sizes:
                continue
            held = True
            spans = [(offsets[d], offsets[d] + sizes[d]) for d in dims] + [(0, 1), (0, 1)]
            blocks.setdefault((spans[0], spans[1]), []).append(rank)
        if not held:
            idle.append(rank)
    return blocks, idle


def _cells(blocks: dict[_Block, list[int]]) -> tuple[list[_Span], list[_Span], dict[_Block, list[int]]]:
    """A grid of cells such that no block's edge crosses a cell."""
    edges = [sorted({edge for block in blocks for edge in block[axis]}) for axis in (0, 1)]
    rows, columns = (list(itertools.pairwise(along)) for along in edges)
    grid: dict[_Block, list[int]] = {}
    for row, column in itertools.product(rows, columns):
        inside = [
            ranks
            for (r, c), ranks in blocks.items()
            if r[0] <= row[0] and row[1] <= r[1] and c[0] <= column[0] and column[1] <= c[1]
        ]
        grid[row, column] = sorted({rank for ranks in inside for rank in ranks})
    return rows, columns, grid


def _names(device_type: str, ranks: Sequence[int]) -> str:
    return ", ".join(f"{device_type}:{rank}" for rank in ranks)


def _table(tensor: ShardTensor) -> tuple[list[str], list[list[str]], list[int]]:
    dims = _shown(tensor, None)
    blocks, idle = _blocks(tensor, dims)
    rows, columns, grid = _cells(blocks)
    device = tensor.device_mesh.device_type
    head = ["", *(f"Col {start}-{end - 1}" for start, end in columns)]
    body = [[f"Row {r[0]}-{r[1] - 1}", *(_names(device, grid[r, c]) for c in columns)] for r in rows]
    return head, body, idle


def _prints_here(tensor: ShardTensor) -> bool:
    coordinate = tensor.device_mesh.get_coordinate()
    return coordinate is not None and not any(coordinate) and tensor.numel() > 0


def visualize_sharding(dtensor: ShardTensor, header: str = "", use_rich: bool = False) -> None:
    """Prints, on the mesh's first rank, which ranks hold which rows and columns. For a tensor of more than two dims, it shows
    the first two that are sharded; see draw_sharding() for a picture."""
    if not _prints_here(dtensor):
        return
    head, body, idle = _table(dtensor)
    title = header or f"{tuple(dtensor.shape)}, {_C.layout(dtensor)}"
    if dtensor.ndim > 2:
        title += f", dims {' and '.join(map(str, _shown(dtensor, None)))}"
    if use_rich:
        _print_rich(title, head, body)
    else:
        widths = [max(len(row[i]) for row in [head, *body]) for i in range(len(head))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in [head, *body]]
        print("\n".join([title, *lines]))
    if idle:
        print(f"nothing on {_names(dtensor.device_mesh.device_type, idle)}")


def _print_rich(title: str, head: list[str], body: list[list[str]]) -> None:
    try:
        from rich.console import Console  # noqa: PLC0415  optional
        from rich.table import Table  # noqa: PLC0415  optional
    except ImportError:
        raise ImportError("visualize_sharding: use_rich=True needs rich, which is not installed (pip install rich)") from None
    table = Table(*head, title=title, show_lines=True)
    cells = sorted({cell for row in body for cell in row[1:]})
    for row in body:
        styled = [f"[{_colour(cells.index(cell), len(cells))}]{cell}[/]" for cell in row[1:]]
        table.add_row(row[0], *styled)
    Console().print(table)


def _colour(i: int, n: int, light: float = 0.7) -> str:
    r, g, b = (round(255 * part) for part in colorsys.hls_to_rgb(i / n, light, 0.6))
    return f"#{r:02x}{g:02x}{b:02x}"


def draw_sharding(dtensor: ShardTensor, file: str | Path, *, dims: Sequence[int] | None = None) -> None:
    """Draws an SVG picture, on the mesh's first rank: each block to scale, with the ranks that hold it. `dims`: the one or two
    dims that run down and across; by default the first two, sharded ones before others."""
    shown = _shown(dtensor, dims)
    if not _prints_here(dtensor):
        return
    blocks, idle = _blocks(dtensor, shown)
    height, width = [dtensor.shape[d] for d in shown] + [1] * (2 - len(shown))
    scale = 640 / max(width, height)
    high, wide = max(height * scale, 60), max(width * scale, 60)
    down, across = high / height, wide / width
    holders = sorted({tuple(ranks) for ranks in blocks.values()})
    parts = []
    for ((top, bottom), (left, right)), ranks in blocks.items():
        x, y, w, h = left * across + 10, top * down + 40, (right - left) * across, (bottom - top) * down
        size = max(6, min(16, h * 0.6, w * 0.18))
        label = escape(_names(dtensor.device_mesh.device_type, ranks))
        colour = _colour(holders.index(tuple(ranks)), len(holders), 0.8)
        parts.append(
            f'<g><title>{label}: rows {top}-{bottom - 1}, columns {left}-{right - 1}</title>'
            f'<rect x="{x:.2f}" y="{y:.2f}" width="{w:.2f}" height="{h:.2f}" fill="{colour}" stroke="#333"/>'
            f'<text x="{x + w / 2:.2f}" y="{y + h / 2:.2f}" font-size="{size:.1f}" text-anchor="middle" '
            f'dominant-baseline="middle">{label}</text></g>'
        )
    title = f"{tuple(dtensor.shape)}, {_C.layout(dtensor)}"
    if idle:
        title += f"; nothing on {_names(dtensor.device_mesh.device_type, idle)}"
    Path(file).write_text(
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{wide + 20:.0f}" height="{high + 50:.0f}" font-family="sans-serif">'
        f'<text x="10" y="24" font-size="14">{escape(title)}</text>{"".join(parts)}</svg>\n'
    )
