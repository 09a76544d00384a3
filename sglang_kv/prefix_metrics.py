"""The prefix tree on `/metrics`: hits by policy, what was given up and why, importance."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from sglang_kv import runtime

if TYPE_CHECKING:
    from sglang_kv.state import PrefixStats


class PrefixExporter:
    """Part of `metrics.LedgerExporter`, whose ``gauge`` and ``counter`` make metrics."""

    def __init__(
        self, gauge: Callable[..., Any], counter: Callable[..., Any], labels: dict[str, str]
    ) -> None:
        self.labels = labels
        self.hits = counter(
            "prefix_hit_tokens_total",
            "Prompt tokens that came from the prefix tree, by KV policy.",
            "policy",
        )
        self.prompts = counter(
            "prefix_prompt_tokens_total", "Prompt tokens that were looked up there.", "policy"
        )
        self.given_up = counter(
            "prefix_evicted_tokens_total",
            "Tokens of prefixes that lost memory: in which step (thin, empty, remove, snapshot) "
            "and why (memory, ids, flush; superseded: a session has gone on).",
            "step",
            "reason",
        )
        self.importance = gauge(
            "prefix_tokens_by_importance",
            "Cached tokens whose importance is at most so many times a prompt's mean; cumulative.",
            "le",
        )

    def export(self, now: PrefixStats | None, before: PrefixStats | None) -> None:
        """``before`` is the reading that was exported last."""
        if now is None:
            return
        for metric, counts, counted in (
            (self.hits, now.hit_tokens, before.hit_tokens if before else {}),
            (self.prompts, now.prompt_tokens, before.prompt_tokens if before else {}),
        ):
            for policy, count in counts.items():
                metric.labels(**self.labels, policy=policy).inc(count - counted.get(policy, 0))
        for name, tokens in now.given_up.items():
            step, _, reason = name.partition("/")
            new = tokens - (before.given_up.get(name, 0) if before else 0)
            self.given_up.labels(**self.labels, step=step, reason=reason).inc(new)
        up_to = 0
        for bound, tokens in now.importance.items():  # in order of bounds
            up_to += tokens
            self.importance.labels(**self.labels, le=bound).set(up_to)


def tree_in_internal_state(_: None, _controller: Any, state: dict[str, Any]) -> None:
    """``/server_info`` shows the tree; `radix.dump` prints it."""
    current = runtime.current()
    if current is not None and current.ledger.tree is not None:
        state["prefix_tree"] = current.ledger.tree.dump()


HOOKS: list[tuple[str, Callable[..., Any], str]] = [
    (
        "sglang.srt.managers.scheduler_components.internal_state.SchedulerInternalStateController."
        "_add_memory_usage",
        tree_in_internal_state,
        "AFTER",
    ),
]
