"""``acutance verify``: does a model's attention compute what its configuration says?"""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli.options import (
    READ,
    WRITE,
    AllowMissing,
    AllowPickle,
    Device,
    JsonTo,
    Model,
    Tokenizer,
    TrustRemoteCode,
    check_choice,
    command,
)
from acutance.cli.outputs import check_outputs, write_and_show
from acutance.cli.shared import INTERRUPTED, console, fail, plain_errors

if TYPE_CHECKING:
    from acutance.verification import Verification

IMPLEMENTATIONS = ("eager", "sdpa", "flex", "flash_attention_2", "flash_attention_3")
DTYPES = ("float64", "float32", "bfloat16", "float16")


@dataclass(frozen=True, repr=False, eq=False)
class VerifyOptions:
    """The options of ``acutance verify``."""

    model: Model = None
    text: Annotated[
        Path | None,
        typer.Option(
            "--text", metavar="FILE", help="Text to read from its start. Default: the included one."
        ),
    ] = None
    length: Annotated[
        int | None,
        typer.Option(
            "--length",
            metavar="N",
            min=12,
            help="Tokens to read. Default: 32 beyond the widest sliding window, at least 96.",
        ),
    ] = None
    implementations: Annotated[
        str,
        typer.Option(
            "--implementations",
            metavar="NAME,...",
            help="Attention implementations to run: eager, sdpa, flex, flash_attention_2 or "
            "flash_attention_3. One that the model does not support is left out with a note.",
        ),
    ] = "eager,sdpa"
    dtype: Annotated[
        str,
        typer.Option(
            "--dtype",
            help="Type of the weights: float64, float32, bfloat16 or float16. In 16 bits only "
            "coarse faults stand out.",
        ),
    ] = "float32"
    backward: Annotated[
        bool,
        typer.Option(
            "--backward", help="Also compare gradients of queries, keys, values and sinks."
        ),
    ] = False
    json: JsonTo = None
    tokenizer: Tokenizer = None
    device: Device = "auto"
    trust_remote_code: TrustRemoteCode = False
    allow_pickle: AllowPickle = False
    allow_missing: AllowMissing = False


@command(
    VerifyOptions,
    {
        READ: "text length implementations dtype backward tokenizer device "
        "trust_remote_code allow_pickle allow_missing",
        WRITE: "json",
    },
)
def verify(options: VerifyOptions) -> None:
    """Compare a model's attention with what its configuration says, and name what differs.

    Each layer's output is computed again in float64 with the scale, sliding window, softcap, sinks,
    padding and documents of the configuration and the input, and the rotation of queries and keys
    is compared with the RoPE settings. Exits with code 1 if something differs, and with 2 if
    nothing could be compared.
    """
    text = [str(options.text)] if options.text is not None else None
    check_outputs({"--json": options.json}, {"MODEL": options.model, "--text": text})
    names = _names(options.implementations)
    check_choice("--dtype", options.dtype, DTYPES)
    with plain_errors(code=2):
        from acutance.files import as_json, put_text

        try:
            found = _verified(options, names)
        except KeyboardInterrupt:
            fail("interrupted before all inputs were read")
            raise typer.Exit(INTERRUPTED) from None
        write_and_show(
            {"--json": lambda path: put_text(as_json(found.to_dict()) + "\n", path)},
            {"--json": options.json},
            lambda screen: screen.print(found.table()),
        )
    if not found.ok:
        raise typer.Exit(1)


def _names(text: str) -> list[str]:
    """Parse ``--implementations``."""
    names = [part.strip() for part in text.split(",")]
    for name in names:
        check_choice(
            "--implementations", "flex" if name == "flex_attention" else name, IMPLEMENTATIONS
        )
    return list(dict.fromkeys(names))


def _verified(options: VerifyOptions, names: list[str]) -> "Verification":
    """Load the model, read the text, and compare; what runs is shown on standard error."""
    from importlib.metadata import version

    import torch

    from acutance.corpus import texts as corpus
    from acutance.corpus.load_model import load
    from acutance.verification import verify as verify_model
    from acutance.verification.read_text import token_ids

    texts = corpus.read([str(options.text)]) if options.text else [corpus.bundled()]
    screen = console()
    with screen.status("loading the model"):
        loaded = load(
            options.model,
            tokenizer=options.tokenizer,
            dtype=getattr(torch, options.dtype),
            device=options.device,
            head=False,
            trust_remote_code=options.trust_remote_code,
            allow_pickle=options.allow_pickle,
            allow_missing=options.allow_missing,
        )
    ids = token_ids(loaded, texts, options.length).to(next(loaded.model.parameters()).device)
    with screen.status("reading") as status:
        found = verify_model(
            loaded.model,
            ids,
            implementations=names,
            backward=options.backward,
            advance=lambda name, kind: status.update(f"{name}: {kind}"),
        )
    about = {**found.about, "model": loaded.name, "text": texts[0].name, "tokens": ids.shape[1]}
    about |= {"dtype": options.dtype, **loaded.about}
    about |= {name: version(name) for name in ("acutance", "torch", "transformers")}
    return replace(found, about=about)
