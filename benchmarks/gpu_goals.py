"""The two goals of decode on a GPU, from what `scripts/gpu_check.py` measured.

A row is a shape, ``batch`` requests of ``tokens`` tokens, with the GB/s of each path at each share
of the tokens: ``{"batch": 8, "tokens": 32768, "triton 1/1": 3500.0, "triton 1/4": 3100.0, ...}``.
"""

from __future__ import annotations

from typing import Any

#: Decode of everything is to reach this share of a device copy.
COPY_SHARE = 0.85
#: Decode of a share of the tokens may take so much longer than that share of the time says.
LONGER = 0.15


def best(row: dict[str, Any], share: int) -> float | None:
    """GB/s of the fastest of our paths at 1/`share` of the tokens; None: nobody's was measured."""
    return max((v for k, v in row.items() if k.endswith(f" 1/{share}")), default=None)


def copy_share(row: dict[str, Any], copied: float) -> float | None:
    """The share of a copy's `copied` GB/s that decode of all tokens reaches."""
    whole = best(row, 1)
    return None if whole is None else whole / copied


def over_predicted(row: dict[str, Any], share: int) -> float | None:
    """Time of decode at 1/`share` of the tokens, over what its bytes predict: the time of all
    tokens by that share. 1 is as predicted."""
    whole, part = best(row, 1), best(row, share)
    # As many bytes at each speed: the speeds' ratio is that of the times.
    return None if whole is None or part is None else whole / part


def goal_lines(row: dict[str, Any] | None, copied: float, shares: tuple[int, ...]) -> list[str]:
    """Each goal and whether it is reached, of the row that they are set for (None: it was not
    measured)."""
    if row is None:
        return ["goals: their shape was not measured"]
    shape = f"{row['batch']} x {row['tokens']}"
    reached = copy_share(row, copied)
    lines = [
        f"goal {COPY_SHARE:.0%} of the copy at {shape}: "
        + ("not measured" if reached is None else f"{_said(reached >= COPY_SHARE)}, {reached:.0%}")
    ]
    parts = {share: over_predicted(row, share) for share in shares if share != 1}
    known = {share: over for share, over in parts.items() if over is not None}
    lines.append(f"goal within {LONGER:.0%} of the time that bytes predict at {shape}: ")
    if not known or len(known) < len(parts):
        lines[-1] += "not measured"
        return lines
    good = all(over <= 1 + LONGER for over in known.values())
    lines[-1] += f"{_said(good)}, " + ", ".join(
        f"1/{share} takes {over:.2f} of it" for share, over in known.items()
    )
    return lines


def _said(good: bool) -> str:
    return "reached" if good else "missed"
