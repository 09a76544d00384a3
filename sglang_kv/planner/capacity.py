"""One capacity plan: what a model, a policy and so many requests take, and how many fit."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from sglang_kv.compression import Compressor, parse_policy
from sglang_kv.compression.gates import HeadGates
from sglang_kv.planner.memory import (
    Need,
    Serving,
    assumed_gates,
    check_compressible,
    model_gates,
    request_need,
    requests_at_once,
    token_bytes,
)
from sglang_kv.planner.model import Attention, Model
from sglang_kv.planner.naive import Naive, naive
from sglang_kv.planner.serve import cautions, serve_command
from sglang_kv.planner.units import PlanError, check_count, element_bytes, show_decimal

#: The method whose sums depend on how many heads stream, not on which.
ASSUMABLE = "duoattention"


@dataclass(frozen=True)
class Device:
    """Memory of one device, in bytes, and what of it is not for KV.

    Args:
        memory: all of it.
        weights: of the whole model, split evenly over a tensor-parallel group; None: not known.
        reserve: for activations, CUDA graphs and whatever else runs there.
    """

    memory: int | None = None
    weights: int | None = None
    reserve: int = 0

    def room(self, tp_size: int) -> int | None:
        """Bytes for KV and states; None where memory or weights are not known.

        Raises:
            PlanError: the weights alone do not fit.
        """
        if self.memory is None or self.weights is None:
            return None
        room = self.memory - -(-self.weights // tp_size) - self.reserve
        if room < 0:
            raise PlanError(
                f"--device: {show_decimal(self.memory)} do not hold the weights "
                f"({show_decimal(-(-self.weights // tp_size))} on each) and the reserve "
                f"({show_decimal(self.reserve)}); use more devices (--tp-size) or a smaller "
                "--weight-dtype"
            )
        return room


@dataclass(frozen=True)
class Fits:
    """Requests that fit, by three ways of counting; the first is the true one."""

    requests: int
    kv_alone: int
    naive: int


@dataclass(frozen=True)
class CapacityPlan:
    """All that a plan says. Bytes are per device, but for ``naive`` and what a token takes."""

    model: Model
    policy: Compressor
    serving: Serving
    device: Device
    prompt: int
    new: int
    requests: int
    need: Need
    naive: Naive
    assumed: bool = False

    @property
    def tokens(self) -> int:
        return self.prompt + self.new

    @property
    def layer_token_bytes(self) -> int:
        """K and V of one token in one layer."""
        layers = self.model.full or self.model.latent or self.model.sliding
        return element_bytes(layers[0].values, self.serving.kv_dtype)

    @property
    def token_bytes(self) -> int:
        """What one more token takes once every window is full, in the whole model."""
        return token_bytes(self.model.full + self.model.latent, self.serving.kv_dtype)

    @property
    def windowed_token_bytes(self) -> int:
        """What it takes beside that until the windows are full."""
        return token_bytes(self.model.sliding, self.serving.kv_dtype)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the naive figure is not what all devices together hold."""
        found, ranks = list(self.naive.reasons), self.serving.tp_size
        if self.need.kept_tokens < self.tokens:
            found.append(f"{self.policy.name} keeps {self.need.kept_tokens:,} tokens per head")
        if ranks > 1 and self.model.latent:
            found.append(f"all {ranks} devices hold the latent")
        heads = next((c for c in self.model.caches if isinstance(c, Attention)), None)
        if heads is not None and ranks > heads.kv_heads:
            found.append(f"{ranks} devices hold copies of {heads.kv_heads} KV heads")
        return tuple(found)

    @property
    def total(self) -> int:
        """All requests on one device, one of them at its prefill's peak."""
        return (self.requests - 1) * self.need.steady + max(self.need.peak, self.need.steady)

    @property
    def fits(self) -> Fits | None:
        room = self.device.room(self.serving.tp_size)
        if room is None:
            return None
        need = self.need
        kv = max(need.kv, 1)
        ranks = self.serving.tp_size
        return Fits(
            requests=requests_at_once(room, max(need.steady, 1), need.peak),
            kv_alone=requests_at_once(room, kv, need.kv_peak),
            naive=room * ranks // max(self.naive.request, 1),
        )

    def as_json(self) -> dict[str, Any]:
        """Everything, for machines; sizes in bytes."""
        fits = self.fits
        return {
            "model": self.model.name,
            "model_type": self.model.model_type,
            "source": self.model.source,
            "layers": {
                "all": self.model.num_layers,
                "full_attention": len(self.model.full),
                "sliding_window": len(self.model.sliding),
                "mla": len(self.model.latent),
                "recurrent": len(self.model.states),
            },
            "policy": {"method": self.policy.name, **self.policy.parameters},
            "gates_assumed": self.assumed,
            "serving": asdict(self.serving),
            "prompt_tokens": self.prompt,
            "new_tokens": self.new,
            "requests": self.requests,
            "bytes_per_token_and_layer": self.layer_token_bytes,
            "bytes_per_token": self.token_bytes,
            "bytes_per_token_until_windows_are_full": self.windowed_token_bytes,
            "per_request": {
                "kv": self.need.kv,
                "state": self.need.state,
                "convolution": self.need.convolution,
                "steady": self.need.steady,
                "prefill_peak": self.need.peak,
                "head_pages": self.need.pages,
                "head_pages_at_peak": self.need.peak_pages,
                "kept_tokens": self.need.kept_tokens,
            },
            "naive": {
                "bytes_per_token": self.naive.token,
                "per_request": self.naive.request,
                "formula": self.naive.formula,
                "differs_because": list(self.reasons),
            },
            "weights": self.device.weights,
            "device": self.device.memory,
            "reserve": self.device.reserve,
            "all_requests": self.total,
            "fits": None if fits is None else asdict(fits),
            "serve": serve_command(self),
            "cautions": cautions(self),
        }


