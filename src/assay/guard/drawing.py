"""Simulated policies as an SVG image: useful hours over time, and what each did when.

A pure function of outcomes; colours tell training, starting and waiting apart, and each strip names its policy.
"""

from __future__ import annotations

from collections.abc import Sequence
from decimal import Decimal

from assay.guard.decision import SECONDS_PER_HOUR, exact_seconds
from assay.guard.simulator import Outcome

_WIDE, _HIGH = 720, 260  # of the plot, in pixels
_LEFT, _TOP, _STRIP = 90, 40, 34
_LINES = ("#0b57d0", "#c5221f", "#188038", "#e37400", "#9334e6", "#5f6368")
_PIECES = {"train": "#188038", "start": "#e37400"}


def svg(outcomes: Sequence[Outcome], title: str) -> bytes:
    """The image: time to the right, useful hours upwards, a strip for each policy below; one time span for all."""
    begin, end = min(one.begin for one in outcomes), max(one.end for one in outcomes)
    whole = exact_seconds(begin, end)
    most = max(max(one.useful for one in outcomes), Decimal(SECONDS_PER_HOUR))
    bottom, right = _TOP + _HIGH, _LEFT + _WIDE
    high = bottom + 50 + _STRIP * len(outcomes) + 40

    def x(seconds: Decimal) -> str:
        return f"{_LEFT + _WIDE * float(seconds / whole):.1f}"

    def y(useful: Decimal) -> str:
        return f"{bottom - _HIGH * float(useful / most):.1f}"

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right + 30}" height="{high}" font-family="sans-serif" '
        'font-size="12">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="{_LEFT}" y="22" font-size="14">{_words(title)}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end">{most / SECONDS_PER_HOUR:,.0f} h</text>',
        f'<text x="{_LEFT - 6}" y="{bottom + 4}" text-anchor="end">0</text>',
        f'<text x="{_LEFT}" y="{bottom + 16}">{begin:%Y-%m-%d %H:%M} UTC</text>',
        f'<text x="{right}" y="{bottom + 16}" text-anchor="end">{end:%Y-%m-%d %H:%M} UTC</text>',
    ]
    for number, one in enumerate(outcomes):
        colour, useful = _LINES[number % len(_LINES)], Decimal(0)
        line = [f"{x(Decimal(0))},{y(useful)}"]
        top = bottom + 50 + _STRIP * number
        per_hour = one.usd_per_useful_hour
        price = "never trained" if per_hour is None else f"{per_hour:.3f} dollars a useful hour"
        text = f"{one.policy}: {one.useful / SECONDS_PER_HOUR:,.1f} useful hours, {one.spent:,.2f} dollars, {price}"
        parts.append(f'<text x="{_LEFT}" y="{top - 4}" fill="{colour}">{_words(text)}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{_WIDE}" height="10" fill="#dadce0"/>')
        for piece in one.pieces:
            since, until = exact_seconds(begin, piece.begin), exact_seconds(begin, piece.end)
            wide = f"{_WIDE * float((until - since) / whole):.1f}"
            parts.append(f'<rect x="{x(since)}" y="{top}" width="{wide}" height="10" fill="{_PIECES[piece.kind]}"/>')
            if piece.kind == "train":
                line.append(f"{x(since)},{y(useful)}")
                useful += until - since
                line.append(f"{x(until)},{y(useful)}")
        line.append(f"{x(whole)},{y(useful)}")
        parts.append(f'<polyline points="{" ".join(line)}" fill="none" stroke="{colour}" stroke-width="2"/>')
    parts.append(
        f'<text x="{_LEFT}" y="{high - 10}"><tspan fill="{_PIECES["train"]}">training</tspan>   '
        f'<tspan fill="{_PIECES["start"]}">starting, paid</tspan>   '
        '<tspan fill="#80868b">waiting, not paid</tspan></text>'
    )
    return ("\n".join([*parts, "</svg>"]) + "\n").encode()


def _words(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;")
