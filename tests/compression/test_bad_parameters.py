"""Every parameter of every method refuses what it cannot take, and says its full name."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import re
from typing import Any

import numpy as np
import pytest

from sglang_kv.compression import Compressor, Geometry, PolicyError, parse_policy
from sglang_kv.compression.base import methods
from sglang_kv.compression.gates import HeadGates
from sglang_kv.config import Options

#: What no number is; JSON's null included, since a parameter that is not wanted is left out.
NOT_NUMBERS: list[Any] = [True, False, "5", "", None, [5], {"tokens": 5}]
#: As Python's reader of JSON gives them: 1e400 becomes infinity, and NaN is let through.
NOT_FINITE: list[Any] = json.loads("[NaN, Infinity, -Infinity, 1e400, -1e400]")
NOT_WORDS: list[Any] = ["", "no_such", "Token", "token ", True, 7, 0.5, None, ["token"], {"a": 1}]

FIELDS = [(name, field) for name, cls in methods().items() for field in dataclasses.fields(cls)]
ALIASES = [(name, alias) for name, cls in methods().items() for alias in cls.aliases]
FLAT = Geometry(30, 3, 16)
GATES = HeadGates(np.full((30, 3), 0.5, np.float32), "", "test", "")
#: Of what some parameters need: any value.
ENOUGH: dict[str, Any] = {"keep_ratio": 0.5, "decode_budget": 256}


def kind(field: dataclasses.Field[Any]) -> str:
    if "choices" in field.metadata:
        return "word"
    return "float" if "float" in str(field.type) else "integer"


def of_kind(*kinds: str) -> Any:
    found = [(name, field) for name, field in FIELDS if kind(field) in kinds]
    names = [f"{name}.{field.name}" for name, field in found]
    return pytest.mark.parametrize(("method", "field"), found, ids=names)


def refusal(method: str, **parameters: Any) -> str:
    with pytest.raises(PolicyError) as caught:
        parse_policy({"method": method, **parameters})
    message = str(caught.value)
    assert len(message) < 400
    return message


class DoesNotFit(Exception):
    """Each parameter for itself is good."""


def policy_of(spec: dict[str, Any]) -> Compressor:
    try:
        return parse_policy(spec)
    except PolicyError as error:
        if re.search(r" leaves | gives all heads | splits the whole ", str(error)):
            raise DoesNotFit(str(error)) from None
        raise


# One parameter at a time -----------------------------------------------------------------------


def test_each_kind_is_there() -> None:
    assert {kind(field) for _, field in FIELDS} == {"word", "float", "integer"}


@of_kind("integer", "float")
def test_a_number_is_no_other_thing(method: str, field: dataclasses.Field[Any]) -> None:
    what = "an integer" if kind(field) == "integer" else "a number"
    for value in NOT_NUMBERS:
        message = refusal(method, **{field.name: value})
        assert message.startswith(f"kv_compression.{field.name}: expected {what}, got "), value


@of_kind("integer")
def test_an_integer_is_whole_and_finite(method: str, field: dataclasses.Field[Any]) -> None:
    for value in [2.5, 64.0, *NOT_FINITE]:
        message = refusal(method, **{field.name: value})
        assert message.startswith(f"kv_compression.{field.name}: expected an integer, got float")


@of_kind("float")
def test_a_float_is_finite(method: str, field: dataclasses.Field[Any]) -> None:
    for value in NOT_FINITE:
        message = refusal(method, **{field.name: value})
        assert message.startswith(f"kv_compression.{field.name}: must be "), value


@of_kind("integer", "float")
def test_a_number_has_bounds(method: str, field: dataclasses.Field[Any]) -> None:
    least, most = field.metadata["min"], field.metadata.get("max")
    low = [-1, least - 1, -(2**31), -(2**63), -(10**40)]
    high = [2**31, 2**63, 10**40]
    if kind(field) == "float":
        low += [-0.001, least - 1e-9, -1e300]
        high += [1e300]
        high += [] if most is None else [most + 1, most + 1e-9]
    for value in low:
        message = refusal(method, **{field.name: value})
        assert message.startswith(f"kv_compression.{field.name}: must be at least {least}"), value
    for value in high:
        message = refusal(method, **{field.name: value})
        assert message.startswith(f"kv_compression.{field.name}: must be "), value


@of_kind("word")
def test_a_word_is_one_of_its_choices(method: str, field: dataclasses.Field[Any]) -> None:
    for value in NOT_WORDS:
        if value not in field.metadata["choices"]:
            message = refusal(method, **{field.name: value})
            assert message.startswith(f"kv_compression.{field.name}: must be one of "), value
            assert all(choice in message for choice in field.metadata["choices"])


@pytest.mark.parametrize(("method", "alias"), ALIASES)
def test_a_short_form_is_an_integer(method: str, alias: str) -> None:
    for value in [*NOT_NUMBERS, *NOT_FINITE, 2.5]:
        message = refusal(method, **{alias: value})
        assert message.startswith(f"kv_compression.{alias}: expected an integer, got "), value
    for value in (-1, 0, 1, 2**31, 10**40):
        if (method, value) != ("streamingllm", 1):  # one token, and 4 sinks
            assert refusal(method, **{alias: value}).startswith(f"kv_compression.{alias}: must be")


@pytest.mark.parametrize("method", methods())
def test_no_method_takes_what_it_does_not_know(method: str) -> None:
    cls = methods()[method]
    own = {field.name for field in dataclasses.fields(cls)} | set(cls.aliases)
    others = {field.name for _, field in FIELDS} | {alias for _, alias in ALIASES}
    for key in [*sorted(others - own), "Budget", "fold-at", "", "x" * 500]:
        message = refusal(method, **{key: 64})
        assert message.startswith(f"kv_compression.{key[:57]}"), key
        assert ": unknown parameter of " in message
        assert all(name in message for name in own)


@of_kind("integer", "float", "word")
def test_bounds_themselves_are_taken(method: str, field: dataclasses.Field[Any]) -> None:
    """None of the above refuses everything."""
    needed = what_it_needs(field)
    values = field.metadata.get("choices") or [field.metadata["min"]]
    if "max" in field.metadata:
        values = [*values, field.metadata["max"], field.metadata["max"] // 1]
    for value in values:
        with contextlib.suppress(DoesNotFit):
            policy_of({"method": method, **needed, field.name: value})


# Parameters that do nothing --------------------------------------------------------------------

NEEDY = [(name, field) for name, field in FIELDS if "needs" in field.metadata]


def what_it_needs(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """Parameters without which ``field`` does nothing."""
    other, *values = field.metadata.get("needs", ("",))
    return {other: values[0] if values else ENOUGH[other]} if other else {}


def test_some_parameters_need_others() -> None:
    assert {(name, field.name) for name, field in NEEDY} == {
        *((name, "min_budget") for name in ("h2o", "snapkv", "pyramidkv")),
        *((name, key) for name in ("snapkv", "pyramidkv") for key in ("head_floor", "interval")),
        ("h2o", "window"),
    }


@pytest.mark.parametrize(("method", "field"), NEEDY, ids=lambda x: getattr(x, "name", x))
def test_what_would_do_nothing_is_refused(method: str, field: dataclasses.Field[Any]) -> None:
    """Even its default, which is taken where it is not given."""
    other, *values = field.metadata["needs"]
    message = refusal(method, **{field.name: field.default})
    assert message.startswith(f"kv_compression.{field.name}: has no effect without {other}")
    assert all(repr(value) in message for value in values)
    for value in values or [ENOUGH[other]]:
        spec = {"method": method, field.name: field.default, other: value}
        with contextlib.suppress(DoesNotFit):  # 'gates' are none of pyramidkv's
            assert getattr(policy_of(spec), field.name) == field.default
    parse_policy(method)


# Parameters that do not go together ------------------------------------------------------------

CONTRADICTIONS: list[tuple[dict[str, Any], str]] = [
    ({"method": "streamingllm", "budget": 64, "recent": 60}, "budget: give either budget or rec"),
    ({"method": "streamingllm", "budget": 4}, "budget: 4 leaves no recent token beside 4 sinks"),
    ({"method": "streamingllm", "budget": 9, "sinks": 9}, "budget: 9 leaves no recent token"),
    ({"method": "duoattention", "sparsity": 0.5, "threshold": 0.5}, "threshold: give either"),
    (
        {"method": "h2o", "budget": 64, "keep_ratio": 0.5},
        "budget: give either budget or keep_ratio",
    ),
    ({"method": "h2o", "budget": 64, "heavy": 32}, "budget: give either budget or heavy"),
    ({"method": "h2o", "budget": 64, "recent": 32}, "budget: give either budget or recent"),
    ({"method": "h2o", "keep_ratio": 0.5, "heavy": 32}, "keep_ratio: give either keep_ratio or h"),
    ({"method": "h2o", "keep_ratio": 0.5, "recent": 32}, "keep_ratio: give either keep_ratio or r"),
    *(
        ({"method": method, **parameters}, message)
        for method in ("snapkv", "pyramidkv")
        for parameters, message in [
            ({"budget": 64, "keep_ratio": 0.5}, "budget: give either budget or keep_ratio"),
            ({"kernel_size": 4}, "kernel_size: must be odd, got 4"),
            ({"budget": 32}, "budget: 32 leaves no token beside window 32"),
            ({"budget": 10}, "budget: 10 leaves no token beside window 32"),
            ({"window": 2048}, "budget: 2048 leaves no token beside window 2048"),
            ({"keep_ratio": 0.5, "window": 128}, "min_budget: 128 leaves no token beside window"),
            ({"keep_ratio": 0.5, "min_budget": 32}, "min_budget: 32 leaves no token"),
            ({"decode_budget": 32}, "decode_budget: 32 leaves no token beside window 32"),
            ({"share": "layer", "head_budgets": "adaptive"}, "share: 'layer' gives all heads"),
        ]
    ),
    ({"method": "snapkv", "share": "layer", "head_budgets": "gates"}, "share: 'layer' gives all"),
    ({"method": "pyramidkv", "head_budgets": "gates"}, "head_budgets: 'gates' splits the whole"),
    ({"method": "pyramidkv", "budget": 64, "delta": 65}, "delta: 65 leaves the last layer less"),
    ({"method": "pyramidkv", "delta": 4033}, "delta: 4033 leaves the last layer less"),
    ({"method": "pyramidkv", "delta": 64, "beta": 20.0}, "beta: give either beta or delta, not b"),
    (
        {"method": "duoattention", "first_chunk": "dense", "fold_at": 100},
        "first_chunk: 'dense' has no effect with fold_at",
    ),
]


@pytest.mark.parametrize(("spec", "message"), CONTRADICTIONS, ids=str)
def test_contradictions(spec: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError) as caught:
        parse_policy(spec)
    assert str(caught.value).startswith(f"kv_compression.{message}")


def test_the_nearest_that_goes_together() -> None:
    for spec in (
        {"method": "streamingllm", "budget": 5},
        {"method": "h2o", "budget": 2},
        {"method": "snapkv", "budget": 33, "decode_budget": 33},
        {"method": "snapkv", "keep_ratio": 0.0, "min_budget": 33},
        {"method": "snapkv", "window": 1, "budget": 2, "kernel_size": 1},
        {"method": "pyramidkv", "budget": 64, "delta": 64},
        {"method": "pyramidkv", "keep_ratio": 0.5, "delta": 10_000},
        {"method": "duoattention", "first_chunk": "windowed", "fold_at": 100, "sparsity": 1.0},
    ):
        plan = parse_policy(spec).plan(1000, FLAT._replace(gates=GATES))
        assert plan.pages(1000) < 63 * FLAT.num_streams, spec


# What only a model can refuse --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec", "geometry", "message"),
    [
        ("duoattention", FLAT, "method: 'duoattention' needs head gates"),
        ({"method": "snapkv", "head_budgets": "gates"}, FLAT, "head_budgets: 'gates' needs head g"),
        ("duoattention", FLAT._replace(gates=GATES, num_ranks=2), "method: 'duoattention' gives"),
        (
            {"method": "snapkv", "head_budgets": "gates"},
            FLAT._replace(gates=GATES, num_ranks=2),
            "head_budgets: 'gates' gives heads unequal memory",
        ),
        (
            {"method": "pyramidkv", "head_budgets": "adaptive"},
            FLAT._replace(num_ranks=2),
            "head_budgets: 'adaptive' gives heads unequal memory",
        ),
        *(
            (method, FLAT._replace(sliding_layers=True), f"method: {method!r} needs full attention")
            for method in ("snapkv", "pyramidkv", "h2o")
        ),
    ],
)
def test_a_model_may_not_be_able_to(spec: Any, geometry: Geometry, message: str) -> None:
    """--kv-gates and the like would help; the server's default stops it at its start."""
    with pytest.raises(PolicyError) as caught:
        parse_policy(spec).plan(1, geometry)
    assert str(caught.value).startswith(f"kv_compression.{message}")


