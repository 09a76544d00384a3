"""Sizes, token counts and dtypes: as people write them, and as they are printed.

Memory is counted in bytes. ``GB`` is 10^9 bytes, as on data sheets and for weights; ``GiB`` is
2^30, as drivers and this planner print it. ``G`` alone could be either, and is refused.
"""

from __future__ import annotations

import re
from fractions import Fraction

#: More than any of these is a slip of the keyboard.
MOST_TOKENS = 2**31 - 1
MOST_BYTES = 2**60
#: Longer than any number that is meant: Python refuses to read what is much longer.
_MOST_DIGITS = 40

_BINARY = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
_DECIMAL = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
SIZE_UNITS = {**_DECIMAL, **_BINARY}

#: Bytes per element. ``fp4`` is 4 bits and one byte of scale for each 16 elements, as SGLang's
#: ``fp4_e2m1`` cache keeps it; ``fp8`` and ``int8`` have scales per tensor, which cost nothing.
DTYPES = {
    "fp32": Fraction(4),
    "bf16": Fraction(2),
    "fp16": Fraction(2),
    "fp8": Fraction(1),
    "int8": Fraction(1),
    "fp4": Fraction(9, 16),
}
KV_DTYPES = ("bf16", "fp16", "fp8", "int8", "fp4")
STATE_DTYPES = ("fp32", "bf16", "fp16")
_LONG_NAMES = {
    "float32": "fp32",
    "float": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "half": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
}

#: Bytes of memory, as on the data sheet and read as 10^9: a driver reports a little more.
DEVICES = {
    "t4": 16 * 10**9,
    "l4": 24 * 10**9,
    "a10g": 24 * 10**9,
    "rtx-4090": 24 * 10**9,
    "a100-40gb": 40 * 10**9,
    "l40s": 48 * 10**9,
    "a100-80gb": 80 * 10**9,
    "h100": 80 * 10**9,
    "h200": 141 * 10**9,
    "b200": 180 * 10**9,
    "mi300x": 192 * 10**9,
    "mi325x": 256 * 10**9,
}


class PlanError(ValueError):
    """A plan that cannot be made. The message is one line and starts with the parameter."""


def parse_size(text: str, flag: str) -> int:
    """``54GB``, ``80GiB``, ``512 MiB`` in bytes.

    Raises:
        PlanError: no number, no unit or an unknown one, negative, or absurdly large.
    """
    match = re.fullmatch(r"\s*([-+]?\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or len(match[1]) > _MOST_DIGITS:
        raise PlanError(f"{flag}: expected a size such as 54GB or 80GiB, got {text[:40]!r}")
    number, unit = Fraction(match[1]), match[2]
    by_case = {name.lower(): size for name, size in SIZE_UNITS.items()}
    if unit.lower() not in by_case:
        known = ", ".join(SIZE_UNITS)
        what = f"unknown unit {unit!r}" if unit else "no unit"
        hint = " (GB is 10^9 bytes, GiB is 2^30)" if unit.lower() in ("g", "") else ""
        raise PlanError(f"{flag}: {what} in {text[:40]!r}; write one of {known}{hint}")
    size = int(number * by_case[unit.lower()])
    if size < 0:
        raise PlanError(f"{flag}: must not be negative, got {text[:40]!r}")
    if size > MOST_BYTES:
        raise PlanError(f"{flag}: {text[:40]!r} is more than any machine has")
    return size


def parse_device(text: str, flag: str = "--device") -> int:
    """A device's name or its memory, in bytes."""
    if text.lower() in DEVICES:
        return DEVICES[text.lower()]
    if re.match(r"\s*[-+]?\d", text) is None:
        raise PlanError(
            f"{flag}: unknown device {text[:40]!r}; write its memory (80GB), or one of "
            f"{', '.join(DEVICES)}"
        )
    size = parse_size(text, flag)
    if size == 0:
        raise PlanError(f"{flag}: a device needs memory, got {text!r}")
    return size


def parse_tokens(text: str, flag: str) -> int:
    """``262144``, ``128k`` or ``1m`` as a number of tokens; k is 1,024, m is 1,048,576."""
    match = re.fullmatch(r"\s*([-+]?\d[\d_,]*(?:\.\d+)?)\s*([kKmM]?)\s*", text)
    if match is None or len(match[1]) > _MOST_DIGITS:
        raise PlanError(f"{flag}: expected tokens such as 4096 or 128k, got {text[:40]!r}")
    scale = {"": 1, "k": 2**10, "m": 2**20}[match[2].lower()]
    tokens = Fraction(match[1].replace("_", "").replace(",", "")) * scale
    if tokens.denominator != 1:
        raise PlanError(f"{flag}: {text[:40]!r} is not a whole number of tokens")
    return int(tokens)


def parse_parameters(text: str, flag: str) -> int:
    """``27B``, ``135M`` or a plain number, as a count of parameters."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kKmMbBtT]?)\s*", text)
    if match is None or len(match[1]) > _MOST_DIGITS or Fraction(match[1]) == 0:
        raise PlanError(f"{flag}: expected parameters such as 27B or 135M, got {text[:40]!r}")
    scale = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}[match[2].lower()]
    count = int(Fraction(match[1]) * scale)
    if not 0 < count <= MOST_BYTES // 4:
        raise PlanError(f"{flag}: {text[:40]!r} is no model's number of parameters")
    return count


def check_count(flag: str, value: int, least: int = 1, most: int = MOST_TOKENS) -> int:
    """``value``, or `PlanError` unless it lies between ``least`` and ``most``."""
    if value < least:
        raise PlanError(f"{flag}: must be at least {least}, got {value}")
    if value > most:
        raise PlanError(f"{flag}: must be at most {most:,}, got {value}")
    return value


def parse_dtype(text: str, flag: str, known: tuple[str, ...]) -> str:
    """A dtype's short name, from it or from torch's (``bfloat16``)."""
    name = text.removeprefix("torch.").lower()
    name = _LONG_NAMES.get(name, name)
    if name.startswith("fp8_"):  # SGLang's fp8_e4m3 and fp8_e5m2
        name = "fp8"
    if name.startswith("fp4_"):
        name = "fp4"
    if name not in known:
        raise PlanError(f"{flag}: unknown dtype {text[:40]!r} (known: {', '.join(known)})")
    return name


def element_bytes(elements: int, dtype: str) -> int:
    """Bytes of so many elements, scales included, rounded up."""
    return -int(-elements * DTYPES[dtype] // 1)


def show_bytes(size: int | float) -> str:
    """``16 GiB``, ``68.62 KiB``: binary units, at most two decimals."""
    for unit, scale in reversed(_BINARY.items()):
        if abs(size) >= scale:
            return f"{_short(size / scale)} {unit}"
    return f"{_short(size)} B"


def show_decimal(size: int | float) -> str:
    """``54 GB``: decimal units, for what data sheets and model cards count in them."""
    for unit, scale in reversed(_DECIMAL.items()):
        if abs(size) >= scale:
            return f"{_short(size / scale)} {unit}"
    return "0 B"


def show_tokens(tokens: int) -> str:
    """``128K`` where it is whole, else ``4,000``."""
    for unit, scale in (("M", 2**20), ("K", 2**10)):
        if tokens >= scale and tokens % scale == 0:
            return f"{tokens // scale}{unit}"
    return f"{tokens:,}"


def _short(number: float) -> str:
    text = f"{number:,.2f}"
    return text.rstrip("0").rstrip(".")
