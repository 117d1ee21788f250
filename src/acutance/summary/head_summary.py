"""HeadSummary: statistics of every head of a probed model; merging, export and saving."""

from __future__ import annotations

import html
import importlib.util
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property, reduce
from itertools import chain
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from acutance.diagnose.classes import classify
from acutance.diagnose.rules import HeadFacts, Judgement, Kind, facts
from acutance.files import as_json, finite, write_bytes, write_text, write_whole
from acutance.structure import describe
from acutance.summary.cells import Parts
from acutance.summary.files import compact, sealed
from acutance.summary.layer import LEFT_OUT, Layer, coverage_line, notices
from acutance.summary.readouts import READOUTS
from acutance.summary.readouts.by_octave import Profile
from acutance.summary.readouts.distances import Distances
from acutance.summary.readouts.examples import Examples
from acutance.summary.readouts.head_maps import HeadMap, few_enough, maps_to_dict, merged_maps
from acutance.summary.readouts.moments import Moments, edges
from acutance.summary.readouts.spans import Spans
from acutance.theory.trained_heads import expected_head_metrics

if TYPE_CHECKING:
    import pyarrow

#: Metrics that are predicted.
PREDICTED = ("entropy", "effective_keys", "top_weight", "first_weight")
#: Metrics that the prediction is made from.
PREDICTED_FROM = ("first_gap", "rest_logit_std", "rest_jensen_gap")
_FEWEST_KEYS = 8.0
_FULL = 0.25  # of the rows of the fullest octave, below which an octave is left out


@dataclass(frozen=True)
class PredictedHeads:
    """Predicted and measured means of every head, over its rows in one octave of n.

    Attributes:
        n: (heads,), mean number of visible keys of these rows; NaN without rows.
        predicted: for each name in ``PREDICTED``, (heads,); NaN for heads without a prediction.
        measured: the measured means of the same rows, by name.
        skewness: (heads,), skewness of the logits of all keys but the first, as inferred.
        impossible: boolean (heads,), heads left out since their Jensen gap is impossible for their
            deviation: a few keys beyond the first dominate.
    """

    n: Tensor
    predicted: dict[str, Tensor]
    measured: dict[str, Tensor]
    skewness: Tensor
    impossible: Tensor

    def r_squared(self, name: str = "entropy") -> float:
        """Coefficient of determination R² of the prediction of a metric over the heads.

        1 at best; below 0 it is worse than predicting the mean for every head. NaN with fewer than
        two heads that have both values.
        """
        predicted, measured = self.predicted[name], self.measured[name]
        both = predicted.isfinite() & measured.isfinite()
        if int(both.sum()) < 2:
            return math.nan
        miss = (measured - predicted)[both].square().sum()
        whole = (measured[both] - measured[both].mean()).square().sum()
        return float(1 - miss / whole)


def _heads(layers: Iterable[Layer]) -> dict[tuple[str, int], int]:
    """Index of each head in the arrays of a summary, by module and number."""
    heads = [(layer.module, number) for layer in layers for number in layer.numbers]
    return {head: index for index, head in enumerate(heads)}


SCHEMA = "acutance.head_summary/1"
#: Attributes that files and tables are made with; ``dir`` leaves them out.
_FOR_FILES = {"optional_parts", "column", "facts", "grid", "judgements", "parts", "places"}


class Columns:
    """Base of results whose ``columns()`` is a table."""

    def columns(self) -> dict[str, list[Any]]:
        """The table as columns."""
        raise NotImplementedError

    def to_arrow(self) -> pyarrow.Table:
        """The columns as a pyarrow table."""
        import pyarrow

        return pyarrow.table(self.columns())

    def to_frame(self) -> Any:
        """The columns as a pandas DataFrame, or as a pyarrow table without pandas."""
        if importlib.util.find_spec("pandas") is None:
            return self.to_arrow()
        import pandas

        return pandas.DataFrame(self.columns())