# Memory pressure --------------------------------------------------------------------------------

NOT_PRESSURES: list[Any] = [
    "",
    "Evict",
    "none",
    True,
    False,
    0,
    1.5,
    ["evict"],
    {"a": 1},
    "x" * 999,
]


@pytest.mark.parametrize("server", ["evict", "retract"])
def test_pressure_is_one_of_two_words(server: str) -> None:
    options = Options(method="none", pressure=server)
    for value in [*NOT_PRESSURES, *NOT_FINITE]:
        with pytest.raises(PolicyError, match=r"^kv_pressure: must be evict or retract") as caught:
            options.evictable(value)
        assert len(str(caught.value)) < 200
    assert options.evictable(None) == (server == "evict")
    assert not options.evictable("retract")


def test_eviction_needs_a_server_that_does_it() -> None:
    assert Options(method="none", pressure="evict").evictable("evict")
    with pytest.raises(PolicyError, match="kv_pressure: this server was started without --kv-pres"):
        Options(method="none").evictable("evict")


def test_eviction_needs_a_request_that_it_takes_from() -> None:
    options, gated = Options(method="none", pressure="evict"), FLAT._replace(gates=GATES)
    for spec in (
        "streamingllm",
        {"method": "streamingllm", "fold_at": 500},
        "duoattention",
        {"method": "duoattention", "sparsity": 1.0},
    ):
        plan = parse_policy(spec).plan(1000, gated)
        with pytest.raises(PolicyError, match=r"^kv_pressure: evict takes nothing from requests w"):
            options.evictable("evict", plan)
        assert options.evictable(None, plan)  # the server's word does no harm to anybody
        assert not options.evictable("retract", plan)
    for spec in ("none", "h2o", {"method": "duoattention", "sparsity": 0.0}):
        assert options.evictable("evict", parse_policy(spec).plan(1000, gated))
    sliding = parse_policy("none").plan(1000, FLAT._replace(sliding_layers=True))
    with pytest.raises(PolicyError, match=r"^kv_pressure: evict takes nothing where layers have"):
        options.evictable("evict", sliding)


def test_thinned_prefixes_need_a_server_that_has_them() -> None:
    thinning = Options(method="none", prefix_thinning=True)
    assert thinning.takes_thinned("thinned")
    for value in [*NOT_PRESSURES, *NOT_FINITE]:
        with pytest.raises(PolicyError, match=r"^kv_prefix: must be exact or thinned") as caught:
            thinning.takes_thinned(value)
        assert len(str(caught.value)) < 200
    for options in (thinning, Options(method="none")):
        assert not options.takes_thinned(None)
        assert not options.takes_thinned("exact")
    with pytest.raises(PolicyError, match="kv_prefix: this server was started without --prefix-th"):
        Options(method="none").takes_thinned("thinned")


@pytest.mark.parametrize("floor", [0, 0.0, -0.5, 1.001, 2, float("nan"), float("inf"), True, "0.5"])
def test_the_floor_is_a_share(floor: Any) -> None:
    with pytest.raises(PolicyError, match="--kv-pressure-floor: must be above 0 and at most 1"):
        Options(method="none", pressure_floor=floor)
