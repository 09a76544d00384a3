"""Training-free gates: what is recorded and simulated equals a tiny Llama's eager attention."""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest
import torch
from tiny_model import TEXT

from sglang_kv.calibration import passkey, simulate
from sglang_kv.calibration.attention import BLOCK, UnsupportedModelError, attention, duo, shape
from sglang_kv.calibration.passkey import Haystack, Passkey, quizzes, samples
from sglang_kv.calibration.prefill import DENSE, WINDOWED
from sglang_kv.calibration.prefix import Prefix
from sglang_kv.calibration.training_free import (
    attention_mass,
    calibrate,
    group_heads,
    reduce_mass,
    to_gates,
)


def eager(model: Any, sample: Passkey, mask: torch.Tensor | None = None) -> Any:
    model.set_attn_implementation("eager")
    try:
        with torch.inference_mode():
            return model(torch.tensor([sample.ids]), attention_mask=mask, output_attentions=True)
    finally:
        model.set_attn_implementation("sdpa")


# -- samples --


def test_a_samples_ranges_name_its_parts(tokenizer: Any, sample: Passkey) -> None:
    def text(part: range) -> str:
        return "".join(tokenizer.convert_ids_to_tokens(sample.ids[part.start : part.stop]))

    value = text(sample.value)
    assert value.isdigit()
    assert len(value) == passkey.DIGITS
    assert text(sample.answer) == value
    word = text(sample.needle).split()[5]
    assert text(sample.needle) == passkey.NEEDLE.format(word=word, value=value)
    asked = text(sample.question)
    assert asked.startswith(passkey.QUESTION.format(word=word))
    assert asked.endswith("<bot> " + passkey.ANSWER.format(word=word) + " ")
    assert sample.answer.stop == len(sample.ids)
    assert sample.predicting == range(sample.answer.start - 1, sample.answer.stop - 1)
    assert text(range(len(sample.ids))).startswith("<user> " + passkey.INTRODUCTION)


def test_samples_without_a_chat_template(tokenizer: Any) -> None:
    template, tokenizer.chat_template = tokenizer.chat_template, None
    try:
        plain = next(samples(tokenizer, TEXT, seed=0, lengths=(900, 1000)))
    finally:
        tokenizer.chat_template = template
    text = "".join(tokenizer.convert_ids_to_tokens(plain.ids))
    assert "<bot>" not in text
    assert passkey.QUESTION.split("{")[0] in text


def test_a_texts_passkeys_are_asked_for_one_at_a_time(tokenizer: Any) -> None:
    texts = quizzes(tokenizer, TEXT, seed=1, lengths=(1300, 1500), passkeys=4, sinks=30, recent=300)
    for quiz in itertools.islice(texts, 5):
        assert len(quiz) == 4
        begin = quiz[0].question.start
        bodies = {sample.ids[: sample.question.start] for sample in quiz}
        assert len(bodies) == 1
        (body,) = bodies
        assert all(sample.question.start == begin for sample in quiz)
        numbers = {body[sample.value.start : sample.value.stop] for sample in quiz}
        assert len(numbers) == 4
        for sample in quiz:
            assert len(sample.ids) <= 1500
            assert sample.ids[sample.answer.start :] == body[sample.value.start : sample.value.stop]
            assert sample.needle.start >= 30
            assert begin - sample.needle.stop >= 300
    with pytest.raises(ValueError, match="passkeys: from 1 to"):
        next(quizzes(tokenizer, TEXT, seed=1, lengths=(900, 900), passkeys=0))


def test_samples_are_seeded(tokenizer: Any) -> None:
    def first(seed: int) -> list[Passkey]:
        endless = samples(tokenizer, TEXT, seed=seed, lengths=(900, 1200))
        return list(itertools.islice(endless, 4))

    assert first(1) == first(1)
    assert first(1) != first(2)
    assert len(set(first(1))) == 4


def test_needles_lie_where_streaming_heads_lose_them(tokenizer: Any) -> None:
    endless = samples(tokenizer, TEXT, seed=3, lengths=(1000, 1500), sinks=100, recent=300)
    starts = []
    for sample in itertools.islice(endless, 50):
        assert len(sample.ids) <= 1500
        assert sample.needle.start >= 100
        assert sample.question.start - sample.needle.stop >= 300
        starts.append(sample.needle.start / sample.question.start)
    assert min(starts) < 0.4 < 0.6 < max(starts)


def test_a_sample_too_short_for_the_window_is_refused(tokenizer: Any) -> None:
    with pytest.raises(ValueError, match="no place for the needle beyond 64 sinks and 256 recent"):
        next(samples(tokenizer, TEXT, seed=0, lengths=(500, 500)))


def test_a_short_text_starts_over(tokenizer: Any) -> None:
    haystack = Haystack("One is short. Two is too!", tokenizer)
    sentences, lengths = haystack.passage(random.Random(0), 100)
    assert set(sentences) == {"One is short.", "Two is too!"}
    assert lengths == [len(sentence) for sentence in sentences]
    assert 85 < sum(lengths) <= 100
    with pytest.raises(ValueError, match="empty"):
        Haystack(" \n ", tokenizer)


