"""``acutance verify``: does a model's attention compute what its configuration says?"""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

import typer

from acutance.cli import options as cli
from acutance.cli.inputs import about_run
from acutance.cli.shared import console, refuse

if TYPE_CHECKING:
    from acutance.verification import Verification

IMPLEMENTATIONS = ("eager", "sdpa", "flex", "flash_attention_2", "flash_attention_3")


def _implementations(text: str) -> tuple[str, ...]:
    """Parse ``--implementations``."""
    names = [name.strip() for name in text.split(",")]
    for name in names:
        known = "flex" if name == "flex_attention" else name
        cli.check_choice("--implementations", known, IMPLEMENTATIONS)
    return tuple(dict.fromkeys(names))


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class VerifyOptions(cli.JsonOptions, cli.ModelOptions):
    """The options of ``acutance verify``.

    Attributes:
        text: Text to read from its start. Default: the included one.
        length: Tokens to read. Default: 32 beyond the widest sliding window, at least 96.
        implementations: Attention implementations to run: eager, sdpa, flex, flash_attention_2 or
            flash_attention_3. One that the model does not support is left out with a note.
            Default: eager,sdpa.
        dtype: Type of the weights. In 16 bits only coarse faults stand out.
        backward: Also compare gradients of queries, keys, values and sinks.
    """

    model: cli.Model = None
    text: cli.InputFile = None
    length: Annotated[int | None, typer.Option(metavar="N", min=12)] = None
    implementations: Annotated[
        tuple[str, ...], typer.Option(metavar="NAME,..."), cli.Role(read=_implementations)
    ] = ("eager", "sdpa")
    dtype: Annotated[str, cli.Role(choices=("float64", "float32", "bfloat16", "float16"))] = (
        "float32"
    )
    backward: bool = False


@cli.command(
    VerifyOptions,
    {cli.READ: "implementations dtype backward"},
    code=2,
    interrupted="before all inputs were read",
)
def verify(options: VerifyOptions) -> None:
    """Compare a model's attention with what its configuration says, and name what differs.

    Each layer's output is computed again in float64 with the scale, sliding window, softcap, sinks,
    padding and documents of the configuration and the input, and the rotation of queries and keys
    is compared with the RoPE settings. Exits with code 1 if something differs, and with 2 if
    nothing could be compared.
    """
    if options.attention is not None:
        refuse("--attention", "verify runs the implementations of --implementations")
    found = _verified(options)
    options.write_and_show(found.table, found.to_dict)
    if not found.ok:
        raise typer.Exit(1)


def _verified(options: VerifyOptions) -> "Verification":
    """Load the model, read the text, and compare; what runs is shown on standard error."""
    from importlib.metadata import version

    from acutance.corpus import texts as corpus
    from acutance.verification import verify as verify_model
    from acutance.verification.inputs import token_ids

    texts = corpus.read([str(options.text)]) if options.text else [corpus.bundled()]
    loaded = options.load(head=False)
    ids = token_ids(loaded, texts, options.length).to(next(loaded.model.parameters()).device)
    with console().status("reading") as status:
        found = verify_model(
            loaded.model,
            ids,
            implementations=list(options.implementations),
            backward=options.backward,
            advance=lambda name, kind: status.update(f"{name}: {kind}"),
        )
    about = {**found.about, **about_run(loaded, texts)}
    about |= {"text": texts[0].name, "tokens": ids.shape[1]}
    return replace(found, about=about | {"dtype": options.dtype, "torch": version("torch")})
