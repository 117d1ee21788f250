"""Train the decoder that comes with acutance, on the source of Python's standard library.

    python tools/train_decoder.py --seed 0

It takes nine minutes of one core and shows the held-out loss at the end. A run that was
stopped goes on from its checkpoint. With the same Python, torch and transformers the weights come
out the same, bit for bit, before they are rounded to float16 for the file.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from pathlib import Path

import torch
import transformers
from safetensors.torch import save

from acutance.files import write_bytes, write_text
from acutance_lab import texts, trained

PACKAGED = Path(__file__).parents[1] / "src" / "acutance" / "data" / "decoder"
LENGTHS = (128, 256, 512, 1024)
LAST = 64  # bytes at the end of a window that the loss at a length is taken over
WINDOWS = 256


def held_out_loss(model: torch.nn.Module, text: torch.Tensor, length: int) -> float:
    """Mean loss of the last bytes of windows of a length; the same bytes at every length."""
    generator = torch.Generator().manual_seed(0)
    ids = texts.sample_windows(text, max(LENGTHS) + 1, WINDOWS, generator)[:, -(length + 1) :]
    with torch.no_grad():
        parts = [trained.next_byte_losses(model, part)[:, -LAST:] for part in ids.split(8)]
    return float(torch.cat(parts).mean())


def write(model: torch.nn.Module, about: dict[str, object], out: Path) -> None:
    """Weights in float16, configuration, tokenizer and record."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {
        name: value.detach().half().contiguous()
        for name, value in model.state_dict().items()
        if name != "lm_head.weight"  # tied to the embedding
    }
    write_bytes(out / "model.safetensors", save(tensors, {"format": "pt"}))
    config = trained.configuration()
    config.architectures = ["LlamaForCausalLM"]
    config.dtype = "float32"  # what to compute in; the file's float16 is for its size
    write_text(out / "config.json", config.to_json_string())
    byte_tokenizer().save_pretrained(out)
    write_text(out / "training.json", json.dumps(about, indent=1) + "\n")


def byte_tokenizer() -> transformers.PreTrainedTokenizerFast:
    """Token i is the byte i: byte-level BPE without a single merge."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from tokenizers.decoders import ByteLevel

    # the letters that stand for bytes: printable ones for themselves, the others from 256 on
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    letters = {byte: chr(byte) for byte in printable} | {
        byte: chr(256 + place) for place, byte in enumerate(others)
    }
    tokenizer = Tokenizer(models.BPE({letters[byte]: byte for byte in range(256)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        model_max_length=trained.configuration().max_position_embeddings,
        clean_up_tokenization_spaces=False,
    )


def describe(paths: list[Path], size: int) -> dict[str, object]:
    """What identifies a part of the text."""
    return {"files": len(paths), "bytes": size, "sha256": texts.digest(paths)}


def main() -> int:
    """Train one seed, evaluate it, write it."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--out", type=Path, help="directory; default: its place in the package")
    parser.add_argument("--checkpoint", type=Path, help="file; default: beside the directory")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    out = options.out or PACKAGED / f"seed{options.seed}"
    checkpoint = options.checkpoint or Path(f"decoder-seed{options.seed}.checkpoint")

    training, held_out = texts.files("training"), texts.files("held out")
    text, other = texts.read(training), texts.read(held_out)
    start = time.process_time()
    model = trained.train(
        "decoder",
        trained.configuration(),
        options.seed,
        text,
        steps=options.steps,
        keep=checkpoint,
        note=lambda line: print(line, flush=True),
    )
    seconds = time.process_time() - start
    write(model, {}, out)
    stored = transformers.LlamaForCausalLM.from_pretrained(out, dtype=torch.float32).eval()
    losses = {str(length): round(held_out_loss(stored, other, length), 4) for length in LENGTHS}
    about = {
        "seed": options.seed,
        "steps": options.steps,
        "train_length": trained.TRAIN_LENGTH,
        "cpu_seconds": round(seconds),
        "text": {
            "what": "source files of the standard library",
            "python": platform.python_version(),
            "training": describe(training, len(text)),
            "held out": describe(held_out, len(other)),
        },
        "held_out_loss": {
            "unit": f"nats per byte, last {LAST} of {WINDOWS} windows, by length",
            **losses,
        },
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }  # fmt: skip
    write(stored, about, out)
    print(json.dumps(about, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
