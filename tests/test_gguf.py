"""GGUF files as models: what loads is the model that was written, what does not is said why."""

from __future__ import annotations

import importlib.util
import re
import shutil
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any

import pytest
import torch

from acutance.corpus.gguf_file import read_gguf
from acutance.corpus.load_model import ModelError, load_model
from acutance.corpus.texts import model_digest
from acutance.extras import install
from tests.contract.test_gguf import run
from tests.contract.tiny_gguf import write_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "tiny.gguf"


def test_a_file_is_the_same_model_wherever_it_lies(path: Path, tmp_path: Path) -> None:
    (other := tmp_path / "other").mkdir()
    shutil.copy(write_gguf(path), other / "renamed.gguf")
    digests = {model_digest(load_model(str(each)).model) for each in (path, other / "renamed.gguf")}
    assert len(digests) == 1


def test_what_a_command_reads_it_does_not_replace(path: Path) -> None:
    done = run("probe", write_gguf(path), "--json", path)
    assert done.exit_code == 2
    assert "that of MODEL" in done.err
    assert read_gguf(path).architecture == "llama"


def _cut(share: float) -> Callable[[Path], None]:
    def cut(path: Path) -> None:
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * share)])

    return cut


def _overwrite(start: int, data: bytes) -> Callable[[Path], None]:
    def overwrite(path: Path) -> None:
        whole = bytearray(path.read_bytes())
        whole[start : start + len(data)] = data
        path.write_bytes(bytes(whole))

    return overwrite


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (_cut(0.5), r"is truncated at byte [\d,]+: [\d,]+ bytes of its tensors are missing"),
        (_cut(0.01), r"is truncated at byte [\d,]+: its header is incomplete; copy it again"),
        (_cut(0.0), r"tiny\.gguf is empty$"),
        (_overwrite(0, b"PK\3\4"), r"is not a GGUF file: its first four bytes are not GGUF"),
        (
            _overwrite(4, b"\0\0\0\3"),
            r"has GGUF version 50331648; only little-endian versions 2 and 3",
        ),
        (_overwrite(32, b"\xff\xff"), r"is damaged: its header is invalid at byte \d+"),
    ],
)
def test_a_damaged_file_is_refused_in_one_sentence(
    path: Path, damage: Callable[[Path], None], sentence: str
) -> None:
    damage(write_gguf(path))
    with pytest.raises(ModelError, match=sentence) as caught:
        load_model(str(path))
    assert "\n" not in str(caught.value)
    done = run("probe", path)
    assert done.exit_code == 1
    assert "acutance: " in done.err


def test_every_cut_of_a_file_is_noticed(path: Path) -> None:
    data = write_gguf(path).read_bytes()
    whole = read_gguf(path)
    assert whole.architecture == "llama"
    for length in [*range(1, 200), *range(200, len(data) - 64, 4001)]:
        path.write_bytes(data[:length])
        with pytest.raises(ValueError, match=r"is truncated|is not a GGUF file"):
            read_gguf(path)


def test_an_architecture_that_transformers_lacks_is_named(path: Path) -> None:
    write_gguf(path, architecture="granitehybrid")
    with pytest.raises(ModelError, match=r"transformers \S+ cannot load .* 'granitehybrid': "):
        load_model(str(path))


def test_a_file_without_a_tokenizer_takes_another(path: Path, tmp_path: Path) -> None:
    other = write_gguf(tmp_path / "other.gguf")
    write_gguf(path, tokenizer=False)
    with pytest.raises(ModelError, match=r"tiny\.gguf is a GGUF file without a tokenizer; use"):
        load_model(str(path))
    loaded = load_model(str(path), tokenizer=str(other))
    assert loaded.tokenizer("the")["input_ids"] == load_model(str(other)).tokenizer("the").input_ids


def test_a_missing_tensor_is_named(path: Path) -> None:
    write_gguf(path, keep=lambda name: name != "blk.1.attn_q.weight")
    with pytest.raises(ModelError, match=r"1 tensor missing .*layers\.1\.self_attn\.q_proj"):
        load_model(str(path))
    assert "q_proj" in str(load_model(str(path), allow_missing=True).not_loaded)


def test_a_scaling_of_positions_that_transformers_drops_is_named(path: Path) -> None:
    import numpy as np

    write_gguf(
        path,
        more=lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32)),
    )
    with pytest.raises(ModelError, match=r"scaled rotary positions \(rope_freqs\.weight\)"):
        load_model(str(path))
    allowed = load_model(str(path), allow_missing=True)
    assert allowed.not_loaded == "scaled rotary positions (rope_freqs.weight)"


def test_a_file_without_weights_is_no_model(path: Path) -> None:
    write_gguf(path, keep=lambda _: False)
    with pytest.raises(ModelError, match="is a GGUF file without weights, so it is not a model"):
        load_model(str(path))


@pytest.mark.parametrize("name", ["gguf", "accelerate"])
def test_a_missing_package_is_named(path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    write_gguf(path)
    find = importlib.util.find_spec

    def hidden(asked: str, *more: Any) -> ModuleSpec | None:
        return None if asked == name else find(asked, *more)

    monkeypatch.setattr(importlib.util, "find_spec", hidden)
    with pytest.raises(ModelError, match=f"{name}; install with: {re.escape(install('gguf'))}"):
        load_model(str(path))


def test_names_that_are_near_a_file_say_what_to_do(tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    with pytest.raises(ModelError, match=r"there is no GGUF file at .*none\.gguf"):
        load_model(str(folder / "none.gguf"))
    write_gguf(folder / "tiny.gguf")
    with pytest.raises(ModelError, match=r"no config\.json.*; name its GGUF file, .*tiny\.gguf"):
        load_model(str(folder))
    shutil.copy(folder / "tiny.gguf", blob := folder / "sha256-1234")
    with pytest.raises(ModelError, match=re.escape(".gguf, as transformers requires")):
        load_model(str(blob))
    shutil.copy(folder / "tiny.gguf", part := folder / "big-00001-of-00003.gguf")
    with pytest.raises(ModelError, match="is one of 3 parts of a model; join them with"):
        load_model(str(part))


def test_auto_is_the_gpu_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from acutance.corpus.ranks import Ranks

    for found, device in ((False, "cpu"), (True, "cuda")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda found=found: found)
        assert Ranks().device("auto") == device
        assert Ranks(1, 2, 1).device("auto") == {"cpu": "cpu", "cuda": "cuda:1"}[device]
        assert Ranks().device("mps") == "mps"
