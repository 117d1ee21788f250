"""Libraries other than transformers: what each has, built small, with the inputs it runs on."""

from __future__ import annotations

import contextlib
import copy
import inspect
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from zoo.inputs import noise, run
from zoo.laws import line
from zoo.maps import gives, tensors
from zoo.small import HEADS, LARGEST, VOCABULARY, WIDTH, TooLargeError, uneven

#: A model, and inputs to try with it.
Built = tuple[Any, list[dict[str, Any]]]


@dataclass(frozen=True)
class Library:
    """One library.

    Attributes:
        package: its name on PyPI.
        names: what of it is swept.
        total: how many there are, where that is more.
        build: a model of each name, several ways until one runs.
    """

    package: str
    names: Callable[[], list[str]]
    build: Callable[[str], Iterator[Callable[[], Built]]]
    total: Callable[[], int] | None = None


def ready(model: Any) -> Any:
    """A model with uneven attention, in evaluation mode, unless it is large."""
    size = sum(parameter.numel() for parameter in model.parameters())
    if size > 2.5 * LARGEST:
        raise TooLargeError(f"{size / 1e6:.0f} million parameters where 100 are the most")
    if any(parameter.is_meta for parameter in model.parameters()):
        return model  # only its size was asked for
    return uneven(model).eval()


def _images(model: Any, *sides: int) -> list[dict[str, Any]]:
    name = next(iter(inspect.signature(model.forward).parameters))
    return [{name: noise(2, 3, side, side)} for side in sides]


def _smallness(name: str) -> int:
    """Rank of a model among its family by what its name says of its size."""
    small = ("test", "tiny", "nano", "pico", "small", "xxs", "xs", "mini", "_s", "base")
    return min([rank for rank, word in enumerate(small) if word in name] or [99])


def _timm_names() -> list[str]:
    """Of each module of timm, up to two architectures: small ones of different families."""
    import timm

    names = []
    for module in timm.list_modules():
        families: dict[str, str] = {}
        for name in sorted(timm.list_models(module=module), key=_smallness):
            families.setdefault(name.split("_")[0], name)
        names += list(families.values())[:2]
    return sorted(names)


def _timm(name: str) -> Iterator[Callable[[], Built]]:
    import timm

    for options in ({"img_size": 64, "depth": 2}, {"depth": 2}, {"img_size": 64}, {}):

        def make(options: dict[str, Any] = options) -> Built:
            torch.manual_seed(0)
            model = ready(timm.create_model(name, num_classes=10, **options))
            usual = model.default_cfg.get("input_size", (3, 224, 224))[-1]
            return model, _images(model, options.get("img_size", 64), 128, usual)

        yield make


def _torchvision_names() -> list[str]:
    """Of each module of torchvision, two models: small ones."""
    from torchvision import models

    modules: dict[str, list[str]] = {}
    for name in sorted(models.list_models(), key=_smallness):
        modules.setdefault(models.get_model_builder(name).__module__, []).append(name)
    return sorted(name for names in modules.values() for name in names[:2])


def _torchvision_total() -> int:
    from torchvision import models

    return len(models.list_models())


def _torchvision(name: str) -> Iterator[Callable[[], Built]]:
    from torchvision import models

    def make() -> Built:
        torch.manual_seed(0)
        builder = models.get_model_builder(name)
        options = {"weights": None}
        if "weights_backbone" in inspect.signature(builder).parameters:
            options["weights_backbone"] = None
        model = ready(builder(**options))
        names = list(inspect.signature(model.forward).parameters)
        if names[0] == "image1":
            return model, [{"image1": noise(1, 3, 128, 128), "image2": noise(1, 3, 128, 128)}]
        if names[0] == "images":
            model.score_thresh = 1.0  # the CPU wheel cannot suppress boxes: none is to be detected
            return model, [{"images": [noise(3, 64, 64)]}]
        videos = [{names[0]: noise(1, 3, 16, side, side)} for side in (64, 224)]
        return model, [*_images(model, 64, 128, 224), *videos]

    yield make