# -- attention --


def test_recorded_mass_equals_eager_attention(model: Any, sample: Passkey) -> None:
    assert shape(model.config) == (3, 6, 2)
    mass = attention_mass(model, sample)
    rows = slice(sample.question.start, sample.predicting.stop)
    columns = slice(sample.needle.start, sample.needle.stop)
    weights = torch.stack(eager(model, sample).attentions)[:, 0]
    expected = weights[:, :, rows, columns].numpy()
    np.testing.assert_allclose(mass, expected, atol=1e-5)
    assert expected.max() > 0.01

    predicting = slice(sample.predicting.start, sample.predicting.stop)
    value = slice(sample.value.start, sample.value.stop)
    expected = weights[:, :, predicting, value].sum(-1).mean(-1).numpy()
    np.testing.assert_allclose(reduce_mass(mass, sample), expected, atol=1e-5)


def test_reductions_pick_their_rows_and_columns() -> None:
    sample = Passkey(tuple(range(20)), range(4, 9), range(6, 8), range(12, 17), range(17, 19))
    # Rows 12..17: five of the question, the last of which predicts, and one more.
    mass = np.arange(30, dtype=np.float32).reshape(1, 1, 6, 5)
    assert reduce_mass(mass, sample) == pytest.approx((22 + 23 + 27 + 28) / 2)
    assert reduce_mass(mass, sample, columns="needle") == pytest.approx((110 + 135) / 2)
    assert reduce_mass(mass, sample, columns="copied") == pytest.approx((22 + 28) / 2)
    assert reduce_mass(mass, sample, "question") == pytest.approx(sum((5, 15, 25, 35)) / 4)
    assert reduce_mass(mass, sample, "all", "needle") == pytest.approx(435 / 6)


def test_query_heads_are_grouped_by_kv_head() -> None:
    scores = np.array([[0, 1, 2, 3, 4, 8]], np.float32)
    assert group_heads(scores, 2).tolist() == [[2, 8]]
    assert group_heads(scores, 2, "mean").tolist() == [[1, 5]]
    assert group_heads(scores, 6).tolist() == scores.tolist()
    assert to_gates(scores).tolist() == (scores / 8).tolist()
    with pytest.raises(ValueError, match="nothing to calibrate"):
        to_gates(np.zeros((2, 2), np.float32))


def test_the_models_attention_comes_back(model: Any, sample: Passkey) -> None:
    before = model.config._attn_implementation  # noqa: SLF001
    with pytest.raises(RuntimeError, match="planned"), attention(model, duo(none(), 4, 8)):
        raise RuntimeError("planned")
    assert model.config._attn_implementation == before  # noqa: SLF001


def none() -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.zeros((3, 2), np.bool_)


@pytest.mark.parametrize(("sinks", "recent"), [(4, 100), (0, 16), (64, 256), (1, 1), (300, 5000)])
def test_the_simulation_equals_eager_attention_under_a_mask(
    model: Any, sample: Passkey, sinks: int, recent: int
) -> None:
    positions = torch.arange(len(sample.ids))
    distance = positions[:, None] - positions
    assert len(positions) > 3 * BLOCK
    for streaming in (True, False):
        seen = distance >= 0
        if streaming:
            seen &= (positions < sinks) | (distance <= recent)
        bias = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
        expected = eager(model, sample, bias[None, None]).logits[0]
        heads = none() if streaming else ~none()
        with torch.inference_mode(), attention(model, duo(heads, sinks, recent)):
            logits = model(torch.tensor([sample.ids]), use_cache=False).logits[0]
        torch.testing.assert_close(logits, expected, atol=2e-4, rtol=1e-3)


@pytest.mark.parametrize("tokens", [1, 300, 2 * BLOCK])
def test_the_rest_behind_a_prefix_equals_the_whole(
    model: Any, sample: Passkey, tokens: int
) -> None:
    heads = np.array([[True, False], [False, False], [True, True]])
    whole, prefix = duo(heads, 8, 64), Prefix(tokens)
    with torch.inference_mode(), attention(model, prefix.keeping(whole)):
        expected = model(torch.tensor([sample.ids]), use_cache=False).logits[0, tokens:]
    with torch.inference_mode(), attention(model, prefix.before(whole)):
        found = model(**prefix.rest(sample.ids, "cpu")).logits[0]
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("sinks", "recent"), [(4, 100), (0, 200), (64, 256)])
def test_dense_prefill_cuts_from_the_question_on(
    model: Any, sample: Passkey, sinks: int, recent: int
) -> None:
    answers = simulate.Answers(model, DENSE)
    positions = torch.arange(len(sample.ids))
    distance = positions[:, None] - positions
    before = (positions < sample.question.start)[:, None]
    window = (positions < sinks) | (distance <= recent) | before
    found = []
    for heads, seen in ((none(), window), (~none(), window | True)):
        bias = torch.zeros(seen.shape).masked_fill(~(seen & (distance >= 0)), -torch.inf)
        logits = eager(model, sample, bias[None, None]).logits[0].log_softmax(-1)
        wanted = torch.tensor(sample.ids[sample.answer.start :])
        rows = logits[sample.answer.start - 1 : -1]
        ((right, likelihood),) = answers(sample, [(heads, sinks, recent)])
        assert right == bool((rows.argmax(-1) == wanted).all())
        expected = float(rows[range(len(wanted)), wanted].mean())
        assert likelihood == pytest.approx(expected, abs=1e-4)
        found.append(likelihood)
    assert abs(found[0] - found[1]) > 1e-3
    (strict,) = simulate.Answers(model, WINDOWED)(sample, [(none(), sinks, recent)])
    assert strict == simulate.answers(model, sample, none(), sinks=sinks, recent=recent)
    assert strict[1] != pytest.approx(found[0], abs=1e-4)


