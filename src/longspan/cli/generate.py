"""`longspan generate`: text from a local checkpoint, or from a tiny random model, over one process or several."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Annotated, Any

import typer

from longspan.cli import parse
from longspan.cli.app import UsageError, describe

MAX_PAGE = 1 << 16  # tokens; attention copies whole pages


def generate(
    checkpoint: Annotated[Path | None, typer.Option(help="folder of a transformers checkpoint; default: a tiny random model")] = None,
    prompt: Annotated[str | None, typer.Option(help="text to continue; default: --context random tokens")] = None,
    context: Annotated[str | None, typer.Option(help="random prompt tokens instead of --prompt: 64k; default: 256")] = None,
    new: Annotated[str, typer.Option(help="tokens to generate")] = "64",
    chunk: Annotated[str, typer.Option(help="prompt tokens per forward pass")] = "4096",
    temperature: Annotated[float, typer.Option(help="0 for the most likely token")] = 0.0,
    page_size: Annotated[str, typer.Option(help="tokens per page of the KV cache")] = "64",
    kv_dtype: Annotated[str | None, typer.Option(help="dtype of the KV cache: fp8; default: the model's")] = None,
    processes: Annotated[str, typer.Option(help="processes that share the KV cache; under torchrun: torchrun's")] = "1",
    seed: Annotated[int, typer.Option(help="of random weights, prompts and sampling")] = 0,
) -> int:
    """Generate text from a paged KV cache.

    The pages are spread over all processes. Prints tokens per second. The text goes to stdout, progress and rates to stderr. Uses CUDA and
    NCCL if available.
    """
    if temperature != 0.0 and not 0.01 <= temperature <= 1000.0:
        raise UsageError(f"--temperature: expected 0, or a number from 0.01 to 1000, got {temperature}")
    if prompt is not None and not prompt:
        raise UsageError("--prompt: expected a text, got an empty one")
    if any("\ud800" <= letter <= "\udfff" for letter in prompt or ""):  # bytes of the command line that are not UTF-8
        raise UsageError("--prompt: expected UTF-8 text")
    if prompt is not None and context is not None:
        raise UsageError("--context: expected either --prompt or --context, the number of random prompt tokens; got both")
    if checkpoint is not None and not (checkpoint / "config.json").is_file():
        raise UsageError(f"--checkpoint: expected a folder with config.json, got {checkpoint}")
    counts = {"new_tokens": parse.count(new, "--new"), "chunk": parse.count(chunk, "--chunk")}
    counts["page_size"] = parse.count(page_size, "--page-size")
    if counts["page_size"] > MAX_PAGE:
        raise UsageError(f"--page-size: expected at most {MAX_PAGE} tokens, got {page_size}")
    if kv_dtype not in (None, "fp8"):
        raise UsageError(f"--kv-dtype: expected fp8, or no --kv-dtype for the model's dtype, got {kv_dtype!r}")
    parse.seed(seed)
    tokens, ranks = parse.count(context or "256", "--context"), parse.processes(processes)

    import torch

    from longspan._training import launch

    request: dict[str, Any] = {
        "checkpoint": checkpoint,
        "prompt": prompt,
        "tokens": tokens,
        "temperature": temperature,
        "seed": seed,
        **counts,
    }
    request["kv_dtype"] = None if kv_dtype is None else torch.float8_e4m3fn
    if launch.world_size(ranks) == 1:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        return _generate(device, request)
    return launch.run_ranks(_generate, ranks, request, threads=max(1, (torch.get_num_threads() or 1) // ranks))


def _generate(device: Any, request: dict[str, Any]) -> int:
    """One rank's part. Rank 0 prints."""
    import torch
    import torch.distributed as dist

    warnings.filterwarnings("ignore", category=UserWarning, module="transformers.*")
    try:
        from longspan.integrations import generation
    except ImportError as error:
        raise UsageError(describe(error)) from None
    seed = request["seed"]
    if request["checkpoint"] is None:
        model, tokenizer = generation.tiny_model(device, seed), generation.ByteTokenizer()
    else:
        try:
            model, tokenizer = generation.load_checkpoint(request["checkpoint"], device)
        except (OSError, ValueError) as error:
            raise UsageError(f"--checkpoint: {request['checkpoint']}: {describe(error)}") from None
    vocabulary = model.config.get_text_config().vocab_size
    if request["prompt"] is None:
        ids = torch.randint(0, vocabulary, (request["tokens"],), generator=torch.Generator().manual_seed(seed)).tolist()
    else:
        ids = tokenizer.encode(request["prompt"])
    options = generation.GenerateOptions(
        stop=frozenset() if request["checkpoint"] is None else generation.stop_tokens(model, tokenizer), seed=seed,
        **{name: request[name] for name in ("new_tokens", "chunk", "temperature", "page_size", "kv_dtype")},
    )  # fmt: skip
    mesh = dist.group.WORLD if dist.is_initialized() else None
    output = _Output(tokenizer, len(ids), options.new_tokens, shown=mesh is None or dist.get_rank() == 0)
    prompt = torch.tensor([ids], device=device)
    rates = generation.generate(model, prompt, options, mesh=mesh, prefilled=output.prefilled, decoded=output.decoded)
    where = "one process" if mesh is None else f"{dist.get_world_size()} processes"
    output.end(f"{rates}; {where}, {device}")
    return 0


class _Output:
    """Streams text to stdout, and a progress line to stderr if that is a terminal. Silent unless `shown`."""

    def __init__(self, tokenizer: Any, prompt_tokens: int, new_tokens: int, *, shown: bool) -> None:
        self.tokenizer, self.prompt_tokens, self.new_tokens, self.shown = tokenizer, prompt_tokens, new_tokens, shown
        self.tokens: list[int] = []
        self.printed = ""

    def prefilled(self, tokens: int) -> None:
        self._progress(f"prefill {tokens}/{self.prompt_tokens}")

    def decoded(self, token: int) -> None:
        self.tokens.append(token)
        if not self.shown:
            return
        if len(self.tokens) == 1:
            self._progress("")
        text = self.tokenizer.decode(self.tokens, skip_special_tokens=True)
        if not text.endswith("\ufffd"):  # a character may consist of several tokens
            self._print(text)
        if not sys.stdout.isatty():
            self._progress(f"decode {len(self.tokens)}/{self.new_tokens}")

    def _print(self, text: str) -> None:
        """Print what follows the text printed so far. If a decoder has changed that text, begin again on a new line."""
        if not text.startswith(self.printed):
            self.printed = ""
            print(flush=True)
        print(text[len(self.printed) :], end="", flush=True)
        self.printed = text

    def end(self, rates: str) -> None:
        if self.shown:
            self._print(self.tokenizer.decode(self.tokens, skip_special_tokens=True))
            print(flush=True)
            print(("\r\x1b[K" if sys.stderr.isatty() else "") + rates, file=sys.stderr, flush=True)

    def _progress(self, text: str) -> None:
        if self.shown and sys.stderr.isatty():
            print(f"\r\x1b[K{text}", end="", file=sys.stderr, flush=True)
