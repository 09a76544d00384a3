"""Tables that answer one question each; every cell is a plan of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_kv.compression import PolicyError
from sglang_kv.planner.capacity import CapacityPlan
from sglang_kv.planner.memory import Serving, token_bytes, with_kv_heads
from sglang_kv.planner.model import Latent, Model
from sglang_kv.planner.render import table, title
from sglang_kv.planner.units import PlanError, element_bytes, show_bytes, show_tokens

#: DeepSeek-V2's and V3's, for comparison: a latent of 512 and 64 rotated values.
MLA = Latent(512, 64, 0, 1)

#: Makes a plan: model, policy, tokens of the prompt.
Planner = Callable[[Model, Any, int], CapacityPlan]


@dataclass(frozen=True)
class Sweep:
    """Plans over models or policies (rows) and contexts (columns).

    A cell is a plan, or the reason why there is none.
    """

    rows: tuple[str, ...]
    contexts: tuple[int, ...]
    cells: tuple[tuple[CapacityPlan | str, ...], ...]

    def as_json(self) -> list[dict[str, Any]]:
        found = []
        for row, cells in zip(self.rows, self.cells, strict=True):
            for context, cell in zip(self.contexts, cells, strict=True):
                if isinstance(cell, str):
                    found.append({"row": row, "prompt_tokens": context, "refused": cell})
                else:
                    found.append({"row": row, **cell.as_json()})
        return found


def sweep(
    models: Sequence[Model], specs: Sequence[Any], contexts: Sequence[int], planner: Planner
) -> Sweep:
    """All combinations. Rows are models, policies, or both."""
    rows, cells = [], []
    for model in models:
        for spec in specs:
            found: list[CapacityPlan | str] = []
            for context in contexts:
                try:
                    found.append(planner(model, spec, context))
                except (PlanError, PolicyError) as error:
                    found.append(str(error))
            plans = [cell for cell in found if not isinstance(cell, str)]
            method = title(plans[0]) if plans else str(spec)
            names = [model.name] if len(models) > 1 else []
            names += [method] if len(specs) > 1 or not names else []
            rows.append(" ".join(names))
            cells.append(tuple(found))
    if not any(isinstance(cell, CapacityPlan) for row in cells for cell in row):
        raise PlanError(str(cells[0][0]))  # not one can be had: the reason, not an empty table
    return Sweep(tuple(rows), tuple(contexts), tuple(cells))


def sweep_text(found: Sweep) -> str:
    """Per-request memory, its prefill's peak, and, with a device, requests that fit."""
    plans = [cell for row in found.cells for cell in row if not isinstance(cell, str)]
    questions: dict[str, Callable[[CapacityPlan], str]] = {"per request": _steady}
    if any(plan.policy.name != "none" for plan in plans):
        questions["prefill peak"] = _peak
    if any(plan.fits is not None for plan in plans):
        questions["requests that fit"] = _fit
    if len(found.contexts) == 1:
        parts = [_one_context(found, questions)]
    else:
        parts = [_matrix(name, found, show) for name, show in questions.items()]
    refused = {cell for row in found.cells for cell in row if isinstance(cell, str)}
    parts += [f"- {reason}" for reason in sorted(refused)]
    return "\n\n".join(parts)


def _one_context(found: Sweep, questions: dict[str, Callable[[CapacityPlan], str]]) -> str:
    """All questions beside each other."""
    head = [f"{show_tokens(found.contexts[0])} tokens", *questions]
    rows = [
        [row, *("-" if isinstance(cell, str) else show(cell) for show in questions.values())]
        for row, (cell,) in zip(found.rows, found.cells, strict=True)
    ]
    return table(head, rows)


def _steady(plan: CapacityPlan) -> str:
    return show_bytes(plan.need.steady)


def _peak(plan: CapacityPlan) -> str:
    return show_bytes(plan.need.peak)


def _fit(plan: CapacityPlan) -> str:
    fits = plan.fits
    return "?" if fits is None else f"{fits.requests:,}"


def _matrix(name: str, found: Sweep, show: Callable[[CapacityPlan], str]) -> str:
    head = [name, *(f"{show_tokens(context)} tokens" for context in found.contexts)]
    rows = [
        [row, *("-" if isinstance(cell, str) else show(cell) for cell in cells)]
        for row, cells in zip(found.rows, found.cells, strict=True)
    ]
    return table(head, rows)


