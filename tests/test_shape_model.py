"""A model with another's KV shape: what the pool sees is the same."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GPT2Config

from sglang_kv.benchmarks.concurrency import main, predicted
from sglang_kv.benchmarks.methods import arms, geometry_of
from sglang_kv.benchmarks.shape_model import write_shape_model


def test_the_kv_is_the_models_own(demo_model: Path, tmp_path: Path) -> None:
    folder = write_shape_model(str(demo_model), tmp_path / "shape")
    assert geometry_of(str(folder)).num_streams == geometry_of(str(demo_model)).num_streams
    ours, theirs = (AutoConfig.from_pretrained(path) for path in (folder, demo_model))
    assert (ours.head_dim, ours.vocab_size, ours.max_position_embeddings) == (
        theirs.hidden_size // theirs.num_attention_heads,
        theirs.vocab_size,
        theirs.max_position_embeddings,
    )
    for name, policy in arms(4000).items():
        if "gates" not in str(policy) and policy["method"] != "duoattention":
            fits = [
                predicted(policy, geometry_of(str(p)), 34000, 4000, 64, 4096)
                for p in (folder, demo_model)
            ]
            assert fits[0] == fits[1], name
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.num_parameters() < 10_000_000
    text = "How many of them fit?"
    assert AutoTokenizer.from_pretrained(folder)(text) == AutoTokenizer.from_pretrained(demo_model)(
        text
    )


def test_another_kind_of_model_is_refused(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path / "gpt2")
    with pytest.raises(ValueError, match="a model of type llama was expected, got gpt2"):
        write_shape_model(str(tmp_path / "gpt2"), tmp_path / "out")


def test_an_arm_that_is_unknown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.argv", ["concurrency", "--model", "m", "--arms", "none,snapkv 1/3"])
    with pytest.raises(SystemExit):
        main()
    assert "--arms: 'snapkv 1/3' is none of stock, none, stream" in capsys.readouterr().err
