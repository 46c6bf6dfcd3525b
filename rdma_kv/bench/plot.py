"""Throughput over size as an SVG: a log-log chart per lane, side by side, one line per contestant. Needs no library."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path

from rdma_kv.errors import ConfigError

Line = Sequence[tuple[float, float]]
"""(bytes, GB/s), by size."""

_WIDTH, _HEIGHT = 460, 330  # of a panel
_LEFT, _TOP, _PLOT_WIDTH, _PLOT_HEIGHT = 56, 34, 380, 250
_LEGEND_LINE = 18
_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")  # told apart by all eyes


def check_plot(path: Path) -> None:
    """Say early what `write_plot` would refuse.

    Raises:
        ConfigError: no .svg, or no such directory.
    """
    if path.suffix.lower() != ".svg":
        raise ConfigError("--plot", f"{path}: only .svg can be written")
    if not path.parent.is_dir():
        raise ConfigError("--plot", f"{path.parent} is no directory")


def write_plot(path: Path, panels: Mapping[str, Mapping[str, Line]]) -> None:
    """Write the chart.

    Args:
        panels: by title, the lines by name. A title that names GB/s says itself what they are over.

    Raises:
        ConfigError: see `check_plot`.
    """
    check_plot(path)
    names = list(dict.fromkeys(name for lines in panels.values() for name in lines))
    colours = {name: _COLOURS[place % len(_COLOURS)] for place, name in enumerate(names)}
    points = [point for lines in panels.values() for line in lines.values() for point in line]
    x_range, y_range = _decades([x for x, _ in points]), _decades([y for _, y in points])
    body = [
        f'<g transform="translate({place * _WIDTH},0)">{_panel(title, lines, colours, x_range, y_range)}</g>'
        for place, (title, lines) in enumerate(panels.items())
    ]
    body += [_legend(place, name, colours[name]) for place, name in enumerate(names)]
    width, height = _WIDTH * max(1, len(panels)), _HEIGHT + _LEGEND_LINE * len(names) + 10
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" font-size="11">'
    background = f'<rect width="{width}" height="{height}" fill="white"/>'
    path.write_text("\n".join([head, background, *body, "</svg>"]) + "\n")


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten below and above all values."""
    if not values:
        return 0, 1
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _at(value: float, span: tuple[int, int], length: int) -> float:
    return (math.log10(value) - span[0]) / (span[1] - span[0]) * length


def _panel(
    title: str,
    lines: Mapping[str, Line],
    colours: Mapping[str, str],
    x_range: tuple[int, int],
    y_range: tuple[int, int],
) -> str:
    bottom = _TOP + _PLOT_HEIGHT
    parts = [_text(_LEFT, 20, title if "GB/s" in title else f"{title}: GB/s over bytes", weight="bold")]
    for decade in range(x_range[0], x_range[1] + 1):
        x = _LEFT + _at(10.0**decade, x_range, _PLOT_WIDTH)
        parts += [_rule(x, _TOP, x, bottom), _text(x, bottom + 16, f"1e{decade}", anchor="middle")]
    for decade in range(y_range[0], y_range[1] + 1):
        y = bottom - _at(10.0**decade, y_range, _PLOT_HEIGHT)
        parts += [_rule(_LEFT, y, _LEFT + _PLOT_WIDTH, y), _text(_LEFT - 6, y + 4, f"1e{decade}", anchor="end")]
    for name, line in lines.items():
        spots = [(_LEFT + _at(x, x_range, _PLOT_WIDTH), bottom - _at(y, y_range, _PLOT_HEIGHT)) for x, y in line]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in spots)
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="2"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3" fill="{colours[name]}"/>' for x, y in spots]
    return "\n".join(parts)


def _legend(place: int, name: str, colour: str) -> str:
    y = _HEIGHT + _LEGEND_LINE * place
    return f'<rect x="{_LEFT}" y="{y}" width="14" height="4" fill="{colour}"/>' + _text(_LEFT + 22, y + 6, name)


def _rule(x1: float, y1: float, x2: float, y2: float) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="#ddd"/>'


def _text(x: float, y: float, text: str, *, anchor: str = "start", weight: str = "normal") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}" font-weight="{weight}">{escape(text)}</text>'
