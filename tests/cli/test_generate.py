"""`longspan generate` with a checkpoint: the tokens of transformers' eager attention, up to a token that ends the text."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

pytest.importorskip("typer")
pytest.importorskip("transformers")

from longspan.cli.app import run

WORDS = 53


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with words w0, w1, … as tokens."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=WORDS, hidden_size=32, intermediate_size=24, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        initializer_range=0.3, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("checkpoint")
    LlamaForCausalLM(config).save_pretrained(path)
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(path)
    return path


def eager_tokens(folder: Path, prompt: list[int], count: int) -> list[int]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="eager").eval()
    return model.generate(torch.tensor([prompt]), max_new_tokens=count, do_sample=False)[0, len(prompt) :].tolist()  # type: ignore[no-any-return]


def test_a_checkpoint_generates_the_tokens_of_eager_attention_until_its_end_token(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from transformers import AutoTokenizer, GenerationConfig

    prompt = [5, 17, 41, 2, 29, 11, 38]
    tokens = eager_tokens(folder, prompt, 9)
    words = [f"w{i}" for i in tokens]
    assert len(set(words[:6])) == 6
    given = " ".join(f"w{i}" for i in prompt)

    def text() -> list[str]:
        capsys.readouterr()
        assert run(["generate", "--checkpoint", str(folder), "--prompt", given, *"--new 9 --page-size 4 --chunk 3".split()]) == 0
        return capsys.readouterr().out.split()

    assert text() == words
    GenerationConfig(eos_token_id=[tokens[5]]).save_pretrained(folder)
    assert text() == words[:6]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.eos_token = words[3]
    tokenizer.save_pretrained(folder)
    assert text() == words[:3]  # a special token is not printed


@pytest.mark.parametrize(("given", "dtype"), [([], None), (["--kv-dtype", "fp8"], torch.float8_e4m3fn)])
def test_the_cache_has_the_dtype_of_the_option(
    given: list[str], dtype: torch.dtype | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from longspan.integrations import generation

    made: list[torch.dtype | None] = []

    class Noted(generation.PagedCache):
        def __init__(self, *args: Any, dtype: torch.dtype | None = None, **options: Any) -> None:
            made.append(dtype)
            super().__init__(*args, dtype=dtype, **options)

    monkeypatch.setattr(generation, "PagedCache", Noted)
    assert run(["generate", *"--context 20 --new 3 --page-size 4 --chunk 7".split(), *given]) == 0
    assert made == [dtype]
    assert run(["generate", "--kv-dtype", "int8"]) == 2
    assert "--kv-dtype: expected fp8" in capsys.readouterr().err


@pytest.mark.parametrize("rank", [0, 1])
def test_rank_0_prints_and_no_other(rank: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from longspan.cli.generate import _generate
    from longspan.integrations import generation

    for name, value in (("is_initialized", True), ("get_rank", rank), ("get_world_size", 2)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    monkeypatch.setattr(torch.distributed, "group", SimpleNamespace(WORLD=object()))
    monkeypatch.setattr(generation, "generate", lambda *_, **__: "3 tokens/s")
    request = {
        "checkpoint": None,
        "prompt": "a",
        "seed": 0,
        "new_tokens": 2,
        "chunk": 3,
        "temperature": 0.0,
        "page_size": 4,
        "kv_dtype": None,
    }
    assert _generate(torch.device("cpu"), request) == 0
    assert capsys.readouterr().err.strip() == ("3 tokens/s; 2 processes, cpu" if rank == 0 else "")
