"""How importance is measured, added, divided and forgotten."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_kv.radix.importance import Decay, page_density, profile
from sglang_kv.radix.key import Key
from sglang_kv.radix.tree import RadixTree

densities = st.lists(st.floats(0, 1e6, allow_subnormal=False), min_size=1, max_size=40)


def test_a_page_gets_the_mean_of_its_tokens() -> None:
    assert page_density([1, 3, 5, 5, 9], 2).tolist() == [2.0, 5.0]  # no whole page: left out


def test_sinks_and_the_window_are_left_out() -> None:
    mass = [100, 100, 100, 2, 4, 4, 50, 50]
    # Page 0 is all sinks and page 3 all window: they get the mean of the three that were measured.
    assert page_density(mass, 2, sinks=3, window=2).tolist() == [10 / 3, 2.0, 4.0, 10 / 3]
    assert page_density(mass, 2, sinks=8).tolist() == [0.0] * 4
    assert page_density([1.0] * 6, 2, window=100).tolist() == [0.0] * 3


@pytest.mark.parametrize("mass", [[-1.0, 0.0], [math.nan, 1.0], [math.inf, 1.0], [[1.0]]])
def test_impossible_mass_is_refused(mass: object) -> None:
    with pytest.raises(ValueError, match=r"attention mass|bad shape"):
        page_density(mass, 2)  # type: ignore[arg-type]


def test_a_profile_never_rises_and_shares_what_would() -> None:
    assert profile([4, 2, 1, 1]).tolist() == [2, 1, 0.5, 0.5]
    assert profile([1, 3, 2, 2]).tolist() == [1, 1, 1, 1]
    assert profile([6, 1, 3, 2]).tolist() == [2, 2 / 3, 2 / 3, 2 / 3]
    assert profile([0, 0]).tolist() == [1, 1]
    assert profile([]).tolist() == []


@given(densities)
def test_a_profile_keeps_the_mean_and_what_never_rises(values: list[float]) -> None:
    out = profile(values)
    assert (np.diff(out) <= 1e-12).all()
    assert out.mean() == pytest.approx(1.0)
    assert profile(out) == pytest.approx(out)


def test_a_profile_is_the_nearest_sequence_that_never_rises() -> None:
    rng = np.random.default_rng(3)
    values = rng.random(6)
    best = profile(values) * values.mean()
    for _ in range(2000):
        other = np.sort(rng.random(6))[::-1]
        assert ((values - best) ** 2).sum() <= ((values - other) ** 2).sum() + 1e-12


@given(densities, st.data())
def test_a_split_divides_importance_exactly(values: list[float], data: st.DataObject) -> None:
    tree: RadixTree[range] = RadixTree(2)
    tokens = list(range(2 * len(values)))
    node = tree.insert(Key.of(tokens), range(len(tokens))).node
    tree.credit(node, values)
    before, total = node.density.copy(), math.fsum(node.density)
    for _ in range(3):
        end = data.draw(st.integers(1, len(values)))
        tree.match(Key.of(tokens[: 2 * end]))
    parts = [step.density for step in node.path()]
    assert np.concatenate(parts).tobytes() == before.tobytes()
    assert math.fsum(x for part in parts for x in part) == total
    tree.check()


def test_importance_adds_up_along_the_path() -> None:
    tree: RadixTree[range] = RadixTree(2)
    one = tree.insert(Key.of([1, 2, 3, 4]), range(4)).node
    tree.credit(one, [0.5, 0.25])
    two = tree.insert(Key.of([1, 2, 5, 6]), range(4))
    tree.credit(two.node, [1.0, 2.0, 99.0])  # more pages than the path: a prompt's last ones
    assert not two.goes_on
    assert one.parent is two.node.parent
    assert one.parent is not None
    assert one.parent.density.tolist() == [1.5]
    assert one.density.tolist() == [0.25]
    assert two.node.density.tolist() == [2.0]


def test_the_next_turn_of_a_session_is_the_same_reader() -> None:
    tree: RadixTree[range] = RadixTree(2)
    tree.credit(tree.insert(Key.of([1, 2]), range(2)).node, [1.0])
    for turn in range(2, 6):
        tokens = list(range(1, 2 * turn + 1))
        done = tree.insert(Key.of(tokens), range(2 * turn))
        assert done.goes_on
        tree.credit(done.node, [1.0] * turn, goes_on=True)
    assert [step.density.tolist() for step in done.node.path()] == [[1.0]] * 5
    other = tree.insert(Key.of([1, 2, 3, 4, 9, 9]), range(6))
    assert not other.goes_on  # somebody else
    tree.credit(other.node, [1.0] * 3)
    assert [step.density.tolist() for step in other.node.path()] == [[2.0], [2.0], [1.0]]


def test_a_session_whose_tail_was_evicted_still_goes_on() -> None:
    tree: RadixTree[range] = RadixTree(2, order_name="lru")
    tree.insert(Key.of([1, 2]), range(2))
    tree.insert(Key.of([1, 2, 3, 4]), range(4))
    assert tree.evict(1) == 2
    assert tree.insert(Key.of([1, 2, 3, 4, 5, 6]), range(6)).goes_on


def test_mass_fades_by_the_clock_and_by_nothing_else() -> None:
    tree: RadixTree[range] = RadixTree(2, half_life=4.0)
    node = tree.insert(Key.of([1, 2]), range(2)).node
    tree.credit(node, [1.0])
    for _ in range(50):  # being looked up, held or counted takes no time
        tree.match(Key.of([1, 2]))
        tree.lock(node)
        tree.unlock(node)
        tree.insert(Key.of([1, 2]), range(2))
    assert tree.decay.at(node, tree.clock).tolist() == [1.0]
    tree.insert(Key.of([7, 8, 9, 10]), range(4))  # four tokens are stored
    assert tree.decay.at(node, tree.clock).tolist() == [0.5]
    assert node.density.tolist() == [1.0]  # no sweep has touched it
    tree.credit(node, [1.0])
    assert node.density.tolist() == [1.5]
    tree.check()


@given(st.floats(1e-3, 1e3), st.floats(1e-3, 1e3), st.integers(0, 500), st.integers(0, 500))
def test_the_rank_keeps_the_order_of_what_has_decayed(
    a: float, b: float, stamp_a: int, stamp_b: int
) -> None:
    tree: RadixTree[range] = RadixTree(2)
    decay = Decay(50.0)
    nodes = [tree.insert(Key.of([i, i]), range(2)).node for i in range(2)]
    for node, mass, stamp in zip(nodes, (a, b), (stamp_a, stamp_b), strict=True):
        node.density, node.stamp = np.array([mass]), stamp
    now = [float(decay.at(node, 1000).mean()) for node in nodes]
    ranks = [decay.rank(node) for node in nodes]
    if not math.isclose(now[0], now[1], rel_tol=1e-9):
        assert (ranks[0] < ranks[1]) == (now[0] < now[1])


def test_bad_credits_are_refused() -> None:
    tree: RadixTree[range] = RadixTree(2)
    node = tree.insert(Key.of([1, 2, 3, 4]), range(4)).node
    for bad in ([1.0], [1.0, -1.0], [1.0, math.nan], [[1.0, 1.0]]):
        with pytest.raises(ValueError, match="density"):
            tree.credit(node, bad)
    with pytest.raises(ValueError, match="half_life"):
        RadixTree(2, half_life=0)
    tree.check()
