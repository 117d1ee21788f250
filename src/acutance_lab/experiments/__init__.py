"""EXPERIMENTS: the catalogue of published claims that are tested."""

from importlib import import_module

from acutance_lab.experiment import Experiment

#: Files of this folder, in the order in which they run.
_FILES = (
    "noise", "entropy", "sparsity", "scores", "many_keys", "real", "small_tasks", "text_models"
)  # fmt: skip

#: Every experiment by name, in the order they run: as they stand in the files.
EXPERIMENTS: dict[str, Experiment] = {
    value.name: value
    for file in _FILES
    for value in vars(import_module(f"{__name__}.{file}")).values()
    if isinstance(value, Experiment)
}

__all__ = ["EXPERIMENTS"]
