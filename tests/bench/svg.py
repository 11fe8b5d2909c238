"""A roofline picture (Williams, Waterman, Patterson 2009) as SVG: what a machine allows, and points below it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

_WIDTH, _HEIGHT = 960, 560
_LEFT, _RIGHT, _TOP, _BOTTOM = 90, 250, 50, 70
_COLOURS = ("#0b6e99", "#c2410c", "#4d7c0f", "#7e22ce", "#b45309", "#0f766e")


@dataclass(frozen=True, slots=True)
class Roof:
    """A limit: bytes a second up to where operations a second bound it. Several differ in the former."""

    name: str
    bandwidth: float
    peak: float


@dataclass(frozen=True, slots=True)
class Point:
    """Something measured. series: decides its colour. kind: its form, one of `FORMS`."""

    series: str
    kind: str
    intensity: float
    rate: float


FORMS = {
    "decode": '<circle cx="{x}" cy="{y}" r="6" {style}/>',
    "batch": '<rect x="{left}" y="{above}" width="11" height="11" {style}/>',
    "prefill": '<path d="M {x} {above} l 7 12 h -14 z" {style}/>',
}


def roofline(title: str, roofs: Sequence[Roof], points: Sequence[Point]) -> str:
    """The picture. Both axes are logarithmic: operations for each byte read, operations a second."""
    ridges = [roof.peak / roof.bandwidth for roof in roofs]
    low_x, high_x = _decades([point.intensity for point in points] + ridges)
    low_y, high_y = _decades([point.rate for point in points] + [roof.peak for roof in roofs])

    def across(value: float) -> float:
        return round(_LEFT + (math.log10(value) - low_x) / (high_x - low_x) * (_WIDTH - _LEFT - _RIGHT), 1)

    def down(value: float) -> float:
        return round(_HEIGHT - _BOTTOM - (math.log10(value) - low_y) / (high_y - low_y) * (_HEIGHT - _TOP - _BOTTOM), 1)

    right, bottom = _WIDTH - _RIGHT, _HEIGHT - _BOTTOM
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}">',
        f"<title>{escape(title)}</title>",
        '<g font-family="sans-serif" font-size="13" fill="#222">',
        f'<rect width="{_WIDTH}" height="{_HEIGHT}" fill="#fff"/>',
        f'<text x="{_LEFT}" y="28" font-size="16">{escape(title)}</text>',
    ]
    for power in range(low_x, high_x + 1):
        x = across(10.0**power)
        lines.append(f'<path d="M {x} {_TOP} V {bottom}" stroke="#ddd"/>')
        lines.append(f'<text x="{x}" y="{bottom + 20}" text-anchor="middle">{10.0**power:g}</text>')
    for power in range(low_y, high_y + 1):
        y = down(10.0**power)
        lines.append(f'<path d="M {_LEFT} {y} H {right}" stroke="#ddd"/>')
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 4}" text-anchor="end">{_rate(10.0**power)}</text>')
    middle = (_LEFT + right) / 2
    lines.append(f'<text x="{middle}" y="{bottom + 46}" text-anchor="middle">operations for each byte read</text>')
    centre = (_TOP + bottom) / 2
    lines.append(
        f'<text transform="translate(24 {centre}) rotate(-90)" text-anchor="middle">operations a second</text>'
    )
    for number, (roof, ridge) in enumerate(zip(roofs, ridges, strict=True)):
        # From the left edge, or from where the slope comes in at the bottom.
        start = max(10.0**low_x, 10.0**low_y / roof.bandwidth)
        path = f"M {across(start)} {down(start * roof.bandwidth)} L {across(ridge)} {down(roof.peak)} H {right}"
        lines.append(f'<path d="{path}" fill="none" stroke="#444" stroke-width="2"/>')
        lines.append(f'<text x="{right + 8}" y="{down(roof.peak) + 4 + 20 * number}">{escape(roof.name)}</text>')
    series = list(dict.fromkeys(point.series for point in points))
    lines += [
        _mark(point.kind, across(point.intensity), down(point.rate), _colour(series.index(point.series)))
        for point in points
    ]
    place = _TOP + 130
    for kind in dict.fromkeys(point.kind for point in points):
        lines.append(_mark(kind, right + 24, place - 4, "#444"))
        lines.append(f'<text x="{right + 40}" y="{place}">{kind}</text>')
        place += 24
    for number, name in enumerate(series):
        lines.append(f'<rect x="{right + 18}" y="{place - 10}" width="12" height="12" fill="{_colour(number)}"/>')
        lines.append(f'<text x="{right + 40}" y="{place}">{escape(name)}</text>')
        place += 24
    return "\n".join([*lines, "</g>", "</svg>"]) + "\n"


def _mark(kind: str, x: float, y: float, colour: str) -> str:
    style = f'fill="{colour}" fill-opacity="0.8" stroke="#fff"'
    return FORMS[kind].format(x=x, y=y, left=round(x - 5.5, 1), above=round(y - 6, 1), style=style)


def _colour(number: int) -> str:
    return _COLOURS[number % len(_COLOURS)]


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Powers of ten around all of them."""
    logarithms = [math.log10(value) for value in values]
    return math.floor(min(logarithms)), math.floor(max(logarithms)) + 1


def _rate(value: float) -> str:
    for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g} {unit}"
    return f"{value:g}"
