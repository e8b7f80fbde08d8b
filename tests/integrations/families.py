"""Every causal LM class of the installed transformers, tried with a tiny config: `python -m tests.integrations.families`.

Each class runs plain, packed and padded batches:

- on one process, against transformers' eager attention;
- on three virtual ranks, against eager attention on one process: the loss and the gradient of every parameter.

Each cell is "right", "raises" (an error of longspan or transformers says why), or "WRONG": a silent difference, or a crash.
Writes docs/families.md.
"""

from __future__ import annotations

import argparse
import inspect
import re
import warnings
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

import torch
from tests.integrations.family_cases import case_of, merged
from torch import Tensor

import longspan.integrations.transformers as lst
from longspan.integrations._mixers import mixers_of
from longspan.integrations.loss import shift_labels, token_loss
from longspan.testing import virtual_world

VOCAB, LENGTH, RANKS = 61, 45, 3
KINDS = ("plain", "packed", "left", "right")
PAGE = Path(__file__).parents[2] / "docs" / "families.md"

# Sizes by the names that configs give them; a config takes those of its fields.
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 32, "d_model": 32, "n_embd": 32, "dim": 32, "embedding_size": 32, "word_embed_proj_dim": 32,
    "intermediate_size": 24, "ffn_dim": 24, "ffn_hidden_size": 24, "d_ff": 24, "n_inner": 24, "decoder_ffn_dim": 24, "encoder_ffn_dim": 24,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "decoder_layers": 2, "encoder_layers": 2, "num_decoder_layers": 2,
    "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "decoder_attention_heads": 4, "encoder_attention_heads": 4,
    "num_decoder_attention_heads": 4, "num_encoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "max_position_embeddings": 256, "n_positions": 256, "n_ctx": 256, "max_seq_len": 256, "max_target_positions": 256,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "tie_word_embeddings": False,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2, "moe_k": 2,
    "moe_topk": 2,
    "n_group": 1, "topk_group": 1, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 24, "expert_ffn_hidden_size": 24,
    "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8, "qk_head_dim": 16,
    "vocab_size_per_layer_input": VOCAB, "hidden_size_per_layer_input": 8, "laurel_rank": 4,
    "first_k_dense_replace": 1, "sliding_window": 11, "is_decoder": True, "add_cross_attention": False, "use_cache": False,
    "rotary_dim": 4, "lru_width": 32, "attention_chunk_size": 11, "state_size": 8, "ssm_state_size": 8,
    "attention_dropout": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip


def _tiny_fields(kind: type) -> dict[str, Any]:
    """Values for the fields of a config class that `_SIZES` names, nested configs included."""
    names = {f.name for f in fields(kind)} if is_dataclass(kind) else set()
    settings = {name: value for name, value in _SIZES.items() if name in names or name in getattr(kind, "attribute_map", {})}
    if "kv_lora_rank" in names:  # multi-head latent attention
        settings["num_key_value_heads"] = 4
    for name in getattr(kind, "sub_configs", {}):
        sub = _type_of_part(kind, name)
        if name in names and is_dataclass(sub) and hasattr(sub, "model_type"):
            settings[name] = {**_tiny_fields(sub), **_SPECIAL.get(sub.model_type, {}), "model_type": sub.model_type}
    return settings


def _type_of_part(kind: type, name: str) -> type:
    """The class of a nested config: of the default config, or as declared if that is not valid."""
    from huggingface_hub.errors import StrictDataclassError
    from transformers import CONFIG_MAPPING

    try:
        return type(getattr(kind(), name, None))
    except StrictDataclassError:
        return CONFIG_MAPPING[kind.sub_configs_defaults[name].model_type]


