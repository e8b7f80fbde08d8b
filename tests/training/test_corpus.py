"""The corpus: which files and bytes it takes, and sequences against a slow reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from longspan._training import corpus as module
from longspan._training.corpus import BEGIN, VOCAB, corpus
from longspan.integrations.loss import IGNORED


def test_sequences_equal_a_slow_reference(tmp_path: Path) -> None:
    texts = {"a.txt": b"abcdefg", "b.txt": b"hij", "c.txt": b"k" * 12}
    for name, text in texts.items():
        (tmp_path / name).write_bytes(text)
    length = 9
    text = corpus(tmp_path, length=length)
    stream, starts = text.stream.tolist(), text.starts.tolist()
    assert (BEGIN, VOCAB) == (256, 257) and text.stream.dtype == torch.int16 and len(stream) == 7 + 3 + 12 + 3
    documents = [bytes(stream[a + 1 : b]) for a, b in zip(starts, [*starts[1:], len(stream)])]
    assert sorted(documents) == sorted(texts.values()) and all(stream[a] == BEGIN for a in starts)
    for index in range(7):
        begin = index * length % (25 - length)
        fields = text.sequence(index, length)
        assert {name: (tuple(value.shape), value.dtype) for name, value in fields.items()} == dict.fromkeys(
            ("input_ids", "shift_labels", "document_ids", "position_ids"), ((1, length), torch.int64)
        )
        for i in range(length):
            at = begin + i
            document = sum(start <= at for start in starts)
            label = stream[at + 1] if stream[at + 1] != BEGIN else IGNORED
            want = (stream[at], label, document, at - max(starts[document - 1], begin))
            assert tuple(int(value[0, i]) for value in fields.values()) == want


def test_the_order_of_files_depends_on_the_seed(tmp_path: Path) -> None:
    for i in range(6):
        (tmp_path / f"{i}.txt").write_text(str(i))
    orders = [corpus(tmp_path, length=3, seed=seed).stream[1::2].sub(48).tolist() for seed in (0, 1)]
    want = [torch.randperm(6, generator=torch.Generator().manual_seed(seed)).tolist() for seed in (0, 1)]
    assert orders == want and corpus(tmp_path, length=3).stream[1::2].sub(48).tolist() == want[0] != want[1]


def test_digests_tell_the_borders_of_documents_apart(tmp_path: Path) -> None:
    digests = set()
    for i, parts in enumerate((("ab", "c"), ("a", "bc"), ("abc",))):
        for j, part in enumerate(parts):
            (tmp_path / str(i)).mkdir(exist_ok=True)
            (tmp_path / str(i) / f"{j}.txt").write_text(part)
        digests.add(corpus(tmp_path / str(i), length=1).digest)
    assert len(digests) == 3 and {len(digest) for digest in digests} == {16}


def test_text_of_one_token_more_than_a_sequence_and_its_label_is_enough(tmp_path: Path) -> None:
    path = tmp_path / "text.txt"
    path.write_text("x" * 9)
    assert len(corpus(path, length=8).sequence(3, 8)["input_ids"][0]) == 8
    with pytest.raises(ValueError, match="expected text of 11 bytes or more for sequences of 9 tokens, got 10 in 1 files"):
        corpus(path, length=9)


def test_hidden_and_empty_files_are_left_out_and_folders_are_searched(tmp_path: Path) -> None:
    for name, text in {"b/c.txt": "one", ".git/d.txt": "no", "b/.e.txt": "no", "f.txt": "two", "g.txt": ""}.items():
        path = tmp_path / ".parent" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    stream = corpus(tmp_path / ".parent", length=3).stream.tolist()
    assert sorted(stream) == sorted([*b"one", *b"two", BEGIN, BEGIN])
    with pytest.raises(ValueError, match=r"there is no file or directory .*missing"):
        corpus(tmp_path / "missing", length=3)


def test_the_corpus_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert module._MAX_BYTES == 8 * 2**20
    monkeypatch.setattr(module, "_MAX_BYTES", 10)
    for name, sizes, want in (("equal", (5, 5, 5), 2), ("one past", (5, 4, 5, 5), 3), ("long", (25, 3), 1)):
        folder = tmp_path / name
        folder.mkdir()
        for i, size in enumerate(sizes):
            (folder / f"{i}.txt").write_bytes(b"y" * size)
        monkeypatch.setattr(torch, "randperm", lambda n, **_: torch.arange(n))
        text = corpus(folder, length=2)
        assert len(text.starts) == want and len(text.stream) - want == sum(min(size, 10) for size in sizes[:want])


def test_without_a_path_the_corpus_is_pythons_library() -> None:
    files = module._files(None)
    assert files == sorted(files) and {"os.py", "random.py"} <= {file.name for file in files} and {f.suffix for f in files} == {".py"}


@pytest.mark.parametrize(
    ("data", "error"),
    [
        (b"abc", None),
        ("ab\u20ac".encode()[:-1], None),  # a character that is cut at the end
        (b"0123456789\xff567", None),  # in the last 4 bytes, as a character that is cut
        (b"0123456789\xff5678", "byte 10 is not UTF-8"),
        (b"ab\xffdefgh", "byte 2 is not UTF-8"),
        (b"ab\0cd\0", "zero byte at 2"),
        (b"a" * ((1 << 20) - 2) + "\u20ac".encode() + b"a" * 100, None),  # cut by the end of what is checked
        (b"a" * ((1 << 20) + 8) + b"\xff" * 20, None),  # the first MiB is checked
    ],
)
def test_files_that_are_not_text_are_skipped_in_folders_and_named_alone(data: bytes, error: str | None, tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    if error is None:
        assert module._text(path, strict=True) == data == module._text(path, strict=False)
        return
    assert module._text(path, strict=False) == b""
    with pytest.raises(ValueError, match=f"{path} is not text: {error}"):
        module._text(path, strict=True)
    (tmp_path / "good").write_text("good text")
    assert len(corpus(tmp_path, length=3).starts) == 1
    with pytest.raises(ValueError, match="is not text"):
        corpus(path, length=1)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read: Is a directory"):
        module._text(tmp_path, strict=False)