def test_dense_prefill_runs_once_for_each_text(model: Any, tokenizer: Any) -> None:
    texts = quizzes(tokenizer, TEXT, seed=9, lengths=(900, 900), passkeys=2, sinks=8, recent=64)
    (first, second), (other, _) = itertools.islice(texts, 2)
    answers = simulate.Answers(model, DENSE)
    lengths: list[int] = []
    hook = model.base_model.layers[0].register_forward_pre_hook(
        lambda module, given: lengths.append(given[0].shape[1])
    )
    try:
        tries = [(none(), 8, 64), (~none(), 8, 64), (none(), 4, 16)]
        found = answers(first, tries)
        alone = [answers(first, [one])[0] for one in tries]
        answers(second, tries)
        answers(other, tries)
        assert answers(first, tries) == found
    finally:
        hook.remove()
    begin, rest, other_begin, other_rest = (
        n
        for sample in (first, other)
        for n in (sample.question.start, len(sample.ids) - sample.question.start)
    )
    again = len(second.ids) - begin
    assert lengths == [begin, *[rest] * 4, again, other_begin, other_rest, begin, rest]
    assert [right for right, _ in found] == [right for right, _ in alone]
    np.testing.assert_allclose([x for _, x in found], [x for _, x in alone], atol=1e-4)
    assert len({round(x, 4) for _, x in found}) == 3


def test_only_the_named_heads_stream() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(4, 600, 8), torch.randn(2, 600, 8), torch.randn(2, 600, 8)
    heads = np.array([[True, False]])
    mixed = duo(heads, 2, 8)(0, q, k, v, 0.3)
    full = duo(~none(), 2, 8)(0, q, k, v, 0.3)
    windowed = duo(none(), 2, 8)(0, q, k, v, 0.3)
    torch.testing.assert_close(mixed[:2], full[:2])
    torch.testing.assert_close(mixed[2:], windowed[2:])
    assert (mixed[2:] - full[2:]).abs().max() > 0.1


def test_attention_that_is_more_than_softmax_is_refused(sample: Passkey) -> None:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=96,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        sliding_window=16,
    )
    with pytest.raises(UnsupportedModelError, match="no attention with sliding_window"):
        attention_mass(MistralForCausalLM(config).eval(), sample)


# -- the whole --


def test_answers_are_judged_token_by_token(model: Any, sample: Passkey) -> None:
    right, likelihood = simulate.answers(model, sample, ~none())
    logits = eager(model, sample).logits[0].log_softmax(-1)
    wanted = torch.tensor(sample.ids[sample.answer.start :])
    rows = logits[sample.answer.start - 1 : -1]
    assert right == bool((rows.argmax(-1) == wanted).all())
    assert likelihood == pytest.approx(float(rows[range(len(wanted)), wanted].mean()), abs=1e-3)

    # What the model itself would write is right.
    ids = list(sample.ids)
    for at in sample.answer:
        with torch.inference_mode():
            ids[at] = int(model(torch.tensor([ids[:at]])).logits[0, -1].argmax())
    own = Passkey(tuple(ids), sample.needle, sample.value, sample.question, sample.answer)
    assert simulate.answers(model, own, ~none())[0]


def test_calibration_averages_samples(model: Any, tokenizer: Any) -> None:
    endless = samples(tokenizer, TEXT, seed=5, lengths=(600, 700), sinks=8, recent=64)
    chosen = list(itertools.islice(endless, 3))
    done: list[int] = []
    gates = calibrate(
        model, chosen, reduce="mean", after_sample=lambda sums: done.append(sums.done)
    )
    scores = [reduce_mass(attention_mass(model, sample), sample) for sample in chosen]
    np.testing.assert_allclose(gates, to_gates(group_heads(sum(scores) / 3, 2, "mean")), atol=1e-6)
    assert gates.max() == 1
    assert done == [1, 2, 3]
    assert (calibrate(model, chosen, reduce="mean") == gates).all()
    with pytest.raises(ValueError, match="at least one sample"):
        calibrate(model, [])