# Settings without which a tiny config is not valid or lacks the family's own kinds of layers, by model type.
_HYBRID = {"layer_types": ["linear_attention", "full_attention"]}
_SPECIAL: dict[str, dict[str, Any]] = {
    "bailing_hybrid": _HYBRID,
    "kimi_linear": _HYBRID,
    "qwen3_5_moe_text": _HYBRID,
    "qwen3_5_text": _HYBRID,
    "qwen3_next": _HYBRID,
    "qwen4_exp_text": {
        "layer_types": ["linear_attention", "indexed_attention"], "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8,
        "indexer_budget": 16, "indexer_compress_ratio": 4,
    },
    "inkling2_vision": {"text_hidden_size": 32},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "bamba": {"mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8, "attn_layer_indices": [1]},
    "codegen": {"attn_pdrop": 0.0},
    "cohere_compass_text": {"layer_types": ["sliding_attention", "full_attention"]},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "dots1": {"n_shared_experts": 1},
    "dots3_note_audio_encoder": {"adapter_input_size": 32, "adapter_out_dim": 32},
    "dots3_note_vision_encoder": {"pyramid_num_routed": [-1, 4], "adapter_in_dim": 32, "adapter_out_dim": 32},
    "falcon_h1": {"mamba_d_ssm": 64, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0, "intermediate_size": [24, 24]},
    "gemma4_text": {"layer_types": ["sliding_attention", "full_attention"], "num_kv_shared_layers": 0},
    "gpt2": {"attn_pdrop": 0.0},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": 11},
    "gptj": {"attn_pdrop": 0.0},
    "granite_docling_vision": {"out_hidden_size": 32},
    "granitemoehybrid": {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"], "no_rope_layers": [1, 0], "moe_layers": [1], "floor_scale": 8,
        "attn_scale": 0.5,
    },
    "mamba2": {"num_heads": 8, "n_groups": 2},
    "reformer": {
        "axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 9, "attention_head_size": 8,
        "local_num_chunks_before": 1, "local_num_chunks_after": 0,
    },
    "zamba": {"layers_block_type": ["mamba", "hybrid"]},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"], "mamba_d_state": 8, "mamba_ngroups": 1, "n_mamba_heads": 8},
    "zaya": {"num_experts_per_tok": 1},
}  # fmt: skip


def tiny_settings(kind: type, class_name: str) -> dict[str, Any]:
    """The settings of a tiny config of a config class, for a class of models."""
    return merged({**_tiny_fields(kind), **_SPECIAL.get(kind.model_type, {})}, case_of(class_name).settings)


def causal_lm_types() -> dict[str, str]:
    """Class name by model type."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(model_type: str) -> Any:
    """A tiny config of a model type."""
    import transformers
    from transformers import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    config = kind(**tiny_settings(kind, causal_lm_types()[model_type]))
    # Some classes take a part of the config that is registered for their model type.
    wanted = getattr(transformers, causal_lm_types()[model_type]).config_class
    parts = [config, *(getattr(config, name, None) for name in getattr(kind, "sub_configs", {}))]
    return next((part for part in parts if isinstance(part, wanted)), config)


def tiny_model(model_type: str, implementation: str) -> Any:
    """The model of a type, with the same weights for each implementation."""
    import transformers

    return made_model(getattr(transformers, causal_lm_types()[model_type]), lambda: tiny_config(model_type), implementation)


def made_model(kind: Any, config: Callable[[], Any], implementation: str) -> Any:
    """A model of a class, by `prepared_model`. Raises RuntimeError if its config, which `config` makes, is not tiny."""
    with torch.device("meta"):
        size = sum(p.numel() for p in kind._from_config(config(), attn_implementation="eager").parameters())
    if size > 60e6:
        raise RuntimeError(f"no tiny config: {size / 1e6:.0f} M parameters")
    torch.manual_seed(3)
    return prepared_model(kind._from_config(config(), attn_implementation=implementation, dtype=torch.float32))


def prepared_model(model: Any) -> Any:
    """The model in the dtype of its case, with the same weights each time; in eval mode unless its case says train mode."""
    case = case_of(type(model).__name__)
    model.train(case.train).to(case.dtype)
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    return with_random_weights(model)


def with_random_weights(model: Any) -> Any:
    """The model, with the same matrices each time. Gates of one number are 0.5: by 0, layers behind them would do nothing."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.copy_(0.15 * torch.randn(parameter.shape, generator=generator))
            elif parameter.numel() == 1:
                parameter.fill_(0.5)
    return model


def batch_of(kind: str) -> dict[str, Tensor]:
    """Two rows of tokens with labels: plain, packed documents, padded left or right; "many rows": plain, more rows than ranks."""
    rows = RANKS + 1 if kind == "many rows" else 2
    ids = torch.randint(3, VOCAB, (rows, LENGTH), generator=torch.Generator().manual_seed(7))
    labels = ids.clone()
    batch = {"input_ids": ids, "labels": labels}
    place = torch.arange(LENGTH)[None]
    if kind == "packed":
        starts = torch.zeros(2, LENGTH, dtype=torch.long)
        for row, cuts in enumerate(([14, 21, 38], [5, 30])):
            starts[row, cuts] = torch.tensor(cuts)
        batch["position_ids"] = place - starts.cummax(1).values
    if kind in ("left", "right"):
        pads = torch.tensor([[4], [13]])
        real = place >= pads if kind == "left" else place < LENGTH - pads
        batch["attention_mask"] = real.long()
        labels[~real] = -100
        if kind == "left":
            labels.scatter_(1, pads, -100)  # padding would have to predict the first token
    return batch


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of one batch: "right", "raises" or "WRONG"; why, or the error of loss and gradients."""

    verdict: str
    detail: str = ""


def results(model: Any, arguments: dict[str, Any]) -> tuple[Tensor, list[Tensor]]:
    """(loss, the gradient of every parameter)."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    loss = _loss_of(model(**arguments), arguments)
    grads = torch.autograd.grad(loss, parameters, allow_unused=True)
    return loss.detach().double(), [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, grads)]


