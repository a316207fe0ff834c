"""Sizes, times and texts as people write them."""

from __future__ import annotations

from argparse import ArgumentTypeError

_UNITS = {"": 0, "K": 1, "M": 2, "G": 3, "T": 4}
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}


def size(text: str) -> int:
    """Bytes from text such as "500M", "1.5GB" (powers of 1000) or "4GiB" (powers of 1024).

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    digits = text.strip().upper()
    base = 1024 if digits.endswith("IB") else 1000
    digits = digits.removesuffix("IB") if base == 1024 else digits.removesuffix("B")
    unit = digits[-1:] if digits[-1:] in _UNITS else ""
    try:
        value = float(digits.removesuffix(unit))
    except ValueError:
        value = -1
    if not 0 <= value < 1e18:
        raise ArgumentTypeError(f"{text!r} is not a size like 500MB, 4GiB or 1000000")
    return int(value * base ** _UNITS[unit])


def duration(text: str) -> float:
    """Seconds from text such as "90s", "45m", "12h", "30d" or "2w".

    Raises:
        argparse.ArgumentTypeError: it is none of these.
    """
    digits = text.strip().lower()
    factor = _SECONDS.get(digits[-1:], 0)
    try:
        value = float(digits[:-1]) * factor
    except ValueError:
        value = 0
    if not 0 < value < 1e11:
        raise ArgumentTypeError(f"{text!r} is not a time like 90s, 45m, 12h, 30d or 2w")
    return value


def share(text: str) -> float:
    """A number from 0 to 1, as text.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        value = float(text)
    except ValueError:
        value = -1
    if not 0 <= value <= 1:
        raise ArgumentTypeError(f"{text!r} is not a share like 0.5, from 0 to 1")
    return value


def unicode_text(text: str) -> str:
    """Text as it is, of which bytes can be made: the shell may pass on what is no text.

    Raises:
        argparse.ArgumentTypeError: it is none.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        raise ArgumentTypeError(f"{text!r} is no UTF-8 text") from None
    return text


def bytes_text(n: float) -> str:
    """A number of bytes for people, in powers of 1000."""
    for unit in ("B", "KB", "MB", "GB"):
        if n < 1000:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1000
    return f"{n:.1f} TB"


def age_text(seconds: float) -> str:
    """How long ago something was, for people: "just now", "45s ago", "3h ago", "12d ago"."""
    return "just now" if seconds < 10 else f"{_span_text(seconds)} ago"


def left_text(seconds: float) -> str:
    """How long it takes until something expires, for people: "expires in 3h"."""
    return "expired" if seconds <= 0 else f"expires in {_span_text(seconds)}"


def _span_text(seconds: float) -> str:
    for unit, least in (("w", 14 * 86400), ("d", 2 * 86400), ("h", 2 * 3600), ("m", 2 * 60)):
        if seconds >= least:
            return f"{seconds // _SECONDS[unit]:.0f}{unit}"
    return f"{seconds:.0f}s"
