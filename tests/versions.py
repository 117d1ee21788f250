"""What differs between the versions of other packages that the project admits."""

from importlib.metadata import version

import pytest
import torch
from packaging.version import Version
from torch.nn.modules import module as modules

HOOKS = ("forward_hooks", "forward_pre_hooks", "backward_hooks", "backward_pre_hooks")


def older(package: str, than: str) -> bool:
    """Whether the installed version of a package is older."""
    return Version(version(package)) < Version(than)


def any_global_hook() -> bool:
    """Whether PyTorch holds a hook for all modules; 2.6 has no function that says so."""
    return any(vars(modules)[f"_global_{kind}"] for kind in HOOKS)


#: The argument of a transformers model that takes its key-value cache.
CACHE = "past_key_values" if older("transformers", "5.24") else "cache"

#: FlexAttention as an implementation to test; it is compiled.
FLEX_ATTENTION = pytest.param(
    "flex_attention",
    marks=[
        pytest.mark.slow,
        pytest.mark.skipif(
            torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
            reason="PyTorch compiles FlexAttention only on processors with AVX2",
        ),
    ],
)