def _open_clip_names() -> list[str]:
    """Configurations that still differ when they are small, whatever the size of their images."""
    import open_clip

    distinct: dict[str, str] = {}
    for name in open_clip.list_models():
        config = _clip_config(name)
        vision = config["vision_cfg"]
        family = _SIZES.sub("", str(vision.get("timm_model_name", "")))
        config["vision_cfg"] = vision | {"timm_model_name": family, "image_size": None}
        distinct.setdefault(json.dumps(config, sort_keys=True), name)
    return sorted(distinct.values())


#: What the name of a model of timm says of its size.
_SIZES = re.compile(
    r"_?(tiny|small|base|large\d?|xlarge|xxlarge|huge|giant|gigantic|giantopt|so400m|enormous"
    r"|mci\d|patch\d+|\d+)(?=_|$)"
)


def _open_clip_total() -> int:
    import open_clip

    return len(open_clip.list_models())


def _clip_config(name: str) -> dict[str, Any]:
    """A configuration with a few narrow layers."""
    from open_clip import factory

    config = {**factory.get_model_config(name), "embed_dim": WIDTH}
    for tower in ("vision_cfg", "text_cfg", "multimodal_cfg"):
        if tower in config:
            config[tower] = _tower(config[tower])
    return {key: value for key, value in config.items() if not key.startswith("preprocess")}


def _open_clip(name: str) -> Iterator[Callable[[], Built]]:
    from open_clip import model as models
    from open_clip.coca_model import CoCa

    def make() -> Built:
        torch.manual_seed(0)
        config = _clip_config(name)
        custom = config.pop("custom_text", False)
        made = CoCa if "multimodal_cfg" in config else models.CLIP
        if made is models.CLIP and (custom or "hf_model_name" in config["text_cfg"]):
            made = models.CustomTextCLIP
        with _shallow():
            model = ready(made(**{k: v for k, v in config.items() if k in _parameters(made)}))
        side = config["vision_cfg"].get("image_size", 224)
        side = side[0] if isinstance(side, list | tuple) else side
        length = config["text_cfg"].get("context_length", 77)
        text = torch.randint(3, VOCABULARY - 1, (2, length))
        return model, [{"image": noise(2, 3, side, side), "text": text}]

    yield make


@contextlib.contextmanager
def _shallow() -> Iterator[None]:
    """Models of timm have two blocks, where they take a depth."""
    import timm

    create = timm.create_model

    def shallow(*args: Any, **options: Any) -> Any:
        with contextlib.suppress(TypeError, RuntimeError, KeyError):
            return create(*args, depth=2, **options)
        return create(*args, **options)

    timm.create_model = shallow
    try:
        yield
    finally:
        timm.create_model = create


