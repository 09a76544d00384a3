"""The worked example of a hybrid: every number of it, and the mistake that it warns of.

64 layers, 4 KV heads of 256, bf16, 262,144 tokens; 48 layers are Gated DeltaNet with 48 value heads
of 128 x 128 in fp32; 54 GB of weights on a device of 192 GB.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from sglang_kv.compression.gates import HeadGates
from sglang_kv.planner.capacity import CapacityPlan, Device, make_plan
from sglang_kv.planner.command import output
from sglang_kv.planner.find import find_model
from sglang_kv.planner.memory import Serving, weight_bytes
from sglang_kv.planner.units import PlanError, parse_device, parse_size

KIB, MIB, GIB, GB = 2**10, 2**20, 2**30, 10**9
FULL = 262_144


def plan(model: str, prompt: int, device: Device | None = None, **options: Any) -> CapacityPlan:
    serving = options.pop("serving", Serving())
    spec = options.pop("spec", "none")
    device = device or Device()
    return make_plan(find_model(model), spec, serving, device, prompt=prompt, **options)


def hybrid(memory: int = 192 * GB, weights: int = 54 * GB, **options: Any) -> CapacityPlan:
    return plan("qwen3.8-27b", FULL, Device(memory, weights), **options)


def test_bytes_per_token() -> None:
    found = hybrid()
    assert found.layer_token_bytes == 4 * KIB
    assert found.token_bytes == 64 * KIB
    assert found.need.kv == 16 * GIB
    assert len(found.model.full) == 16
    assert len(found.model.states) == 48


def test_the_naive_figure_is_named_as_the_mistake() -> None:
    found = hybrid()
    assert found.naive.token == 256 * KIB
    assert found.naive.request == 64 * GIB
    (reason,) = found.reasons
    assert reason == "48 of 64 layers are recurrent: a fixed state, nothing per token"
    text = output("qwen3.8-27b", "--device", "192GB")
    assert "The naive formula says 64 GiB: 2 x 64 layers x 4 x 256 x 262,144 tokens" in text
    assert "That is 4 times the true KV: 48 of 64 layers are recurrent" in text


def test_the_state() -> None:
    """3 MiB per layer, the same for the first token and the last; the dtype is a choice."""
    found = hybrid()
    assert found.need.state == 48 * 3 * MIB == 144 * MIB
    # 2 x 16 key heads x 128 + 48 value heads x 128 channels, 3 inputs each, in 16 bits.
    assert found.need.convolution == 48 * 10_240 * 3 * 2
    assert plan("qwen3.8-27b", 1).need.fixed == found.need.fixed
    half = hybrid(serving=Serving(state_dtype="bf16"))
    assert half.need.state == 72 * MIB
    assert half.need.convolution == found.need.convolution


def test_who_fits_on_192_gb() -> None:
    """In GB, as data sheets and weights are counted: 138 GB are left, and 64 GiB are 68.7 GB."""
    fits = hybrid().fits
    assert fits is not None
    assert (fits.naive, fits.kv_alone, fits.requests) == (2, 8, 7)
    assert 54 * GB + 2 * 64 * GIB < 192 * GB < 54 * GB + 3 * 64 * GIB
    assert 192 * GB - (54 * GB + 2 * 64 * GIB) < 1 * GB  # filled to the brim
    assert "It fits 7 requests at once, 8 by KV alone. The naive formula: 2, and breaks at 3." in (
        output("qwen3.8-27b", "--device", "192GB")
    )


def test_in_gib_the_state_fits_as_well() -> None:
    fits = hybrid(192 * GIB, 54 * GIB).fits
    assert fits is not None
    assert (fits.naive, fits.kv_alone, fits.requests) == (2, 8, 8)


def test_the_catalogue_knows_its_weights() -> None:
    assert weight_bytes(find_model("qwen3.8-27b")) == 54 * GB


def test_sixteen_requests_of_128k() -> None:
    """The other text's opening figure, for Llama-3-8B in 16 bits."""
    found = plan("llama-3-8b", 128 * KIB, requests=16)
    assert found.need.kv == 16 * GIB
    assert found.total == 256 * GIB
    assert found.total > (found.device.weights or 0)


@pytest.mark.parametrize(
    ("tp_size", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1), (32, 1)], ids=lambda v: str(v)
)
def test_kv_heads_are_copied_where_devices_outnumber_them(tp_size: int, heads: int) -> None:
    found = plan("llama-3-8b", 128 * KIB, serving=Serving(tp_size=tp_size))
    assert found.need.kv == 16 * GIB * heads // 8


