"""Amounts as people read them: three digits and a unit."""

from __future__ import annotations

import math

NOTHING = "-"

_SMALL_S = 60


def size(value_bytes: float | None) -> str:
    """Return a number of bytes.

    >>> size(999), size(12_345), size(1_200_000_000)
    ('999 B', '12.3 kB', '1.20 GB')
    """
    if value_bytes is None:
        return NOTHING
    if abs(value_bytes) < 1000:
        return f"{value_bytes:.0f} B"
    scaled, prefix = _scaled(value_bytes)
    return f"{_three(scaled)} {prefix}B"


def count(value: float | None) -> str:
    """Return how many, whole below ten thousand.

    >>> count(9_999), count(123_456), count(20_000_000_000)
    ('9999', '123k', '20.0G')
    """
    if value is None:
        return NOTHING
    if abs(value) < 10_000:
        return f"{value:.0f}"
    scaled, prefix = _scaled(value)
    return f"{_three(scaled)}{prefix}"


def span(value_s: float | None) -> str:
    """Return a span of time.

    >>> span(0.25), span(12.4), span(75), span(3 * 3600 + 125)
    ('0.25 s', '12.4 s', '1 min 15 s', '3 h 2 min')
    """
    if value_s is None or not math.isfinite(value_s):
        return NOTHING
    if abs(value_s) < _SMALL_S - 0.05:
        return f"{value_s:.1f} s" if abs(value_s) >= 1 else f"{value_s:.2f} s"
    minutes, seconds = divmod(round(value_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    while parts and not parts[0][0]:
        parts.pop(0)
    return " ".join(f"{amount} {unit}" for amount, unit in parts[:2])


def brief(value_s: float | None) -> str:
    """Return a span of time in its largest unit.

    >>> brief(12.4), brief(75), brief(7300)
    ('12 s', '75 s', '2 h')
    """
    if value_s is None or not math.isfinite(value_s):
        return NOTHING
    for unit_s, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if abs(value_s) >= 2 * unit_s:
            return f"{value_s / unit_s:.0f} {unit}"
    return f"{value_s:.0f} s"


def share(value: float | None) -> str:
    """Return a share in percent.

    >>> share(0.0), share(0.004), share(0.123)
    ('0 %', '<1 %', '12 %')
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    return "<1 %" if 0 < value < 0.005 else f"{value:.0%}".replace("%", " %")


def loss(value: float | None) -> str:
    """Return a loss with four digits.

    >>> loss(1.93), loss(12.3456), loss(float("nan"))
    ('1.930', '12.35', 'nan')
    """
    if value is None:
        return NOTHING
    if not math.isfinite(value):
        return str(value)
    return f"{value:.3f}" if abs(value) < 10 else f"{value:.4g}"


def _scaled(value: float) -> tuple[float, str]:
    for prefix in ("k", "M", "G"):
        value /= 1000
        if abs(value) < 999.5:
            return value, prefix
    return value / 1000, "T"


def _three(value: float) -> str:
    if abs(value) >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"
