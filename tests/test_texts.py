"""Texts are read and tokenised in pieces, whose tokens are those of the whole text at once."""

from __future__ import annotations

import io
import itertools
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from typer.testing import CliRunner

from acutance.cli import app
from acutance.corpus import load_model
from acutance.corpus.texts import CorpusError, Text, bundled, each_window, read, windows
from acutance.judging.judge_model import hold_out, text_windows

PIECE = 1 << 16


def _prose() -> str:
    page = bundled().content
    assert isinstance(page, str)
    return page


#: Line ends of all kinds, indentation, tables, code, other scripts, and words without an end.
MIXED = "\n".join(
    [
        _prose()[:6000],
        _prose()[:4000].replace(". ", ".\n\n\n").replace("\n", "\r\n"),
        _prose()[:4000].replace(" ", "  \t"),
        "def f(x):\n    if x:\n        return [0]\n\n\n" * 80,
        "Größe, façade, e\u0301clair, 注意力的锐度取决于温度。🙂🏽 " * 60,
        "注意力的锐度取决于温度\n" * 150,
        "aaaa" * 900 + "\n" + "0123456789abcdef" * 300,
        "a  [MASK] \n<s> </s>\n" * 100,
        _prose()[6000:9000],
    ]
)
LONG = MIXED * (8 * PIECE // len(MIXED))


def _trained(model: Any, trainer: Any, *, before: Any = None, normalizer: Any = None) -> Any:
    """A tokenizer trained on the text."""
    tokenizer = Tokenizer(model)
    if before is not None:
        tokenizer.pre_tokenizer = before
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.decoder = decoders.ByteFallback()
    tokenizer.train_from_iterator([MIXED], trainer)
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")


def _byte_level() -> Any:
    split = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False
    )
    return _trained(models.BPE(), trainer, before=split)


def _newlines_with_punctuation() -> Any:
    """As in Llama 3 and Qwen: line ends belong to what is before them."""
    pattern = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    from tokenizers import Regex

    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(pattern), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=alphabet, special_tokens=["<unk>"], show_progress=False
    )
    return _trained(models.BPE(), trainer, before=split)


def _whole_text() -> Any:
    """As in Llama 2: no words, a space before the text, and merges across spaces."""
    normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=["<unk>"], show_progress=False)
    model = models.BPE(unk_token="<unk>", fuse_unk=True)
    return _trained(model, trainer, normalizer=normalizer)


def _unigram() -> Any:
    """As in T5 and XLM-R: the likeliest pieces of words, with line ends as spaces."""
    trainer = trainers.UnigramTrainer(
        vocab_size=400, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
    )
    normalizer = normalizers.Sequence(
        [normalizers.NFKC(), normalizers.Replace("\n", " "), normalizers.Strip()]
    )
    return _trained(
        models.Unigram(), trainer, before=pre_tokenizers.Metaspace(), normalizer=normalizer
    )


def _word_pieces() -> Any:
    return load_model.load_model(None).tokenizer


def _backwards() -> Any:
    """No cut leaves the tokens as they are."""
    return lambda text, **_: {"input_ids": [ord(letter) for letter in reversed(text)]}


KINDS = [
    _byte_level, _newlines_with_punctuation, _whole_text, _unigram, _word_pieces, _backwards,
]  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_have_the_tokens_of_the_whole_text(kind: Callable[[], Any], tmp_path: Path) -> None:
    tokenizer = kind()
    file = tmp_path / "text"
    file.write_bytes(LONG.encode())
    assert file.read_text(encoding="utf-8") != LONG  # its line ends are read as one kind
    for content, same in (
        (LONG, LONG),
        (file, file.read_text(encoding="utf-8")),
        (io.BytesIO(LONG.encode()), LONG),
    ):
        whole = tokenizer(same, add_special_tokens=False, verbose=False)["input_ids"]
        text = Text("text", content)
        parts = list(text.tokens(tokenizer))
        assert list(itertools.chain.from_iterable(parts)) == whole
        assert list(text.tokenised(tokenizer)) == whole
        assert (len(parts) > 6) == (kind is not _backwards)


