"""docs/other-families.md says what encoders, encoder-decoders and vision-language classes of transformers do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import transformers
from tests.integrations import families
from tests.integrations.families import on_ranks, results
from tests.integrations.family_cases import case_of
from tests.integrations.other_families import PAGE, classes, labelled_batch, row, tiny_model, try_class, written_rows

import longspan as ls
import longspan.integrations.transformers as lst
from longspan.integrations import memory

SAMPLE = (
    ("encoder", "bert"),
    ("encoder-decoder", "t5gemma"),
    ("encoder-decoder", "vibevoice_asr"),  # only its text decoder takes position_ids
    ("encoder-decoder", "voxtral_realtime"),  # with audio
    ("vision-language", "granite4_vision"),  # features of image tokens in several layers
    ("vision-language", "instructblip"),  # images among the tokens
    ("vision-language", "kosmos-2.5"),  # its decoder embeds tokens, and puts features in place of image tokens
    ("vision-language", "mllama"),  # cross-attention to images, idle without
    ("vision-language", "molmo2"),  # makes the mask of its text decoder
    ("vision-language", "vision-encoder-decoder"),  # images in place of tokens
)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "key" in metafunc.fixturenames:
        keys = list(classes()) if metafunc.config.getoption("--whole-grid") else list(SAMPLE)
        metafunc.parametrize("key", keys, ids=[" ".join(key) for key in keys])


def test_the_page_has_the_class_as_it_is(key: tuple[str, str]) -> None:
    if not case_of(classes()[key]).is_possible:
        pytest.skip(f"needs {case_of(classes()[key]).package}")
    line = families.for_installed_version(written_rows()[key])
    if line is None:
        pytest.skip("was tried with another transformers")
    assert row(key, try_class(key)) == line


def test_all_classes_are_tested_and_none_is_silently_wrong() -> None:
    rows = written_rows()
    assert rows.keys() >= classes().keys()  # the page may be of a later transformers
    assert not [line for line in rows.values() if "WRONG" in line or "not tested" in line]


def test_the_readme_has_the_counts_of_both_pages() -> None:
    text = (PAGE.parents[1] / "README.md").read_text()
    for rows, column, kind in ((families.written_rows(), 4, "causal model types"), (written_rows(), 5, "further classes")):
        verdicts = [line.split("|")[column].strip() for line in rows.values()]
        right, raises = verdicts.count("right"), verdicts.count("raises")
        assert re.search(rf"{len(rows)} {kind}[^.]*?, {right} [^.]*? three ranks, and {raises} raise", text), (len(rows), right, raises)


def test_the_readme_has_the_count_of_classes_with_images() -> None:
    rows = [line.split("|") for key, line in written_rows().items() if key[0] == "vision-language"]
    right = [cells for cells in rows if cells[5].strip() == "right"]
    images = [cells for cells in right if re.search(r"`(pixel_values|flattened_patches)`", cells[6]) and "images raise" not in cells[6]]
    text = (PAGE.parents[1] / "README.md").read_text()
    assert re.search(rf"of the {len(right)} vision-language classes among these \d+, {len(images)} are right with images", text)


def encoder(name: str, **settings: Any) -> Any:
    sizes = {"vocab_size": 61, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = getattr(transformers, f"{name}Config")(**sizes, pad_token_id=0, attention_probs_dropout_prob=0.0, **settings)
    torch.manual_seed(0)
    return getattr(transformers, f"{name}ForMaskedLM")._from_config(config, attn_implementation="longspan").eval()


def test_token_types_and_documents_of_an_encoder_on_ranks_equal_one_process() -> None:
    model = encoder("Bert")
    ids = torch.randint(3, 61, (2, 23), generator=torch.Generator().manual_seed(1))
    labels = ids.masked_fill(torch.arange(23) % 3 != torch.tensor([[0], [1]]), -100)
    types = (torch.arange(23) > 9).long().expand(2, 23)
    batch = {"input_ids": ids, "labels": labels, "token_type_ids": types}
    got, want = on_ranks(model, batch), results(model, batch)
    torch.testing.assert_close(got[0], want[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(got[1], want[1], rtol=1e-4, atol=1e-6)
    # Two documents of one row are two rows of a batch; both have labels.
    places = torch.cat([torch.arange(9), torch.arange(14)])[None]
    packed = {"input_ids": ids[:1], "labels": labels[:1], "position_ids": places, "document_ids": (torch.arange(23) > 8).long()[None]}
    parts = [results(model, {"input_ids": ids[:1, a:b], "labels": labels[:1, a:b]})[0] for a, b in ((0, 9), (9, 23))]
    counts = [int((labels[0, a:b] != -100).sum()) for a, b in ((0, 9), (9, 23))]
    mean = (parts[0] * counts[0] + parts[1] * counts[1]) / sum(counts)
    torch.testing.assert_close(on_ranks(model, packed)[0], mean, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("Esm", {"position_embedding_type": "rotary", "mask_token_id": 4}, "expected position_embedding_type='absolute', got 'rotary'"),
        ("Esm", {"token_dropout": True, "mask_token_id": 4}, "expected token_dropout=False"),
        ("MobileBert", {"embedding_size": 16, "intra_bottleneck_size": 16}, "got an encoder of type 'mobilebert', which is not supported"),
    ],
)
def test_encoders_that_depend_on_their_shard_raise(name: str, settings: dict[str, Any], message: str) -> None:
    ids = torch.ones(2, 23, dtype=torch.long)
    with pytest.raises(ValueError, match=message):
        on_ranks(encoder(name, **settings), {"input_ids": ids, "labels": ids})


def test_an_encoder_beside_a_plan_of_its_config_raises() -> None:
    model, ids = encoder("Bert"), torch.ones(2, 23, dtype=torch.long)
    with pytest.raises(ValueError, match=r"expected a causal layer, .* got not a causal layer, BertSelfAttention"):
        model(**lst.prepare_batch({"input_ids": ids}, ls.Mesh.abstract(1), config=model.config))
    with pytest.raises(ValueError, match="whose labels are not shifted"):
        memory.causal_lm_loss(model, {"input_ids": ids, "labels": ids})


def test_a_model_whose_decoder_alone_takes_positions_asks_for_itself_and_runs_in_the_trainer(tmp_path: Path) -> None:
    from examples.transformers_trainer import arguments

    from longspan.integrations.trainer import SpanningTrainer

    model = tiny_model(("encoder-decoder", "vibevoice_asr"), "longspan")
    batch = labelled_batch("left", model)
    with pytest.raises(ValueError, match=r"Its text decoder takes them: give the model to prepare_batch"):
        model(**lst.prepare_batch(batch, ls.Mesh.abstract(1), config=model.config))
    trainer = SpanningTrainer(model=model, args=arguments(str(tmp_path)), mesh=ls.Mesh.abstract(1))
    torch.testing.assert_close(trainer.compute_loss(model, batch), model(**batch).loss, rtol=1e-5, atol=0)


def test_the_trainer_refuses_an_encoder(tmp_path: Path) -> None:
    from examples.transformers_trainer import arguments

    from longspan.integrations.trainer import SpanningTrainer

    with pytest.raises(ValueError, match="expected a causal LM, got BertForMaskedLM, whose labels are not shifted"):
        SpanningTrainer(model=encoder("Bert"), args=arguments(str(tmp_path)), mesh=ls.Mesh.abstract(1))