def _loss_of(output: Any, arguments: dict[str, Any]) -> Tensor:
    """The loss of an output; of its logits for a class that computes none."""
    if getattr(output, "loss", None) is not None:
        return output.loss
    shifted = arguments["shift_labels"] if "shift_labels" in arguments else shift_labels(arguments["labels"])
    return token_loss(output.logits, shifted, count=arguments.get("num_items_in_batch", (shifted != -100).sum()))


def _differs(got: tuple[Tensor, list[Tensor]], want: tuple[Tensor, list[Tensor]]) -> tuple[float, float]:
    """(relative error of the loss, largest error of a gradient relative to the largest gradient of its parameter)."""
    loss = float((got[0] - want[0]).abs() / want[0].abs())
    pairs = [(g, w) for g, w in zip(got[1], want[1]) if w.numel()]
    largest = max(float(w.abs().max()) for _, w in pairs)
    grads = [float((g - w).abs().max()) / max(float(w.abs().max()), 1e-3 * largest) for g, w in pairs]
    return loss, max(grads)


def outcome_of(run: Any, want: tuple[Tensor, list[Tensor]]) -> Outcome:
    try:
        got = run()
    except Exception as error:
        return failure_of(error)
    loss, grads = _differs(got, want)
    right = loss < 1e-5 and grads < 2e-4
    return Outcome(verdict="right" if right else "WRONG", detail=f"loss {loss:.0e}, gradients {grads:.0e}")


def failure_of(error: BaseException) -> Outcome:
    text = " ".join(str(error).split())
    explained = isinstance(error, (ValueError, NotImplementedError)) and any(word in text for word in ("longspan", "prepare_batch"))
    return Outcome(verdict="raises" if explained else "WRONG", detail=f"{type(error).__name__}: {text}"[:600])


