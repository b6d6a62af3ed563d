"""Numbers as people read them."""

from __future__ import annotations

_BYTE_UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"))
_COUNT_UNITS = ((1e9, "billion"), (1e6, "million"))


def of_bytes(size_bytes: float) -> str:
    """Return a size with three digits: 26.1 MB."""
    for unit_bytes, name in _BYTE_UNITS:
        if size_bytes >= unit_bytes:
            return f"{three_digits(size_bytes / unit_bytes)} {name}"
    return f"{size_bytes:.0f} bytes"


def of_count(count: float) -> str:
    """Return a count in words where it is large: 1.23 million."""
    for unit, name in _COUNT_UNITS:
        if count >= unit / 10:
            return f"{count / unit:.2f} {name}"
    return f"{count:,.0f}"


def of_seconds(duration_s: float) -> str:
    """Return a duration as a clock would say it: 4 min 17 s."""
    if duration_s < 9.95:
        return f"{duration_s:.1f} s"
    minutes, seconds = divmod(round(duration_s), 60)
    return f"{minutes} min {seconds} s" if minutes else f"{seconds} s"


def of_share(share: float) -> str:
    """Return a share in percent: 0.9 %."""
    return f"{100 * share:.1f} %"


def three_digits(value: float) -> str:
    """Return the number with three digits that count, more before the point."""
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f}"


NUMBER_WORDS = ("No", "One", "Two", "Three", "Four", "Five", "Six", "Seven", "Eight")


def of_few(count: int) -> str:
    """Return a small number as the word that begins a sentence."""
    return NUMBER_WORDS[count] if count < len(NUMBER_WORDS) else str(count)
