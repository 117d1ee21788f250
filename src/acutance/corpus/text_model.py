"""TextModel: a model with its tokenizer, as runs over texts use it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch

from acutance.capture.find_layers import max_heads
from acutance.capture.layer_choice import HeadChoice
from acutance.summary.layer import NOT_LOADED

__all__ = [
    "LONGEST_DEFAULT",
    "HeadError",
    "ModelError",
    "OptionError",
    "TextModel",
    "automatic_class",
    "available",
    "check_reads_text",
    "positions",
]

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
    model: torch.nn.Module
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
        return replace(self, model=base if isinstance(base, torch.nn.Module) else self.model)

    @property
    def pad(self) -> int:
        """A token id for padding; padded rows are masked, so its value does not matter."""
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
        most = max_heads(self.model) or self._configured_heads()
        try:
            choice = HeadChoice(law_heads)
            if most:
                choice.check(most, self.name)
        except ValueError as error:
            raise OptionError(f"--heads {law_heads}: {error}") from error

    def _configured_heads(self) -> int:
        """Number of heads of a layer from the configuration; 0 if it does not state it."""
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
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    if getattr(text, "vocab_size", None) is None and (
        hasattr(config, "image_size") or hasattr(config, "num_channels")
    ):
        raise ModelError(
            f"{label} reads images, not text ({type(config).__name__} has no vocabulary); run "
            "it yourself inside acutance.probe(model)"
        )


def positions(config: Any, tokenizer: Any) -> int | None:
    """The largest number of positions that model and tokenizer support; None if unknown."""
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    known = [
        getattr(text, "max_position_embeddings", None),
        getattr(text, "n_positions", None),
        getattr(tokenizer, "model_max_length", None),
    ]
    sane = [limit for limit in known if isinstance(limit, int) and 0 < limit < 10**7]
    return min(sane) if sane else None