def make_plan(
    model: Model,
    spec: Any,
    serving: Serving,
    device: Device,
    *,
    prompt: int,
    new: int = 0,
    requests: int = 1,
    gates: HeadGates | None = None,
    sparsity: float | None = None,
) -> CapacityPlan:
    """A plan for ``requests`` alike.

    Args:
        spec: the policy, as a client writes it.
        gates: the model's head gates; None: those that come with the package.
        sparsity: assume that so many of the heads stream (DuoAttention), without gates.

    Raises:
        PlanError: it cannot be made; also `PolicyError`, from the policy.
    """
    check_count("--requests", requests)
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise PlanError(f"--assume-sparsity: must be between 0 and 1, got {sparsity}")
    gates = gates or model_gates(model)
    policy = parse_policy(spec)
    check_compressible(model, policy)
    assumed = False
    if _wants_gates(policy) and gates is None:
        if sparsity is None or policy.name != ASSUMABLE:
            other = "; or plan with --assume-sparsity SHARE" if policy.name == ASSUMABLE else ""
            raise PlanError(
                f"--method {policy.name}: needs head gates, and none are known for {model.name}; "
                "make them with `sglang-kv calibrate` or take a published pattern, and give "
                f"--gates FILE{other}"
            )
        if policy.parameters["threshold"] is not None:
            raise PlanError("--assume-sparsity: stands in place of gates, which threshold needs")
        policy = replace(policy, sparsity=sparsity)  # type: ignore[call-arg]
        gates, assumed = assumed_gates(model), True
    need = request_need(model, policy, serving, prompt, new, gates)
    return CapacityPlan(
        model=model,
        policy=policy,
        serving=serving,
        device=device,
        prompt=prompt,
        new=new,
        requests=requests,
        need=need,
        naive=naive(model, serving.kv_dtype, prompt + new),
        assumed=assumed,
    )


def _wants_gates(policy: Compressor) -> bool:
    return policy.needs_gates or policy.parameters.get("head_budgets") == "gates"