def try_family(model_type: str, kinds: tuple[str, ...] = KINDS) -> dict[str, Any]:
    """{"one process": {kind: Outcome}, "ranks": {kind: Outcome}}, or {"not tested": why} if eager attention does not run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            eager = tiny_model(model_type, "eager")
        except Exception as error:
            return {"not tested": failure_of(error).detail}
        if mixers_of(eager):  # on ranks, such layers divide a batch by its rows
            kinds = (*kinds, "many rows")
        wanted: dict[str, Any] = {}
        batches = {kind: case_of(type(eager).__name__).batch(batch_of(kind)) for kind in kinds}
        for kind in kinds:
            try:
                wanted[kind] = results(eager, {**batches[kind], **without_cache(eager)})
            except Exception as error:
                wanted[kind] = failure_of(error).detail
        if isinstance(wanted[kinds[0]], str):
            return {"not tested": wanted[kinds[0]]}
        outcome: dict[str, Any] = {"one process": {}, "ranks": {}}
        try:
            model = tiny_model(model_type, "longspan")
        except Exception as error:
            failure = failure_of(error)
            return {where: dict.fromkeys(kinds, failure) for where in outcome}
        for kind in kinds:
            if isinstance(wanted[kind], str):
                outcome["one process"][kind] = outcome["ranks"][kind] = Outcome(verdict="not tested", detail=wanted[kind])
                continue
            arguments = {**batches[kind], **without_cache(model)}
            outcome["one process"][kind] = outcome_of(lambda m=model, a=arguments: results(m, a), wanted[kind])
            outcome["ranks"][kind] = outcome_of(lambda m=model, b=batches[kind]: on_ranks(m, b), wanted[kind])
        return outcome


def without_cache(model: Any) -> dict[str, Any]:
    return {"use_cache": False} if "use_cache" in inspect.signature(model.forward).parameters else {}


def on_ranks(model: Any, batch: dict[str, Tensor], **options: Any) -> tuple[Tensor, list[Tensor]]:
    """The loss and the gradients of all ranks, summed. `options`: for `prepare_batch`."""

    def rank(mesh: Any) -> tuple[Tensor, list[Tensor]]:
        return results(model, dict(lst.prepare_batch(batch, mesh, config=model, gradients="sum", **options)))

    shares = virtual_world(RANKS).run(rank)
    return sum(s[0] for s in shares), [torch.stack(parts).sum(0) for parts in zip(*(s[1] for s in shares))]


# ----------------------------------------------------------------------------------------------------------------------- the page

NOT_LISTED = "not on the list of types for ranks"
# Beginnings of reasons by a part of the message.
_REASONS = (
    (r"got an encoder(-decoder)? of type ('\S+'), which is not supported", NOT_LISTED),
    (r"expected config= to be an encoder-decoder model", NOT_LISTED),
    (r"expected layers of type .*, got (.*) in \w+:", r"layers of type \1"),
    (r"in which (\S+?),? .*would mix", r"`\1` mixes tokens"),
    (r"computes its loss by code of its own", "computes its loss by code of its own"),
    (r"keeps a state between forwards", "keeps a state between forwards"),
    (r"takes position_ids", "takes no position_ids"),
    (r"computes with its mask", "computes with its mask as with a tensor"),
    (r"no attention layer used it", "attention code of its own"),
    (r"but (\S+?),? .*did not use it", r"`\1` does not use the plan"),
    (r"got the unknown keyword ('\w+')", r"attention keyword \1"),
    (r"got the part ('\w+')", r"mask part \1"),
    (r"classes of its own", "attention classes of its own"),
    (r"expected this rank's \d+ tokens as the first argument of (\w+)", r"`\1` mixes tokens in another order of dims"),
    (r"expected labels of shape .* got shape \(\d+, \d+, \d+\)", "labels by codebook"),
    (r"expected labels of shape .* got shape", "labels of other tokens than `input_ids`"),
    (r"expected queries and keys of the same tokens", "queries and keys of different tokens"),
    (r"expected inputs_embeds \[.* of the whole batch for (\w+)", r"`\1` embeds images itself"),
    (r"got not a causal layer, (\w+)", r"`\1` is not causal"),
    (r"expected a mask for \d+ queries over \d+ keys", "cross-attention with `is_causal` set"),
    (r"got attention_mask of (shape|type)", "makes a mask of query-key pairs"),
    (r"shows tokens of padding on the left", "its mask shows padding on the left"),
    (r"^KeyError: '(full|sliding)_attention'", "no RoPE parameters by layer type"),
)


def reason_of(detail: str) -> str:
    """An error in a few words."""
    for pattern, text in _REASONS:
        match = re.search(pattern, detail)
        if match:
            return match.expand(text).replace("'", "`")
    kind, _, text = detail.replace("|", "/").partition(": ")
    text = re.split(r"(?<=[a-z`)])\. ", re.split(r"\w+Error: ", text)[-1])[0]  # the first sentence of the cause
    if " " not in text:
        return f"{kind}: {text}"
    return text if len(text) <= 120 else f"{text[:120].rsplit(' ', 1)[0]} …"


def verdicts(outcome: dict[str, Any]) -> tuple[str, str, str]:
    """(verdict on one process, on three ranks, note) of a family."""
    if "not tested" in outcome:
        return "not tested", "not tested", reason_of(outcome["not tested"])
    columns, notes = [], []
    for where in ("one process", "ranks"):
        cells = {kind: cell for kind, cell in outcome[where].items() if cell.verdict != "not tested"}
        kinds = {cell.verdict for cell in cells.values()}
        packed = cells.get("packed")
        if kinds == {"right"}:
            columns.append("right")
        elif "WRONG" in kinds:
            columns.append("WRONG")
            notes.append(next(cell.detail for cell in cells.values() if cell.verdict == "WRONG"))
        elif packed is not None and packed.verdict == "raises" and {c.verdict for k, c in cells.items() if k != "packed"} == {"right"}:
            columns.append("right")
            stated = "Give document_ids" in packed.detail
            notes.append("packed with `document_ids` only" if stated else "not packed: it would not separate documents")
        else:
            columns.append("raises")
            notes.append(next(reason_of(cell.detail) for cell in cells.values() if cell.verdict == "raises"))
    return columns[0], columns[1], "; ".join(dict.fromkeys(notes))


def row(model_type: str, outcome: dict[str, Any]) -> str:
    """A family's line of the page."""
    return line_of([model_type, f"`{causal_lm_types()[model_type]}`"], verdicts(outcome), causal_lm_types()[model_type])


