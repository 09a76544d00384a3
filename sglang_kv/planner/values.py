"""Values of the flags of ``sglang-kv plan``. Each raises `PlanError`, which names the flag."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from sglang_kv.compression import PolicyError
from sglang_kv.compression.gates import HeadGates, load_gates
from sglang_kv.planner.units import PlanError, check_count, parse_tokens


def gates_file(path: str) -> HeadGates:
    """As the server reads them, under this command's name for the flag."""
    if not path:
        raise PlanError("--gates: expected a file")
    try:
        return load_gates(path)
    except PolicyError as error:
        raise PlanError(str(error).replace("--kv-gates", "--gates", 1)) from None


def parts(text: str, flag: str) -> list[str]:
    """Items between commas."""
    found = [part.strip() for part in text.split(",")]
    if not all(found):
        raise PlanError(f"{flag}: an empty item in {text[:40]!r}")
    return found


def token_list(text: str, flag: str) -> list[int]:
    """``8k,32k``. A comma may also separate thousands: what could be read both ways is refused."""
    if re.fullmatch(r"\s*\d{1,3}(,\d{3})+\s*", text):
        plain, spaced = text.strip().replace(",", ""), text.strip().replace(",", ", ")
        raise PlanError(
            f"{flag}: {text[:40]!r} is one number or several; write {plain[:40]}, or "
            f"{spaced[:40]!r} with spaces"
        )
    return [tokens(part, flag) for part in parts(text, flag)]


def tokens(text: str, flag: str, least: int = 1) -> int:
    """As `parse_tokens`, and at least ``least``."""
    return check_count(flag, parse_tokens(text, flag), least)


def whole_number(text: str, flag: str) -> int:
    """A number without a unit."""
    try:
        return int(text)
    except ValueError:
        raise PlanError(f"{flag}: expected a whole number, got {text[:40]!r}") from None


def share(text: str | None, flag: str) -> float | None:
    """Between 0 and 1; None where the flag is not there."""
    if text is None:
        return None
    try:
        found = float(text)
    except ValueError:
        raise PlanError(f"{flag}: expected a share such as 0.5, got {text[:40]!r}") from None
    if not 0 <= found <= 1:  # NaN, too
        raise PlanError(f"{flag}: must be between 0 and 1, got {text[:40]!r}")
    return found


def text_or_file(value: str) -> str:
    """A flag's value, or what ``@FILE`` holds."""
    if not value.startswith("@"):
        return value
    try:
        return Path(value[1:]).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "not text"
        raise PlanError(f"--method-config: {value[1:]}: {reason}") from None


def json_object(text: str, flag: str) -> dict[str, Any]:
    """What ``{...}`` holds."""
    try:
        held = json.loads(text)
    except ValueError as error:
        raise PlanError(f"{flag}: not JSON: {error}") from None
    except RecursionError:
        raise PlanError(f"{flag}: not JSON: nested too deeply") from None
    if not isinstance(held, dict):
        raise PlanError(f"{flag}: expected a JSON object")
    return held
