"""What one request makes a model keep: caches that grow with its tokens, and fixed states."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from sglang_kv.planner.units import PlanError


@dataclass(frozen=True)
class Attention:
    """A layer that keeps keys and values.

    Args:
        kv_heads: heads of K and V, over all devices.
        head_dim: elements of a key.
        value_dim: elements of a value.
        query_heads: heads of Q; groups of them share a KV head.
        window: newest tokens that it looks at; None: all.
    """

    kv_heads: int
    head_dim: int
    value_dim: int
    query_heads: int
    window: int | None = None

    @property
    def values(self) -> int:
        """Elements per token, K and V of all heads."""
        return self.kv_heads * (self.head_dim + self.value_dim)

    @property
    def kind(self) -> str:
        if self.kv_heads == self.query_heads:
            return "MHA"
        return "MQA" if self.kv_heads == 1 else "GQA"


@dataclass(frozen=True)
class Latent:
    """A layer with multi-head latent attention (MLA): one compressed vector per token.

    It stands for K and V of all heads together, so it is counted once, and every rank of a
    tensor-parallel group holds it. ``plain`` is what multi-head attention would keep in its place,
    elements per token. ``query_heads`` are split over the group all the same.
    """

    rank: int
    rope: int
    plain: int
    query_heads: int

    @property
    def values(self) -> int:
        return self.rank + self.rope


@dataclass(frozen=True)
class State:
    """A recurrent layer: a matrix per head, and the last inputs of its short convolution.

    Args:
        heads: heads of the state, split over devices.
        head_values: elements of one head's state.
        inner: channels of the convolution that are split with the heads.
        groups: groups whose channels are split with the heads, or held by all where there are
            fewer groups than devices.
        group_values: channels of a group.
        steps: inputs that the convolution remembers: its kernel's width less one.
    """

    heads: int
    head_values: int
    inner: int
    groups: int
    group_values: int
    steps: int

    def matrix(self, tp_size: int) -> int:
        """Elements of the state on one device."""
        return shard("state heads", self.heads, tp_size) * self.head_values

    def convolution(self, tp_size: int) -> int:
        """Elements that the convolution remembers, on one device."""
        grouped = shard_or_copy("state groups", self.groups, tp_size) * self.group_values
        return (shard("state channels", self.inner, tp_size) + grouped) * self.steps


@dataclass(frozen=True)
class Model:
    """A model as far as its memory goes.

    ``caches`` has one entry per layer that keeps something per token, in order; ``states`` one per
    recurrent layer. ``parameters`` is None where neither config nor catalogue say how many there
    are. ``dtype`` is the checkpoint's; ``notes`` are for the reader of the plan.
    """

    name: str
    model_type: str
    num_layers: int
    caches: tuple[Attention | Latent, ...]
    states: tuple[State, ...]
    dtype: str
    state_dtype: str
    context: int | None = None
    parameters: int | None = None
    weight_dtype: str | None = None
    notes: tuple[str, ...] = ()
    path: str = ""
    source: str = ""

    @property
    def full(self) -> tuple[Attention, ...]:
        """Layers that keep every token's K and V."""
        return tuple(c for c in self.caches if isinstance(c, Attention) and c.window is None)

    @property
    def sliding(self) -> tuple[Attention, ...]:
        return tuple(c for c in self.caches if isinstance(c, Attention) and c.window is not None)

    @property
    def latent(self) -> tuple[Latent, ...]:
        return tuple(c for c in self.caches if isinstance(c, Latent))

    def summary(self) -> str:
        """The layers in one line."""
        parts = []
        if self.full:
            one = self.full[0]
            parts.append(f"{len(self.full)} full attention ({_heads(one)})")
        if self.sliding:
            one = self.sliding[0]
            parts.append(f"{len(self.sliding)} with a window of {one.window:,} ({_heads(one)})")
        if self.latent:
            latent = self.latent[0]
            parts.append(f"{len(self.latent)} MLA (latent of {latent.rank} + {latent.rope})")
        if self.states:
            parts.append(f"{len(self.states)} recurrent")
        return f"{self.num_layers} layers: {', '.join(parts) or 'none that keeps anything'}"


Kind = Literal["full", "sliding", "chunked", "linear", "mamba", "both", "none"]


def _heads(layer: Attention) -> str:
    dims = f"{layer.head_dim}"
    if layer.value_dim != layer.head_dim:
        dims += f"/{layer.value_dim}"
    return f"{layer.kind}, {layer.kv_heads} KV heads x {dims}"


def shard(what: str, count: int, tp_size: int) -> int:
    """Of ``count`` things that are split over ``tp_size`` devices, how many each holds."""
    if count % tp_size:
        raise PlanError(f"--tp-size: {count} {what} cannot be split over {tp_size} devices")
    return count // tp_size


def shard_or_copy(what: str, count: int, tp_size: int) -> int:
    """As `shard`; where devices outnumber the things, neighbours hold the same one."""
    if count == 0:
        return 0
    if tp_size > count:
        if tp_size % count:
            raise PlanError(f"--tp-size: {tp_size} devices cannot share {count} {what} evenly")
        return 1
    return shard(what, count, tp_size)