def test_a_latent_is_held_once_per_device_and_not_per_head() -> None:
    one, eight = (
        plan("deepseek-v3", 128 * KIB, serving=Serving(tp_size=tp_size)) for tp_size in (1, 8)
    )
    assert one.need.kv == eight.need.kv == 61 * 576 * 2 * 128 * KIB
    assert one.token_bytes == 70_272


def test_a_state_is_split_with_its_heads() -> None:
    one, two = (plan("qwen3.8-27b", 1000, serving=Serving(tp_size=n)) for n in (1, 2))
    assert two.need.state * 2 == one.need.state
    assert two.need.convolution * 2 == one.need.convolution
    with pytest.raises(PlanError, match=r"^--tp-size: 48 state heads cannot be split over 5"):
        find_model("qwen3.8-27b").states[0].matrix(5)


def test_sliding_windows_stop_growing() -> None:
    short, window, long = (plan("gemma-3-27b", n).need.kv for n in (512, 1024, 8192))
    full, sliding = 80 * KIB, 416 * KIB
    assert short == 512 * (full + sliding)
    assert window == 1024 * (full + sliding)
    assert long == 8192 * full + 1024 * sliding


@pytest.mark.parametrize(
    ("dtype", "share"), [("fp16", 1.0), ("fp8", 0.5), ("int8", 0.5), ("fp4", 9 / 32)]
)
def test_kv_dtypes(dtype: str, share: float) -> None:
    """fp4: half a byte, and one byte of scale for 16 elements."""
    whole = plan("llama-3-8b", 8192).need.kv
    assert plan("llama-3-8b", 8192, serving=Serving(kv_dtype=dtype)).need.kv == whole * share


def test_whole_pages() -> None:
    one = plan("llama-3-8b", 1).need.kv
    assert one == plan("llama-3-8b", 16).need.kv == 16 * 128 * KIB
    assert plan("llama-3-8b", 17).need.kv == 2 * one
    assert plan("llama-3-8b", 17, serving=Serving(page_size=1)).need.kv == 17 * 128 * KIB


def test_prefill_peaks() -> None:
    """SnapKV holds the prompt and its private copy; StreamingLLM a window and a chunk."""
    snapkv = plan("llama-3-8b", 128 * KIB, spec={"method": "snapkv", "budget": 2048}).need
    assert snapkv.steady == 2048 * 128 * KIB
    assert snapkv.peak == (128 * KIB + 2048) * 128 * KIB
    window = plan("llama-3-8b", 128 * KIB, spec="streamingllm").need
    assert window.steady < window.peak < 2 * GIB


def test_pyramidkv_s_budget_is_exact() -> None:
    """A line over the layers whose sum is the flat budget's, to the token."""
    serving = Serving(page_size=1)
    need = plan("llama-3-8b", 8192, spec="pyramidkv", serving=serving).need
    assert need.pages == 32 * 8 * 2048
    assert need.kv == 2048 * 128 * KIB


def test_duoattention_s_heads_are_counted_per_layer() -> None:
    """Gates of two heads in the first layer, and of one in every third other layer."""
    values = np.zeros((32, 8), np.float32)
    values[0, :2] = values[3::3, 5] = 1
    gates = HeadGates(values, model="", method="", source="")
    spec = {"method": "duoattention", "threshold": 0.5, "sinks": 64, "recent": 256}
    need = plan("llama-3-8b", 8192, spec=spec, gates=gates).need
    retrieval = 2 + 10
    assert need.pages == retrieval * 512 + (256 - retrieval) * (4 + 16)


def test_units() -> None:
    assert parse_size("54GB", "x") == 54 * GB
    assert parse_size("80 GiB", "x") == 80 * GIB
    assert parse_size("1.5gb", "x") == 3 * GB // 2
    assert parse_device("H100") == 80 * GB
    assert parse_device("192GB") == 192 * GB


def test_json_has_the_same_numbers() -> None:
    held = json.loads(output("qwen3.8-27b", "--device", "192GB", "--json"))
    assert held["bytes_per_token"] == 64 * KIB
    assert held["per_request"]["kv"] == 16 * GIB
    assert held["per_request"]["state"] == 144 * MIB
    assert held["naive"]["per_request"] == 64 * GIB
    assert held["fits"] == {"requests": 7, "kv_alone": 8, "naive": 2}
    assert held["serve"].startswith("sglang serve --model-path Qwen/Qwen3.8-27B ")
