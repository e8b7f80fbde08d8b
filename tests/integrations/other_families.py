"""Encoders, encoder-decoders and vision-language classes of the installed transformers: `python -m tests.integrations.other_families`.

As `tests.integrations.families`, of which it writes a second page, docs/other-families.md. Vision-language models get images where a
case of `family_cases` has them.
"""

from __future__ import annotations

import argparse
import warnings
from pathlib import Path
from typing import Any

import torch
from tests.integrations.families import (
    LENGTH,
    Outcome,
    batch_of,
    failure_of,
    line_of,
    made_model,
    on_ranks,
    outcome_of,
    reason_of,
    results,
    tiny_settings,
    without_cache,
)
from tests.integrations.family_cases import case_of

PAGE = Path(__file__).parents[2] / "docs" / "other-families.md"
SECTIONS = ("encoder", "encoder-decoder", "vision-language")
KINDS = ("plain", "left", "right")
IMAGE_KINDS = {"images": "plain", "images left": "left"}  # for classes that run without images too


def classes() -> dict[tuple[str, str], str]:
    """Class name by (section, model type). Model types whose class is a causal LM of the other page are left out."""
    from transformers.models.auto import modeling_auto as auto

    mappings = {
        "encoder": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
        "vision-language": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    }
    causal = set(auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    decoders = set(mappings["encoder-decoder"].values())
    made: dict[tuple[str, str], str] = {}
    for section in SECTIONS:
        for model_type, name in mappings[section].items():
            name = name[0] if isinstance(name, (tuple, list)) else name
            if name not in causal and name not in made.values() and (section != "encoder" or name not in decoders):
                made[section, model_type] = name
    return made


def labelled_batch(kind: str, model: Any) -> dict[str, torch.Tensor]:
    """A batch of `families.batch_of`. Inputs of a decoder behind an encoder are its labels: fewer than the encoder's, none padded."""
    batch = batch_of(IMAGE_KINDS.get(kind, kind))
    if model.config.is_encoder_decoder:
        tokens = LENGTH if model.config.model_type == "fsmt" else LENGTH - 14  # FSMT makes its decoder's inputs of the encoder's
        batch["labels"] = batch["input_ids"][:, :tokens].contiguous()
    return case_of(type(model).__name__).batch(batch, with_images=kind in IMAGE_KINDS)


def tiny_model(key: tuple[str, str], implementation: str) -> Any:
    """The model of a class, with the same weights for each implementation."""
    import transformers
    from transformers import CONFIG_MAPPING

    section, model_type = key

    def config() -> Any:
        settings = tiny_settings(CONFIG_MAPPING[model_type], classes()[key])
        if section == "encoder":
            settings["is_decoder"] = False
        made = CONFIG_MAPPING[model_type](**settings)
        if section == "encoder-decoder" and getattr(made, "decoder_start_token_id", None) is None:
            made.decoder_start_token_id = 1
        return made

    return made_model(getattr(transformers, classes()[key]), config, implementation)


def try_class(key: tuple[str, str]) -> dict[str, Any]:
    """{"one process": {kind: Outcome}, "ranks": {kind: Outcome}}, or {"not tested": why} if eager attention does not run."""
    kinds = (*KINDS, *IMAGE_KINDS) if case_of(classes()[key]).images is not None else KINDS
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eager = tiny_model(key, "eager")
            wanted = {kind: results(eager, {**labelled_batch(kind, eager), **without_cache(eager)}) for kind in kinds}
        except Exception as error:
            return {"not tested": failure_of(error).detail}
        if not all(bool(torch.isfinite(loss)) for loss, _ in wanted.values()):
            return {"not tested": "the loss of eager attention is not finite"}
        try:
            model = tiny_model(key, "longspan")
        except Exception as error:
            return {where: dict.fromkeys(kinds, failure_of(error)) for where in ("one process", "ranks")}
        outcome: dict[str, dict[str, Outcome]] = {"one process": {}, "ranks": {}}
        for kind in kinds:
            arguments = {**labelled_batch(kind, model), **without_cache(model)}
            outcome["one process"][kind] = outcome_of(lambda m=model, a=arguments: results(m, a), wanted[kind])
            batch = labelled_batch(kind, model)
            outcome["ranks"][kind] = outcome_of(lambda m=model, b=batch: on_ranks(m, b), wanted[kind])
        return outcome


def verdicts(outcome: dict[str, Any]) -> tuple[str, str, str]:
    """(verdict on one process, on three ranks, note): the worst of all batches. That images alone raise is a note."""
    if "not tested" in outcome:
        return "not tested", "not tested", reason_of(outcome["not tested"])
    cells, notes = [], []
    for where, words in (("one process", "on one process"), ("ranks", "on three ranks")):
        kind, worst = next(((k, c) for v in ("WRONG", "raises") for k, c in outcome[where].items() if c.verdict == v), (None, None))
        only_images = worst is not None and worst.verdict == "raises" and kind in IMAGE_KINDS  # they come last
        cells.append("right" if worst is None or only_images else worst.verdict)
        if worst is not None:
            reason = reason_of(worst.detail) if worst.verdict == "raises" else worst.detail[:200]
            notes.append(f"images raise {words}: {reason}" if only_images else reason)
    return cells[0], cells[1], "; ".join(dict.fromkeys(notes))


def row(key: tuple[str, str], outcome: dict[str, Any]) -> str:
    """A class's line of the page."""
    return line_of([*key, f"`{classes()[key]}`"], verdicts(outcome), classes()[key])


_COLUMNS = "| kind | model type | class | one process | three ranks | note |\n|---|---|---|---|---|---|"
_HEAD = """# Encoders, encoder-decoders, vision-language models

The classes of transformers {version} for masked language modelling, sequence-to-sequence and image-text-to-text, as far as they are not on
the page of [causal LMs](families.md), tried with a tiny random model and text batches: plain, padded left, padded right. Verdicts as there.
Classes that require images or other inputs get them beside the text, or in place of an encoder's text: a note begins with these inputs.
"Also with": batches with images, plain and padded left, beside those of text alone. Classes of images or audio whose note
names no such inputs get text alone.
`python -m tests.integrations.other_families` writes this page.
"""


def page(rows: dict[tuple[str, str], str]) -> str:
    """The page with the lines of all classes."""
    import transformers

    lines = []
    for section in SECTIONS:
        cells = [[c.strip() for c in line.split("|")[4:6]] for key, line in rows.items() if key[0] == section]
        for verdict in ("right", "raises", "not tested", "WRONG"):
            lines.append(f"| {section} | {verdict} | {sum(c[0] == verdict for c in cells)} | {sum(c[1] == verdict for c in cells)} |")
    counts = "\n".join(["| kind | verdict | one process | three ranks |", "|---|---|---|---|", *lines])
    body = "\n".join(rows[key] for key in sorted(rows, key=lambda k: (SECTIONS.index(k[0]), k[1])))
    return f"{_HEAD.format(version=transformers.__version__)}\n{counts}\n\n{_COLUMNS}\n{body}\n"


def written_rows() -> dict[tuple[str, str], str]:
    """The lines of the page by (section, model type)."""
    lines = PAGE.read_text().partition(f"{_COLUMNS}\n")[2].splitlines() if PAGE.exists() else []
    return {(line.split("|")[1].strip(), line.split("|")[2].strip()): line for line in lines}


def main() -> None:
    """Try the classes of the named sections, or all, and write the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("sections", nargs="*", help=f"of {SECTIONS}, or single model types; default: all")
    parser.add_argument("--missing", action="store_true", help="only classes without a line")
    options = parser.parse_args()
    wanted = options.sections
    for key in classes():
        skipped = options.missing and key in written_rows()
        skipped |= not case_of(classes()[key]).is_possible
        if not skipped and (not wanted or key[0] in wanted or key[1] in wanted):
            outcome = try_class(key)
            line = row(key, outcome)
            print(line, flush=True)
            rows = {k: v for k, v in {**written_rows(), key: line}.items() if k in classes()}
            PAGE.write_text(page(rows))


if __name__ == "__main__":
    main()