def line_of(first: list[str], cells: tuple[str, str, str], class_name: str) -> str:
    """A line of a table: first cells, verdicts and note. A note begins with inputs beside tokens and the required package."""
    case = case_of(class_name)
    given = case.batch(batch_of("plain"), with_images=True).keys() - batch_of("plain").keys()
    inputs = f"{'with' if case.images is None else 'also with'} {', '.join(f'`{name}`' for name in sorted(given))}" if given else ""
    package = f"needs {case.package}" if case.package else ""
    dtype = "" if case.dtype == torch.float32 else f"in {case.dtype}".replace("torch.", "")
    return f"| {' | '.join([*first, *cells[:2], '; '.join(filter(None, [inputs, package, dtype, cells[2]]))])} |"


def page(rows: dict[str, str]) -> str:
    """The page with the lines of all families."""
    import transformers

    cells = [[cell.strip() for cell in line.split("|")[3:5]] for line in rows.values()]
    counts = "\n".join(
        f"| {verdict} | {sum(c[0] == verdict for c in cells)} | {sum(c[1] == verdict for c in cells)} |"
        for verdict in ("right", "raises", "not tested", "WRONG")
    )
    lines = "\n".join(rows[name] for name in sorted(rows))
    head = _HEAD.format(version=transformers.__version__, tokens=LENGTH)
    return f"{head}\n| families | one process | three ranks |\n|---|---|---|\n{counts}\n\n{_COLUMNS}\n{lines}\n"


_COLUMNS = "| model type | class | one process | three ranks | note |\n|---|---|---|---|---|"
_HEAD = """# transformers families

The causal LM of every model type of transformers {version}, tried with a tiny random model.
`python -m tests.integrations.families` writes this page.

Batches of {tokens} tokens are plain, packed (`position_ids`), or padded left or right. On one process, the loss and the gradient of every
parameter are compared with eager attention. On three ranks, their sums over ranks are compared with eager attention on one process.
Models with layers without attention also run a plain batch of more rows than ranks, which these layers divide by rows. Notes name inputs
beside tokens, and packages, that a class requires. If both columns raise for different reasons, the note has that of one process first.

- *right*: loss to 1e-5, gradients to 2e-4, in float32 if the note does not say otherwise.
- *raises*: an error says why, before or instead of a result.
- *not tested*: eager attention does not run on these batches, or there is no tiny config (see the note).
- *WRONG*: a silent difference or a crash.
"""


def main() -> None:
    """Try all families, or those named, and write the page: all lines anew, or those of the named families."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="model types; default: all")
    names = parser.parse_args().names or list(causal_lm_types())
    rows = written_rows() if PAGE.exists() else {}
    for name in [name for name in names if case_of(causal_lm_types()[name]).is_possible]:
        outcome = try_family(name)
        rows[name] = row(name, outcome)
        print(rows[name], flush=True)
        for where, cells in outcome.items() if "not tested" not in outcome else ():
            for kind, cell in cells.items():
                if cell.verdict != "right":
                    print(f"    {where}, {kind}: {cell.verdict}: {cell.detail}", flush=True)
        PAGE.write_text(page({known: line for known, line in rows.items() if known in causal_lm_types()}))


def for_installed_version(line: str) -> str | None:
    """A line of a page, without the version for which it is; None if another one is installed.

    Lines are for one version if the newest cannot construct the model.
    """
    import transformers

    version = re.search(r"; with transformers (\S+)", line)
    if version is None:
        return line
    return line.replace(version[0], "") if version[1] == transformers.__version__ else None


def written_rows() -> dict[str, str]:
    """The lines of the page by model type."""
    lines = PAGE.read_text().partition(f"{_COLUMNS}\n")[2].splitlines()
    return {line.split("|")[1].strip(): line for line in lines}


if __name__ == "__main__":
    main()