def test_a_run_of_blanks_is_not_cut_where_its_beginning_is_out_of_sight() -> None:
    def pairs(text: str, **_: Any) -> dict[str, list[int]]:
        """Two line ends are a token, from the left, as byte pairs merge."""
        return {"input_ids": [len(part) for part in re.findall(r"\n\n|.|\n", text)]}

    text = ("word" + "\n" * 701) * 500
    assert Text("blanks", text).tokenised(pairs).tolist() == pairs(text)["input_ids"]


class Watched:
    """A tokenizer of characters that notes the longest text it was given."""

    longest = calls = 0

    def __call__(self, text: str, **_: Any) -> dict[str, list[int]]:
        self.longest = max(self.longest, len(text))
        self.calls += 1
        return {"input_ids": [ord(letter) % 200 for letter in text]}

    def num_special_tokens_to_add(self, pair: bool) -> int:
        return 0


def test_windows_come_while_the_text_is_read(tmp_path: Path) -> None:
    """Neither the text nor its tokens are in memory as a whole, and progress starts at once."""
    file, seen, tokenizer = tmp_path / "text", list[int](), Watched()
    file.write_text(_prose() * 90)
    (text,) = read([str(file)])
    size = file.stat().st_size
    assert text.size == size
    watched = Text(text.name, text.content, advance=seen.append)
    found = each_window([watched], tokenizer, 64)
    next(found)
    assert sum(seen) < 4 * PIECE < size
    last = list(found)[-1]
    assert sum(seen) == size
    assert max(seen) <= PIECE
    assert tokenizer.longest <= 3 * PIECE
    assert last.itemsize == 4


def test_what_reads_the_start_of_a_text_reads_no_more(tmp_path: Path) -> None:
    from acutance.verification.inputs import token_ids

    file, seen = tmp_path / "text", list[int]()
    file.write_text(_prose() * 90)
    loaded = load_model.load_model(None)
    ids = token_ids(loaded, [Text("text", file, advance=seen.append)], 64)
    assert ids.tolist() == [list(windows([Text("text", file)], loaded.tokenizer, 64)[0])]
    assert sum(seen) < 4 * PIECE


def test_losses_are_measured_on_the_same_windows_however_texts_are_read(tmp_path: Path) -> None:
    loaded, file = load_model.load_model(None), tmp_path / "text"
    file.write_text(_prose() * 3)
    rows = [
        [
            dict(turn.batch)["input_ids"]
            for turn in text_windows(loaded, given, [32, 64], 5, 0).turns
        ]
        for given in ([Text("a", file)], [Text("a", _prose() * 3)])
    ]
    assert all(torch.equal(one, other) for one, other in zip(*rows, strict=True))
    tokens = Text("a", file).tokenised(loaded.tokenizer)
    held = hold_out(loaded, [Text("a", file)], 64)
    parts = [text.tokenised(loaded.tokenizer) for text in (*held.fit, *held.judged)]
    assert parts[0] + parts[1] == tokens


@pytest.mark.parametrize("place", [0, PIECE - 1, PIECE, 3 * PIECE + 7])
def test_a_byte_that_is_no_text_is_named_wherever_it_is(tmp_path: Path, place: int) -> None:
    file = tmp_path / "text"
    file.write_bytes(b"a" * place + b"\xff" + b"b" * PIECE)
    with pytest.raises(
        CorpusError, match=rf"is not UTF-8 text: invalid start byte at byte {place}$"
    ):
        read([str(file)])
    file.write_bytes(b"a" * place + "注".encode()[:2])
    with pytest.raises(CorpusError, match=rf"unexpected end of data at byte {place}$"):
        read([str(file)])


def test_an_interrupt_is_answered_within_a_piece(tmp_path: Path) -> None:
    file, tokenizer = tmp_path / "text", Watched()
    file.write_text(_prose() * 90)
    given = Text("text", file, advance=lambda _: signal.raise_signal(signal.SIGINT))
    with pytest.raises(KeyboardInterrupt, match=r"^$"):
        list(each_window([given], tokenizer, 64))
    assert tokenizer.calls <= 4


def test_reading_shows_a_bar(tmp_path: Path) -> None:
    file = tmp_path / "text"
    file.write_text(_prose() * 90)
    given = ["probe", "--text", str(file), "--length", "16", "--every", "100000"]
    done = CliRunner().invoke(app, given, env={"FORCE_COLOR": "1", "COLUMNS": "100"})
    assert done.exit_code == 0, done.output
    assert "reading the text" in done.stderr