def outgrow(plan: CapacityPlan, counts: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)) -> str:
    """From which context on the KV of so many requests is more than the weights, uncompressed."""
    model, weights = plan.model, plan.device.weights
    if weights is None:
        raise PlanError("--weights: not known for this model, and --show outgrow needs them")
    rows, beyond = [], False
    for count in counts:
        tokens = outgrow_tokens(model, plan.serving.kv_dtype, weights, count)
        far = tokens is not None and model.context is not None and tokens > model.context
        beyond = beyond or far
        rows.append([f"{count:,}", "never" if tokens is None else f"{tokens:,}{' *' * far}"])
    lines = [table(["requests at once", "KV outgrows the weights from, tokens each"], rows), ""]
    lines.append(f"Weights: {show_bytes(weights)}. KV in {plan.serving.kv_dtype}, nothing dropped.")
    if beyond:
        lines.append(f"* beyond the model's {model.context:,} tokens")
    return "\n".join(lines)


def outgrow_tokens(model: Model, kv_dtype: str, weights: int, count: int) -> int | None:
    """Least tokens per request at which the KV of ``count`` requests exceeds the weights."""

    def exceeds(tokens: int) -> bool:
        windows = sum(
            element_bytes(layer.values, kv_dtype) * min(tokens, layer.window or tokens)
            for layer in model.sliding
        )
        grown = token_bytes(model.full + model.latent, kv_dtype) * tokens + windows
        return grown * count > weights

    low, high = 0, 2**40  # low does not exceed, high does
    if not exceeds(high):
        return None  # every layer has a window
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if exceeds(middle) else (middle, high)
    return high


def attention_kinds(model: Model, serving: Serving, contexts: Sequence[int]) -> str:
    """MHA, GQA, MQA and MLA side by side, with this model's layers, heads and head size."""
    if not model.full:
        raise PlanError(f"--show attention: {model.name} has no layer of full attention")
    full = model.full[0]
    kinds: list[tuple[str, Sequence[Any]]] = [
        (f"MHA, {full.query_heads} KV heads", with_kv_heads(model, full.query_heads).full),
        (f"GQA, {full.kv_heads} KV heads", model.full),
        ("MQA, 1 KV head", with_kv_heads(model, 1).full),
        (f"MLA, latent of {MLA.rank} + {MLA.rope}", (MLA,) * len(model.full)),
    ]
    if full.kind != "GQA":
        kinds[1] = (
            f"GQA, {max(1, full.query_heads // 8)} KV heads",
            with_kv_heads(model, max(1, full.query_heads // 8)).full,
        )
    rows = []
    for name, layers in kinds:
        token = token_bytes(layers, serving.kv_dtype)
        own = " (this model)" if tuple(layers) == model.full else ""
        rows.append([name + own, show_bytes(token), *(show_bytes(token * n) for n in contexts)])
    head = ["attention", "KV of one token", *(f"{show_tokens(n)} tokens" for n in contexts)]
    return table(head, rows)


def paging(planner: Planner, model: Model, spec: Any, contexts: Sequence[int], most: int) -> str:
    """Reserving room for ``most`` tokens per request against pages handed out as needed."""
    reserved = planner(model, spec, most)
    fits = reserved.fits
    rows = []
    for context in contexts:
        if context > most:
            raise PlanError(f"--context: {context:,} is more than the {most:,} that are reserved")
        paged = planner(model, spec, context)
        share = f"{1 - paged.need.steady / max(reserved.need.steady, 1):.0%}"
        row = [show_tokens(context), show_bytes(reserved.need.steady)]
        row += [show_bytes(paged.need.steady), share]
        if fits is not None and paged.fits is not None:
            row += [f"{fits.requests:,}", f"{paged.fits.requests:,}"]
        rows.append(row)
    head = ["tokens in use", f"reserved ({show_tokens(most)} each)", "in pages", "wasted"]
    if fits is not None:
        head += ["fit, reserved", "fit, in pages"]
    return table(head, rows)


def plot(found: Sweep, path: str) -> None:
    """Memory of one request over its context, a line per row. Needs matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise PlanError("--plot: needs matplotlib: pip install 'sglang-kv[bench]'") from None
    if Path(path).is_dir():  # where matplotlib would write a file named .png
        raise PlanError(f"--plot: {path or '.'}: is a folder")
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for i, (row, cells) in enumerate(zip(found.rows, found.cells, strict=True)):
        pairs = [(c.tokens, c.need.steady) for c in cells if not isinstance(c, str)]
        if pairs:  # hollow and of many shapes: several methods may keep as much
            shape = "osD^v<>P*X"[i % 10]
            axes.plot(*zip(*pairs, strict=True), marker=shape, markerfacecolor="none", label=row)
    axes.set_xscale("log")
    axes.set_yscale("log", base=2)
    axes.set(xlabel="tokens", ylabel="KV and state of one request")
    axes.yaxis.set_major_formatter(lambda size, _: show_bytes(size))
    axes.set_xticks(found.contexts, [show_tokens(context) for context in found.contexts])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(path, dpi=150)
    except (OSError, ValueError) as error:
        raise PlanError(f"--plot: {path}: {error}") from None
    finally:
        plt.close(figure)
