"""Every architecture of the installed transformers, small: built, run, probed and judged."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

_DECLARED: list[Any] = []  # a library of operators goes when nothing holds it


def _torchvision() -> None:
    """Declare two operators that torchvision for CUDA cannot load beside PyTorch for CPUs."""
    if find_spec("torchvision") is None:
        return
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # "operator torchvision::nms does not exist"
        import torch

        library = torch.library.Library("torchvision", "FRAGMENT")
        for name in ("nms", "qnms"):
            library.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _DECLARED.append(library)


_torchvision()