@dataclass(frozen=True)
class HeadSummary(Columns):
    """Statistics over rows for every layer and head.

    Attributes:
        layers: the layers, in model order.
        metrics: names of the metrics, the columns of ``moments``.
        moments: arrays with the heads of all layers concatenated.
        about: facts about the run: model, text, versions.
        unread: attention that could not be read, with the reason.
        optional_parts: further statistics: :attr:`profile`, :attr:`positions`, :attr:`distances`,
            :attr:`examples` and :attr:`spans`.
        not_provided: with ``provide``, attention that the model computed itself, with the reason.
        maps: rows of attention weights of named heads, if requested.

    Example:
        >>> import torch, acutance
        >>> layer = torch.nn.MultiheadAttention(8, 2, batch_first=True)
        >>> with acutance.probe(layer) as probe:
        ...     _ = layer(*[torch.zeros(1, 4, 8)] * 3)
        >>> summary = probe.summary()
        >>> summary.mean("effective_keys")
        tensor([4.0000, 4.0000], dtype=torch.float64)
    """

    layers: tuple[Layer, ...]
    metrics: tuple[str, ...]
    moments: Moments
    about: Mapping[str, Any] = field(default_factory=dict)
    unread: tuple[str, ...] = ()
    optional_parts: Parts = field(default_factory=Parts)
    not_provided: tuple[str, ...] = ()
    maps: tuple[HeadMap, ...] = ()

    def __repr__(self) -> str:
        heads, layers = sum(layer.heads for layer in self.layers), len(self.layers)
        return (
            f"HeadSummary of {heads} head{'s' * (heads != 1)} in {layers} "
            f"layer{'s' * (layers != 1)}, {len(self.metrics)} metrics: "
            "to_frame() has a row for each head"
        )

    def __dir__(self) -> list[str]:
        """Public attributes without those that only exports and files use."""
        return [name for name in super().__dir__() if name not in _FOR_FILES]

    def _repr_html_(self) -> str:
        """The table as HTML, for notebooks."""
        to_html = getattr(self.to_frame(), "_repr_html_", None)
        return str(to_html()) if to_html is not None else html.escape(repr(self))

    @property
    def profile(self) -> Profile | None:
        """Each metric by octave of n; None in files of earlier versions."""
        return self.optional_parts.get("profile")  # type: ignore[return-value]

    @property
    def positions(self) -> Profile | None:
        """Each metric by octave of the query's position; None without structure."""
        return self.optional_parts.get("positions")  # type: ignore[return-value]

    @property
    def distances(self) -> Distances | None:
        """Mean weight by octave of distance; None without structure."""
        return self.optional_parts.get("distances")  # type: ignore[return-value]

    @property
    def examples(self) -> Examples | None:
        """The sharpest rows of each head; None if not requested."""
        return self.optional_parts.get("examples")  # type: ignore[return-value]

    @property
    def spans(self) -> Spans | None:
        """Mean weight on named parts of the input; None if not requested."""
        return self.optional_parts.get("spans")  # type: ignore[return-value]

    def __post_init__(self) -> None:
        expected = (sum(layer.heads for layer in self.layers), len(self.metrics))
        if (shape := tuple(self.moments.count.shape)) != expected:
            raise ValueError(f"moments must have shape (heads, metrics) = {expected}, got {shape}")

    def column(self, name: str) -> int:
        """Index of a metric in ``moments``.

        Raises:
            ValueError: if it was not recorded.
        """
        describe(name)  # an unknown name says what is near it
        if name not in self.metrics:
            known = ", ".join(self.metrics)
            raise ValueError(f"{name!r} was not recorded; this summary has {known}")
        return self.metrics.index(name)

    @property
    def places(self) -> list[tuple[int, int]]:
        """(layer, head) of each head in ``moments``."""
        return [(i, head) for i, layer in enumerate(self.layers) for head in layer.numbers]

    def mean(self, name: str) -> Tensor:
        """Mean of a metric for each head, (heads,) over all layers; NaN without rows."""
        column = self.column(name)
        count = self.moments.count[:, column]
        return self.moments.mean[:, column].masked_fill(count == 0, math.nan)

    def std(self, name: str) -> Tensor:
        """Standard deviation of a metric over rows for each head, (heads,)."""
        return self.moments.std[:, self.column(name)]

    def sampling_error(self, name: str) -> Tensor:
        """Standard error of each head's mean from sampling rows; 0 where all rows were read."""
        return self.moments.sampling_error[:, self.column(name)]

    @property
    def coverage(self) -> str:
        """A sentence on how many modules' attention was read, and which was not."""
        return coverage_line([layer.module for layer in self.layers], self.unread)

    @cached_property
    def facts(self) -> list[HeadFacts]:
        """The numbers of each head, and the rules that it meets."""
        return facts(self)

    @property
    def judgements(self) -> list[dict[Kind, Judgement]]:
        """The diagnostic rules that each head meets; findings, classes and alarms share them."""
        return [head.rules for head in self.facts]

    @cached_property
    def predicted_entropy(self) -> list[float] | None:
        """Entropy of each head by :meth:`predict`; None if what it needs was not recorded."""
        if self.profile is None or not set(PREDICTED_FROM) <= set(self.metrics):
            return None
        return list(self.predict().predicted["entropy"].tolist())

    @cached_property
    def sampled(self) -> bool:
        """Whether any layer's rows were sampled."""
        return any(layer.skipped for layer in self.layers)

    def grid(self, name: str) -> list[list[float]]:
        """Mean of a metric as nested lists, [layer][head].

        Layers may have different numbers of heads.
        """
        sizes = [layer.heads for layer in self.layers]
        return [means.tolist() for means in self.mean(name).split(sizes)]

    def predict(self, n: float | Sequence[float] | None = None) -> PredictedHeads:
        """Predict entropy, effective keys, top and first weight of each head from four numbers.

        See :func:`~acutance.theory.expected_head_metrics` for the model and its limits.

        Args:
            n: number of visible keys; rows of the octave that contains it are used. None for the
                largest octave with enough rows. For several numbers, all arrays of the result have
                the shape (numbers, heads). Predictions are solved for sixteen heads at a time, so
                one may differ from that for its number alone, by up to 0.05 %.

        Returns:
            Predicted and measured means; NaN for heads whose weights are not softmax, that have a
            sink outside the keys, that see fewer than 8 keys, or whose Jensen gap is impossible.

        Raises:
            ValueError: if the summary lacks ``first_gap``, ``rest_logit_std``, ``rest_jensen_gap``
                or a profile by number of keys.

        Example:
            >>> import torch, acutance
            >>> layer = torch.nn.MultiheadAttention(16, 4, batch_first=True)
            >>> with acutance.probe(layer) as probe:
            ...     _ = layer(*[torch.randn(2, 32, 16)] * 3)
            >>> heads = probe.summary().predict()
            >>> bool((heads.predicted["entropy"] - heads.measured["entropy"]).abs().max() < 0.05)
            True
        """
        for name in PREDICTED_FROM:
            self.column(name)  # or say what was recorded
        if self.profile is None:
            raise ValueError("this summary has no profile by number of keys: probe again")
        profile, metrics = self.profile, self.metrics
        rows, heads = profile.rows.double(), torch.arange(len(profile.rows))
        if n is None:
            filled = rows >= _FULL * rows.amax(1, keepdim=True).clamp(min=1)
            octave = torch.where(filled, torch.arange(profile.octaves), -1).amax(1)
        else:
            numbers = n if isinstance(n, Sequence) else [n]
            octaves = [min(int(math.log2(number)), profile.octaves - 1) for number in numbers]
            octave = torch.tensor(octaves)[:, None].expand(-1, len(heads))
            octave = octave if isinstance(n, Sequence) else octave[0]

        mean, count, std = (  # (heads, metrics), in the octave of each head
            values[heads, :, octave] for values in (profile.mean, profile.count, profile.std)
        )
        columns = [metrics.index(name) for name in PREDICTED_FROM]
        first, rest_std, jensen = mean[..., columns].unbind(-1)
        keys = profile.log_n[heads, octave].exp()
        usable = (count[..., columns[0]] > 0) & (keys >= _FEWEST_KEYS)
        if "sink_mass" in metrics:
            usable &= mean[..., metrics.index("sink_mass")] == 0
        expected = expected_head_metrics(
            np.where(usable, keys, _FEWEST_KEYS),
            first_gap=torch.where(usable, first, math.nan).numpy(),
            first_gap_std=std[..., columns[0]].nan_to_num(0.0).numpy(),
            rest_logit_std=rest_std.clamp(min=0).numpy(),
            rest_jensen_gap=jensen.clamp(min=0).numpy(),
        )
        means = dict(zip(metrics, mean.masked_fill(count == 0, math.nan).unbind(-1), strict=True))
        impossible = np.isfinite(expected.first_weight) & np.isnan(expected.entropy)
        return PredictedHeads(
            n=torch.where(rows.sum(1) > 0, keys, math.nan),
            predicted={name: torch.as_tensor(getattr(expected, name)) for name in PREDICTED},
            measured={name: means[name] for name in PREDICTED if name in means},
            skewness=torch.as_tensor(expected.skewness),
            impossible=torch.as_tensor(impossible),
        )

    def layer(self, index: int) -> Moments:
        """Moments of all heads of one layer pooled, (1, metrics)."""
        start = sum(layer.heads for layer in self.layers[:index])
        heads = range(start, start + self.layers[index].heads)
        none = Moments.none(1, len(self.metrics))
        return reduce(Moments.merge, (self.moments.heads(i, i + 1) for i in heads), none)

    def merge(self, other: HeadSummary) -> HeadSummary:
        """Combine the rows of two summaries layer by layer; layers of only one are included.

        Raises:
            ValueError: if they recorded different metrics or spans, or a layer's head counts
                differ.
        """
        if self.metrics != other.metrics:
            raise ValueError(
                "summaries can be merged only if they recorded the same metrics, got "
                f"{', '.join(self.metrics)} in one and {', '.join(other.metrics)} in the other"
            )
        layers = {layer.module: layer for layer in self.layers}
        for layer in other.layers:
            earlier = layers.get(layer.module)
            if earlier is None:
                layers[layer.module] = layer
            elif set(earlier.numbers).isdisjoint(layer.numbers):
                layers[layer.module] = earlier.join_heads(layer)
            else:
                layers[layer.module] = earlier.merge(layer)
        mine, theirs = _heads(self.layers), _heads(other.layers)
        merged = _heads(layers.values())
        groups: dict[tuple[bool, bool], list[tuple[str, int]]] = {}
        for head in merged:
            groups.setdefault((head in mine, head in theirs), []).append(head)
        pieces = []
        for held, heads in groups.items():
            sides = [side for side, holds in zip((self, other), held, strict=True) if holds]
            pieces.append(reduce(Parts.merge, [side._statistics(heads) for side in sides]))
        index = {head: i for i, head in enumerate(chain.from_iterable(groups.values()))}
        statistics = Parts.join(pieces).select([index[head] for head in merged])
        moments: Any = statistics.pop("moments", self.moments)
        return HeadSummary(
            tuple(layers.values()),
            self.metrics,
            moments,
            optional_parts=statistics,
            about={**other.about, **self.about},
            unread=tuple(dict.fromkeys(self.unread + other.unread)),
            not_provided=tuple(dict.fromkeys(self.not_provided + other.not_provided)),
            maps=merged_maps(self.maps, other.maps),
        )

    def _statistics(self, heads: Iterable[tuple[str, int]]) -> Parts:
        """The moments and further statistics of these heads, by name."""
        index = _heads(self.layers)
        statistics = Parts(moments=self.moments, **self.optional_parts)
        return statistics.select([index[head] for head in heads])

    @staticmethod
    def join(summaries: Sequence[HeadSummary], **others: Any) -> HeadSummary:
        """A summary of the layers of all these, which differ; ``others`` are its further fields."""
        parts = Parts.join(
            [Parts(moments=summary.moments, **summary.optional_parts) for summary in summaries]
        )
        moments: Any = parts.pop("moments")
        layers = tuple(chain.from_iterable(summary.layers for summary in summaries))
        return HeadSummary(layers, summaries[0].metrics, moments, optional_parts=parts, **others)

    def columns(self) -> dict[str, list[Any]]:
        """A table with one row for each layer and head, as columns.

        First ``layer`` (index in model order), ``head``, ``module``, ``status`` and ``rows``. Then
        the numbers of rows left out: ``padded`` (``padded_by`` names the mask), ``empty`` (they see
        no key), ``excluded`` (not selected by the user) and ``skipped`` (not sampled), and
        ``unseen`` (read, but no row sees their token). Then each metric's mean, standard deviation,
        minimum and maximum over rows, and the standard error from sampling if rows were sampled.
        Then ``predicted_entropy``, of the rows that :meth:`predict` compares it with.
        With structure, the mean weight by octave of distance, ``mass_octave_<k>`` before and
        ``mass_octave_ahead_<k>`` after the query, and ``classes``, the names from :func:`classify`.
        With spans, the mean weight of all rows on each span, ``weight_on_<span>``, its standard
        error over sequences, ``weight_on_<span>_error``, and the value for uniform attention,
        ``weight_on_<span>_even``.
        """
        table: dict[str, list[Any]] = {
            "layer": [layer for layer, _ in self.places],
            "head": [head for _, head in self.places],
        }
        for column in ("module", "status", "rows", *LEFT_OUT, "padded_by", "unseen"):
            table[column] = [getattr(self.layers[layer], column) for layer in table["layer"]]
        table |= self.moments.columns(self.metrics, sampled=self.sampled)
        if self.predicted_entropy is not None:
            table["predicted_entropy"] = self.predicted_entropy
        for name, cells in self.optional_parts.items():
            table |= cells.columns(self.metrics)
            if name == "distances":
                table["classes"] = [
                    " ".join(head_class.name for head_class in each) for each in classify(self)
                ]
        return table

    def to_parquet(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_arrow` as a Parquet file, atomically."""
        import pyarrow.parquet

        table = self.to_arrow()
        write_whole(path, lambda where: pyarrow.parquet.write_table(table, where))

    def to_dict(self) -> dict[str, Any]:
        """Everything as JSON values; numbers that are not finite become None."""
        numbers = self.moments.to_dicts(self.metrics, sampled=self.sampled)
        heads = [
            {"layer": layer, "head": head, "metrics": metrics}
            for (layer, head), metrics in zip(self.places, numbers, strict=True)
        ]
        for entry, predicted in zip(heads, self.predicted_entropy or (), strict=False):
            entry["predicted_entropy"] = finite(predicted)
        for entry, classes in zip(heads, classify(self), strict=True):
            entry["classes"] = [finite(each.to_dict()) for each in classes]
        for name, cells in self.optional_parts.items():
            for entry, numbers in zip(heads, cells.to_dicts(self.metrics), strict=True):
                entry[READOUTS[name].title] = finite(numbers)
        return {
            "schema": SCHEMA,
            "about": finite(dict(self.about)),
            "notices": notices(self.about),
            "layers": [finite({"layer": i, **asdict(one)}) for i, one in enumerate(self.layers)],
            "metrics": {
                name: {part: getattr(describe(name), part) for part in ("unit", "range", "meaning")}
                | {"edges": edges(name)}
                for name in self.metrics
            },
            "heads": heads,
            "unread": list(self.unread),
            "coverage": self.coverage,
            "not_provided": list(self.not_provided),
        } | maps_to_dict(self.maps)

    def to_json(self, path: str | os.PathLike[str]) -> None:
        """Write :meth:`to_dict` as a JSON file, atomically."""
        write_text(path, as_json(self.to_dict()))

    def parts(self) -> tuple[dict[str, str], dict[str, Tensor]]:
        """Header and arrays for a file or a message, which ``summary.state.from_parts`` reads."""
        names = ("metrics", "layers", "about", "unread", "not_provided")
        record = {name: getattr(self, name) for name in names}
        record |= {"layers": [asdict(layer) for layer in self.layers], "about": dict(self.about)}
        arrays = self.moments.tensors() | self.optional_parts.tensors()
        tensors = {name: tensor.contiguous() for name, tensor in arrays.items()}
        header = {"schema": SCHEMA, "summary": json.dumps(record)}
        for cells in self.optional_parts.values():
            if (texts := cells.texts()) is not None:
                header[cells.text_field] = json.dumps(texts)
        if self.maps:
            header["maps"] = json.dumps([head_map.record() for head_map in self.maps])
        for index, head_map in enumerate(self.maps):
            tensors[f"maps.{index}"] = head_map.weights.contiguous()
        return header, tensors

    def save(self, path: str | os.PathLike[str], extra: Mapping[str, str] | None = None) -> None:
        """Write the summary atomically to a safetensors file for :func:`load`.

        Maps of more than 262,144 weights are left out, and ``about`` says so.

        Args:
            path: the file.
            extra: further entries of the header.
        """
        from safetensors.torch import save

        stored = self
        if not few_enough(self.maps):
            text = f"{len(self.maps)} maps were too large for the state"
            stored = replace(self, maps=(), about={**self.about, "maps": text})
        header, tensors = stored.parts()
        header, tensors = compact(header | dict(extra or {}), tensors)
        # save_file has a temporary file of its own, whose name a killed run would leave behind
        whole = save(tensors, metadata=sealed(header, tensors))
        write_bytes(path, whole)
