"""Two learning-rate curves side by side: sampled, as text for a terminal, as an SVG image.

Pure functions of two recipes; the samples hold every place where a curve bends.
"""

from __future__ import annotations

from assay.recipe.schedule import factor, floor_ratio
from assay.recipe.schema import Recipe

SAMPLES = 240
_WIDE, _HIGH = 640, 300  # of the image's plot area, in pixels
_LEFT, _TOP, _BELOW = 70, 40, 40


def rate(recipe: Recipe, update: int) -> float | None:
    """`lr` of an update, None outside of the schedule."""
    first = recipe.start.first_update
    if not first <= update < recipe.schedule.updates:
        return None
    return recipe.optimizer.lr * factor(recipe.schedule, floor_ratio(recipe), update, first)


def curves(old: Recipe, new: Recipe) -> list[tuple[int, float | None, float | None]]:
    """(update, rate before, rate after) at sampled updates of both schedules."""
    first, last = old.start.first_update, max(old.schedule.updates, new.schedule.updates) - 1
    places = {first + round((last - first) * index / SAMPLES) for index in range(SAMPLES + 1)}
    for schedule in (old.schedule, new.schedule):
        bends = (schedule.warmup, schedule.decay_at or 0, schedule.updates - 1, schedule.updates)
        places |= {place for place in bends if first <= place <= last}
    return [(place, rate(old, place), rate(new, place)) for place in sorted(places)]


def text(old: Recipe, new: Recipe, step: int, width: int = 64, height: int = 12) -> list[str]:
    """Lines of a plot: `o` the old curve, `x` the new one, `#` both; `^` below marks the present step."""
    first, last = old.start.first_update, max(old.schedule.updates, new.schedule.updates) - 1
    peak = max(value for _, *both in curves(old, new) for value in both if value is not None)
    field = [[" "] * width for _ in range(height)]
    for column in range(width):
        update = first + round((last - first) * column / max(width - 1, 1))
        for recipe, mark in ((old, "o"), (new, "x")):
            value = rate(recipe, update)
            if value is not None:
                row = height - 1 - round(value / peak * (height - 1))
                field[row][column] = mark if field[row][column] == " " else "#"
    at = round((step - first) / max(last - first, 1) * (width - 1))
    lines = [f"{peak if row == 0 else '':>10} |{''.join(field[row]).rstrip()}" for row in range(height)]
    lines.append(f"{'0':>10} +{'-' * width}")
    lines.append(" " * (12 + min(max(at, 0), width - 1)) + f"^ step {step:,}")
    lines.append(f"{'':12}{first:,}{f'{last:,}':>{width - len(f'{first:,}')}}   o before   x after   # both")
    return lines


def svg(old: Recipe, new: Recipe, step: int, title: str) -> bytes:
    """The same as an image; updates to the right, `lr` upwards, the present step as a dashed line."""
    first, last = old.start.first_update, max(old.schedule.updates, new.schedule.updates) - 1
    points = curves(old, new)
    peak = max(value for _, *both in points for value in both if value is not None)

    def x(update: int) -> float:
        return _LEFT + _WIDE * (update - first) / max(last - first, 1)

    def y(value: float) -> float:
        return _TOP + _HIGH * (1 - value / peak)

    def line(which: int) -> str:
        pairs = ((point[0], point[which]) for point in points)
        return " ".join(f"{x(update):.1f},{y(value):.1f}" for update, value in pairs if value is not None)

    bottom, right, now = _TOP + _HIGH, _LEFT + _WIDE, x(step)
    words = title.replace("&", "&amp;").replace("<", "&lt;")
    before, after = old.schedule.updates, new.schedule.updates
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{right + 30}" height="{bottom + _BELOW + 30}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="100%" height="100%" fill="white"/><text x="{_LEFT}" y="22" font-size="14">{words}</text>',
        f'<path d="M{_LEFT} {_TOP}V{bottom}H{right}" fill="none" stroke="black"/>',
        f'<text x="{_LEFT - 6}" y="{_TOP + 4}" text-anchor="end">{peak:g}</text>',
        f'<text x="{_LEFT - 6}" y="{bottom + 4}" text-anchor="end">0</text>',
        f'<text x="{_LEFT}" y="{bottom + 18}">update {first:,}</text>',
        f'<text x="{right}" y="{bottom + 18}" text-anchor="end">{last:,}</text>',
        f'<polyline points="{line(1)}" fill="none" stroke="#888888" stroke-width="5"/>',
        f'<polyline points="{line(2)}" fill="none" stroke="#0b57d0" stroke-width="2"/>',
        f'<path d="M{now:.1f} {_TOP}V{bottom}" stroke="#c5221f" stroke-dasharray="4 4"/>',
        f'<text x="{_LEFT}" y="{bottom + 44}"><tspan fill="#888888">before: {before:,} updates</tspan>   '
        f'<tspan fill="#0b57d0">after: {after:,} updates</tspan>   <tspan fill="#c5221f">step {step:,}</tspan></text>',
        "</svg>",
    ]
    return ("\n".join(parts) + "\n").encode()
