"""Plans as text: one in detail, and tables of many."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_kv.planner.capacity import CapacityPlan
from sglang_kv.planner.serve import cautions, changed_parameters, serve_command
from sglang_kv.planner.units import show_bytes, show_decimal


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table whose columns line up; the first to the left, the others to the right."""
    widths = [max(len(row[i]) for row in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        padded = [
            c.ljust(w) if i == 0 else c.rjust(w)
            for i, (c, w) in enumerate(zip(cells, widths, strict=True))
        ]
        return f"| {' | '.join(padded)} |"

    rule = [("-" * w if i == 0 else "-" * (w - 1) + ":") for i, w in enumerate(widths)]
    return "\n".join([line(head), f"| {' | '.join(rule)} |", *map(line, rows)])


def title(plan: CapacityPlan) -> str:
    """Policy and parameters as one reads them."""
    changed = changed_parameters(plan.policy)
    told = ", ".join(f"{key} {value}" for key, value in changed.items())
    return f"{plan.policy.name} ({told})" if told else plan.policy.name


def detail(plan: CapacityPlan) -> str:
    """One plan: what it takes, what the naive formula would have said, what fits, what to run."""
    model, serving, need = plan.model, plan.serving, plan.need
    new = f" + {plan.new:,} new" if plan.new else ""
    each = "on one device" if serving.tp_size == 1 else f"on each of {serving.tp_size} devices"
    lines = [
        f"{model.name}: {model.summary()}",
        f"{plan.prompt:,} tokens{new}, {_count(plan.requests)}, policy {title(plan)}, "
        f"KV in {serving.kv_dtype}, pages of {serving.page_size}",
        *(f"({note})" for note in model.notes),
        "",
    ]
    growing = len(model.full) + len(model.latent)
    rows = [("KV of one token in one layer", show_bytes(plan.layer_token_bytes), "")]
    if growing:
        where = f"in {growing} layer{'s' * (growing > 1)}"
        rows.append(("KV of one token", show_bytes(plan.token_bytes), where))
    if model.sliding:
        name, also = ("  in windows", "beside it, ") if growing else ("KV of one token", "")
        extra = f"{also}in the first {model.sliding[0].window:,} tokens"
        rows.append((name, show_bytes(plan.windowed_token_bytes), extra))
    kept = "" if plan.policy.name == "none" else f"{need.kept_tokens:,} tokens per head, mean"
    rows.append((f"KV of one request, {each}", show_bytes(need.kv), kept))
    if model.states:
        dtype = serving.state_dtype or model.state_dtype
        rows.append(
            (
                "state of one request",
                show_bytes(need.fixed),
                f"{show_bytes(need.state)} in {dtype} + {show_bytes(need.convolution)} of "
                "convolution, the same at any length",
            )
        )
    chunk = "in one piece" if serving.chunk is None else f"in chunks of {serving.chunk:,}"
    rows.append(("at its prefill's peak", show_bytes(need.peak), f"{chunk}; activations not in it"))
    if plan.requests > 1:
        rows.append((f"{plan.requests} requests, {each}", show_bytes(plan.total), ""))
    rows += _device_rows(plan)
    lines += _aligned(rows)
    lines += ["", *_naive_lines(plan), *_fit_lines(plan)]
    lines += [f"Note: {caution}." for caution in cautions(plan)]
    command = serve_command(plan)
    lines += ["", command or "No command: not one such request fits."]
    return "\n".join(lines)


def _device_rows(plan: CapacityPlan) -> list[tuple[str, str, str]]:
    device, ranks = plan.device, plan.serving.tp_size
    rows = []
    if device.weights is None:
        rows.append(("weights", "not known", "give --weights SIZE or --parameters COUNT"))
    else:
        each = f"{show_bytes(-(-device.weights // ranks))} on each device" if ranks > 1 else ""
        rows.append(("weights", show_bytes(device.weights), each or show_decimal(device.weights)))
    if device.memory is not None:
        room = device.room(ranks)
        left = "" if room is None else f"{show_bytes(room)} left for KV and states"
        rows.append(("device", show_bytes(device.memory), left))
    return rows


def _naive_lines(plan: CapacityPlan) -> list[str]:
    found = plan.naive
    lines = [f"The naive formula says {show_bytes(found.request)}: {found.formula}."]
    if not plan.reasons:
        return [*lines, "Here it is right, but for whole pages."]
    ratio = found.request / max(plan.need.kv * plan.serving.tp_size, 1)
    times = f"{ratio:.2f}".rstrip("0").rstrip(".")
    return [*lines, f"That is {times} times the true KV: {'; '.join(plan.reasons)}."]


def _fit_lines(plan: CapacityPlan) -> list[str]:
    fits = plan.fits
    if fits is None:
        return []
    lines = [f"It fits {_count(fits.requests)} at once."]
    if fits.kv_alone != fits.requests:
        lines[0] = f"It fits {_count(fits.requests)} at once, {fits.kv_alone} by KV alone."
    if fits.naive != fits.requests:
        lines[0] += f" The naive formula: {fits.naive}, and breaks at {fits.naive + 1}."
    if 1 < plan.requests > fits.requests:
        lines.append(f"Of {plan.requests}, {plan.requests - fits.requests} wait.")
    return lines


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    first, second = (max(len(row[i]) for row in rows) for i in (0, 1))
    return [f"{a.ljust(first)}  {b.rjust(second)}  {c}".rstrip() for a, b, c in rows]


def _count(requests: int) -> str:
    return "1 request" if requests == 1 else f"{requests:,} requests"