def _tower(config: dict[str, Any]) -> dict[str, Any]:
    """A tower of a few narrow layers."""
    config = dict(config)
    if isinstance(config.get("layers", 2), int):
        config |= {"layers": 2} | ({"width": WIDTH} if "timm_model_name" not in config else {})
        config |= {"heads": HEADS} if "heads" in config else {}
        config |= {"head_width": WIDTH // HEADS} if "image_size" in config else {}
    else:  # of a residual network, in stages
        config |= {"layers": [1] * len(config["layers"]), "width": 32}
    if "image_size" in config and "timm_model_name" not in config:
        config["image_size"] = 64 if isinstance(config.get("layers"), int) else 128
        config["patch_size"] = 16
    if "vocab_size" in config:
        config["vocab_size"] = VOCABULARY
    return config


def _x_names() -> list[str]:
    """Every switch of attention and of its layers, each on alone."""
    from x_transformers.x_transformers import Attention, AttentionLayers

    off = ("verbose", "onnxable", "causal", "cross_attend", "only_cross", "on_attn")
    names = ["decoder", "encoder", "encoder-decoder", "decoder: kv_heads=2"]
    for prefix, made in (("attn_", Attention), ("", AttentionLayers)):
        names += [
            f"decoder: {prefix}{name}"
            for name, parameter in inspect.signature(made.__init__).parameters.items()
            if parameter.default is False and name not in off
        ]
    figures = ("sparse_topk=4", "num_mem_kv=4", "max_attend_past=4")
    return [*names, *(f"decoder: attn_{figure}" for figure in figures)]


def _x(name: str) -> Iterator[Callable[[], Built]]:
    import x_transformers as x

    def make() -> Built:
        torch.manual_seed(0)
        kind, _, option = name.partition(": ")
        key, _, value = option.partition("=")
        key = "attn_kv_heads" if key == "kv_heads" else key
        options = {key: int(value) if value else True} if key else {}
        sizes: dict[str, Any] = {"dim": WIDTH, "depth": 2, "heads": HEADS, "attn_dim_head": 16}
        if kind == "encoder-decoder":
            model = x.XTransformer(
                dim=WIDTH, enc_num_tokens=VOCABULARY, enc_depth=2, enc_heads=HEADS,
                enc_max_seq_len=64, dec_num_tokens=VOCABULARY, dec_depth=2, dec_heads=HEADS,
                dec_max_seq_len=64,
            )  # fmt: skip
            ids = torch.randint(3, 150, (2, 12))
            return ready(model), [{"src": ids, "tgt": ids}]
        layers = (x.Encoder if kind == "encoder" else x.Decoder)(**sizes, **options)
        wrapper = x.TransformerWrapper(
            num_tokens=VOCABULARY, max_seq_len=64, attn_layers=layers
        )  # fmt: skip
        return ready(wrapper), [{"x": torch.randint(3, 150, (2, 12))}]

    yield make


def _parameters(made: Any) -> Any:
    return inspect.signature(made.__init__).parameters


def _timm_total() -> int:
    import timm

    return len(timm.list_models())


def _diffusers_names() -> list[str]:
    from diffusers.models import transformers as models

    return sorted(name for name in dir(models) if isinstance(getattr(models, name), type))


def _diffusers(name: str) -> Iterator[Callable[[], Built]]:
    from zoo import diffusion

    return diffusion.models(name)


LIBRARIES: dict[str, Library] = {
    "diffusers": Library("diffusers", _diffusers_names, _diffusers),
    "timm": Library("timm", _timm_names, _timm, _timm_total),
    "torchvision": Library("torchvision", _torchvision_names, _torchvision, _torchvision_total),
    "open_clip": Library("open_clip_torch", _open_clip_names, _open_clip, _open_clip_total),
    "x-transformers": Library("x-transformers", _x_names, _x),
}


def runnable_in(
    library: str, name: str, examined: Any
) -> tuple[Any, Any, str, dict[str, Any]] | None:
    """The first small model of another library that runs on some input."""
    for make in LIBRARIES[library].build(name):
        try:
            with contextlib.suppress(NotImplementedError, RuntimeError), torch.device("meta"):
                make()  # a large one says so before it takes memory
            model, some = make()
        except Exception as error:
            if examined.verdict == "not built":
                examined.reason = line(error)
            continue
        examined.verdict, examined.reason = "not run", ""
        for given in some:
            try:
                output = run(model, given)
                for _ in range(4):  # a deep stack of convolutions overflows
                    if _numbers(output):
                        break
                    output = run(_calmer(model), given)
            except Exception as error:
                examined.reason = examined.reason or line(error)
                continue
            if not _numbers(output):
                examined.reason = "its output is not a number"
            elif gives(output):
                examined.reason = ""
                return model, None, ", ".join(given), given
    return None


def _numbers(output: Any) -> bool:
    return not any(bool(part.isnan().any()) for part in tensors(output))


def _calmer(model: Any) -> Any:
    """The same model with matrices half as large."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(0.5)
    return model


def by_hand(model: Any) -> Any:
    """The same model with its fused attention switched off, as timm has it; itself without."""
    if not any(getattr(module, "fused_attn", False) for module in model.modules()):
        return model
    unfused = copy.deepcopy(model)
    for module in unfused.modules():
        if getattr(module, "fused_attn", False):
            module.fused_attn = False
    return unfused


__all__ = ["LIBRARIES", "Library", "by_hand", "ready", "runnable_in"]
