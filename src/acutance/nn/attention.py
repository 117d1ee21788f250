r"""Multi-head attention with PyTorch's arguments, and the gated attention unit.

Both take any score, weighting, scaling and position. ``nn.MultiheadAttention`` and
:func:`~torch.nn.functional.scaled_dot_product_attention` disagree on the meaning of True in a mask.
In what :func:`translate` returns, as in the latter, True marks a key that takes part.
"""

from __future__ import annotations

import functools
from collections.abc import MutableMapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import dropout as drop_weights
from torch.nn.functional import linear, pad, silu

from acutance import scaling as scalings
from acutance import scores
from acutance import weights as weightings
from acutance.attend import Score, attention, computed, validated
from acutance.kernels.whole_rows import weighted_values, whole_weights
from acutance.nn.positions import Alibi, Positions, Rotary, find_positions
from acutance.nn.recording import Recorded, Recording
from acutance.scaling import AnyScaling
from acutance.scores import Additive, AdditiveScore, General, GeneralScore, Location, QKNorm
from acutance.shapes import FLOATS, check_count, check_flag, check_number, check_tensor, describe
from acutance.weights import Sink, Weighting

_SEPARATE = ("q_proj_weight", "k_proj_weight", "v_proj_weight")


class MultiheadAttention(Recorded):
    r"""``torch.nn.MultiheadAttention`` with statistics of each attention row.

    Arguments up to ``dtype``, and names, shapes and initial values of parameters, are those of
    :class:`torch.nn.MultiheadAttention`. Its state dict loads, and with default further arguments
    the output is equal up to rounding.

    .. warning::
        In boolean masks **True hides a key**, as in ``nn.MultiheadAttention``. That is the opposite
        of :func:`acutance.attention` and :func:`~torch.nn.functional.scaled_dot_product_attention`.

    There are four differences from PyTorch. ``need_weights`` is False by default, since the weights
    are an L×S matrix. ``is_causal=True`` applies the causal mask, with or without ``attn_mask``,
    and is not only a hint. A row whose keys are all hidden gives 0 before the output projection,
    not NaN. The keys of ``add_bias_kv`` and ``add_zero_attn`` are visible to every row under
    ``is_causal`` too; they precede the others, so ``first_weight`` is the weight of the first of
    them.

    Args:
        embed_dim: width of query and output.
        num_heads: number of query heads, Hq; must divide ``embed_dim``.
        dropout: probability of dropping a weight in training.
        bias: add a bias to the projections.
        add_bias_kv: add a trained key and value.
        add_zero_attn: add a key and value of zeros.
        kdim: width of the key; None for ``embed_dim``.
        vdim: width of the value; None for ``embed_dim``.
        batch_first: inputs and output are (B, L, E), not (L, B, E).
        device, dtype: of the parameters.
        score: a name or a score of :mod:`acutance.scores`. ``"general"`` and ``"additive"`` train a
            :class:`~acutance.scores.GeneralScore` or :class:`~acutance.scores.AdditiveScore` for
            each head; other modules, such as :class:`~acutance.scores.QKNorm`, are trained too.
        weights: a name or a weighting of :mod:`acutance.weights`; ``"sink"`` trains a sink for each
            head. A Parameter in a weighting is trained; a tensor becomes a buffer.
        scaling: a name or a law of :mod:`acutance.scaling`; learned ones are trained.
        num_kv_heads: number of key heads, H, which query heads share; None for ``num_heads``.
            PyTorch's state dicts load only with None.
        positions: None; ``"rotary"`` or a :class:`Rotary`, applied to query and key, after the
            normalisation of a QKNorm; ``"alibi"`` or an :class:`Alibi`.
        statistics: ``"detached"``, ``"graph"`` or ``"off"``, see :class:`Recorded`.

    Attributes:
        last_statistics: statistics of the last forward before dropout, fields (B, Hq, L):
            :class:`~acutance.rowstats.RowStatistics`, or
            :class:`~acutance.rowstats.WeightStatistics` for weights other than softmax.

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one does not fit; the message names it.

    Example:
        >>> _ = torch.manual_seed(0)
        >>> theirs = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> ours = MultiheadAttention(16, 4, batch_first=True)
        >>> ours.load_state_dict(theirs.state_dict())
        <All keys matched successfully>
        >>> x = torch.randn(2, 10, 16)
        >>> torch.allclose(ours(x, x, x)[0], theirs(x, x, x)[0], atol=1e-6)
        True
        >>> ours.last_statistics.effective_keys.shape
        torch.Size([2, 4, 10])

        Grouped heads, rotary positions, normalised queries and keys, softmax sharpened by log n:

        >>> from acutance.scaling import LogN
        >>> from acutance.scores import QKNorm
        >>> modern = MultiheadAttention(
        ...     16,
        ...     4,
        ...     batch_first=True,
        ...     num_kv_heads=2,
        ...     positions="rotary",
        ...     score=QKNorm(4),
        ...     scaling=LogN(train_length=8),
        ... )
        >>> out, _ = modern(x, x, x, is_causal=True)

    Source:
        Vaswani et al. (2017), arXiv:1706.03762; Ainslie et al. (2023), arXiv:2305.13245.
    """

    in_proj_weight: nn.Parameter | None
    in_proj_bias: nn.Parameter | None
    bias_k: nn.Parameter | None
    bias_v: nn.Parameter | None
    #: PyTorch's encoder layer asks for it and, finding True, would compute around this module.
    _qkv_same_embed_dim = False

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        score: str | Score = "scaled_dot",
        weights: str | Weighting = "softmax",
        scaling: str | AnyScaling | None = None,
        num_kv_heads: int | None = None,
        positions: Positions = None,
        statistics: Recording = "detached",
    ) -> None:
        check_count("embed_dim", embed_dim, 1)
        check_count("num_heads", num_heads, 1)
        if embed_dim % num_heads:
            raise ValueError(
                f"num_heads must divide embed_dim, got embed_dim={embed_dim}, num_heads={num_heads}"
            )
        kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_count("num_kv_heads", kv_heads, 1)
        if num_heads % kv_heads:
            raise ValueError(f"num_kv_heads must divide num_heads={num_heads}, got {kv_heads}")
        head_dim = embed_dim // num_heads
        super().__init__(statistics)
        self.embed_dim, self.kv_width = embed_dim, kv_heads * head_dim
        self.kdim = embed_dim if kdim is None else check_count("kdim", kdim, 1)
        self.vdim = embed_dim if vdim is None else check_count("vdim", vdim, 1)
        check_flag("bias", bias)
        check_flag("add_bias_kv", add_bias_kv)
        factory: dict[str, Any] = {"device": device, "dtype": dtype}
        # one packed matrix if all inputs have the module's width, as in PyTorch
        packed = self.kdim == self.vdim == embed_dim
        width, further_key = embed_dim + 2 * self.kv_width, (1, 1, self.kv_width)
        shapes = {
            "in_proj_weight": (width, embed_dim) if packed else None,
            "q_proj_weight": None if packed else (embed_dim, embed_dim),
            "k_proj_weight": None if packed else (self.kv_width, self.kdim),
            "v_proj_weight": None if packed else (self.kv_width, self.vdim),
            "in_proj_bias": (width,) if bias else None,
            "bias_k": further_key if add_bias_kv else None,
            "bias_v": further_key if add_bias_kv else None,
        }
        for name, shape in shapes.items():
            tensor = None if shape is None else nn.Parameter(torch.empty(shape, **factory))
            self.register_parameter(name, tensor)
        self.out_proj = nn.Linear(embed_dim, embed_dim, bias=bias, **factory)
        self.register_load_state_dict_pre_hook(_pack)  # type: ignore[no-untyped-call]
        self.reset_parameters()
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, kv_heads, head_dim
        self.dropout = check_number("dropout", dropout, above=0.0, below=1.0, including=True)
        self.batch_first = check_flag("batch_first", batch_first)
        self.add_zero_attn = check_flag("add_zero_attn", add_zero_attn)
        self.positions = find_positions(positions)
        if self.positions is not None and (add_bias_kv or add_zero_attn):
            raise ValueError(
                "positions cannot be combined with add_bias_kv or add_zero_attn, whose keys "
                f"have no position, got positions={positions!r}"
            )
        if isinstance(self.positions, Rotary) and head_dim % 2:
            raise ValueError(f"positions='rotary' needs an even head width, got {head_dim}")
        if isinstance(self.positions, Alibi):
            self.positions.of(num_heads)  # one for each head, or an error now
        self.score = hold_score(score, head_dim, num_heads, kv_heads, **factory)
        self.weights = HeldWeights(weights, num_heads, **factory)
        self.scaling = scalings.get(scaling)

    def reset_parameters(self) -> None:
        """Reinitialise the input projections like ``nn.MultiheadAttention``; zero the biases."""
        for name in ("in_proj_weight", *_SEPARATE):
            weight = getattr(self, name)
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = False,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        query_offset: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Compute attention.

        Args:
            query: (L, B, embed_dim), (B, L, embed_dim) with ``batch_first``, or (L, embed_dim).
            key: (S, B, kdim), like the query.
            value: (S, B, vdim), like the query.
            key_padding_mask: (B, S), or (S,) without a batch. Boolean: **True hides**. Floating:
                added to the scores.
            need_weights: also return the weights, which takes an L×S matrix for each head.
            attn_mask: (L, S) or (B · Hq, L, S). Boolean: **True hides**. Floating: added to the
                scores.
            average_attn_weights: return the mean of the heads' weights instead of each head's.
            is_causal: row i sees keys j ≤ i + query_offset that ``attn_mask`` does not hide.
            query_offset: position of query 0 among the keys, for ``is_causal`` and ``positions``: S
                − L if the queries are the last of the keys.

        Returns:
            The output, shaped as the query, and with ``need_weights`` the weights (B, L, S), or (B,
            Hq, L, S) for each head, without B for inputs without a batch; otherwise None. In
            training the weights are those after dropout.

        Raises:
            TypeError: if an input is not a Tensor, or a mask neither boolean nor floating.
            ValueError: if shapes do not fit.
        """
        for name, tensor in (("query", query), ("key", key), ("value", value)):
            if check_tensor(name, tensor).dim() not in (2, 3) or tensor.dim() != query.dim():
                raise ValueError(
                    "query, key and value must have three dimensions, or two without a batch, "
                    f"got {describe(query=query, key=key, value=value)}"
                )
        check_flag("need_weights", need_weights)
        check_flag("average_attn_weights", average_attn_weights)
        check_flag("is_causal", is_causal)
        batched = query.dim() == 3
        if key_padding_mask is not None and not batched:
            key_padding_mask = check_tensor("key_padding_mask", key_padding_mask).unsqueeze(0)
        if not batched:
            query, key, value = (x.unsqueeze(0) for x in (query, key, value))
        elif not self.batch_first:
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
        q, k, v, score = self._heads(query, key, value, query_offset)
        keys, (k, v) = k.shape[2], self._with_extra(k, v)
        extra = k.shape[2] - keys
        slopes = None
        if isinstance(self.positions, Alibi):  # no buffer, which casting the module would round
            dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
            slopes = self.positions.of(self.num_heads, dtype=dtype, device=q.device)
        size = (q.shape[0], self.num_heads, q.shape[2], keys)
        masks = translate(attn_mask, key_padding_mask, size, is_causal=is_causal, extra=extra)
        options: dict[str, Any] = {
            **masks,
            "is_causal": is_causal,
            "query_offset": query_offset + extra,
            "alibi_slopes": slopes,
            "enable_gqa": True,
            "score": score,
            "weights": self.weights(),
            "scaling": self.scaling,
        }
        weights, drop = None, self.dropout if self.training else 0.0
        if need_weights:
            call = validated(q, k, None, **options)
            if self.statistics != "off":
                self._record(computed(call)[1])
            weights = drop_weights(whole_weights(call), drop).to(v.dtype)
            heads = weighted_values(weights, v)
        else:
            heads, stats = attention(q, k, v, dropout_p=drop, return_stats=True, **options)
            self._record(stats)
        out = self.out_proj(heads.transpose(1, 2).flatten(2))
        if not batched:
            out = out.squeeze(0)
        elif not self.batch_first:
            out = out.transpose(0, 1)
        if weights is not None:
            weights = torch.cat([weights[..., extra:], weights[..., :extra]], -1)
            weights = weights.mean(1) if average_attn_weights else weights
            weights = weights if batched else weights.squeeze(0)
        return out, weights

    def _heads(
        self, query: Tensor, key: Tensor, value: Tensor, offset: int
    ) -> tuple[Tensor, Tensor, Tensor, Score]:
        """Projected inputs by head, with their positions, and the score that they still need."""
        widths = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}
        for (name, width), x in zip(widths.items(), (query, key, value), strict=True):
            if x.shape[-1] != width:
                raise ValueError(
                    f"{name} must have the width {width}, got {x.shape[-1]} "
                    f"({describe(**{name: x})})"
                )
        if key.shape[:2] != value.shape[:2]:
            raise ValueError(
                "key and value must have the same batch size and source length, got "
                f"{describe(key=key, value=value)}"
            )
        if query.shape[0] != key.shape[0]:
            raise ValueError(
                f"query and key must have the same batch size: query has B={query.shape[0]}, "
                f"key has B={key.shape[0]} ({describe(query=query)})"
            )
        projected = [self._project(i, x) for i, x in enumerate((query, key, value))]
        q, k, v = (_split_heads(x, self.head_dim) for x in projected)
        score = self.score
        if isinstance(self.positions, Rotary):
            if isinstance(score, QKNorm):
                q, k = score(q, k)
                score = _Scaled(score.scale)
            q, k = self.positions(q, offset), self.positions(k)
        return q, k, v, score

    def _project(self, index: int, x: Tensor) -> Tensor:
        """Project x (..., inputs) to query (index 0), key (1) or value (2)."""
        widths = [self.embed_dim, self.kv_width, self.kv_width]
        if self.in_proj_weight is not None:
            weight = self.in_proj_weight.split(widths)[index]
        else:
            weight = getattr(self, _SEPARATE[index])
        bias = None if self.in_proj_bias is None else self.in_proj_bias.split(widths)[index]
        return linear(x, weight, bias)

    def _with_extra(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values, preceded by those of ``add_bias_kv`` and ``add_zero_attn``."""
        keys, values = [key], [value]
        if self.add_zero_attn:
            for tensors in (keys, values):
                tensors.insert(0, key.new_zeros(*key.shape[:2], 1, self.head_dim))
        if self.bias_k is not None and self.bias_v is not None:
            for tensors, bias in ((keys, self.bias_k), (values, self.bias_v)):
                row = _split_heads(bias.to(key.dtype), self.head_dim)
                tensors.insert(0, row.expand(key.shape[0], -1, -1, -1))
        return (torch.cat(keys, 2), torch.cat(values, 2)) if len(keys) > 1 else (key, value)

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        named = getattr(self.score, "name", None)
        score = "" if named is None else f", score={named!r}"
        return (
            f"{self.embed_dim}, num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}"
            f"{score}, scaling={self.scaling}, positions={self.positions}"
        )


def _split_heads(x: Tensor, width: int) -> Tensor:
    """Reshape (B, L, heads · width) to (B, heads, L, width)."""
    split: Tensor = x.unflatten(-1, (-1, width)).transpose(1, 2)
    return split


def _pack(module: nn.Module, state_dict: MutableMapping[str, Any], prefix: str, *_: object) -> None:
    """State-dict hook: concatenate separate projections if the module has a packed one."""
    if getattr(module, "in_proj_weight", None) is None:
        return
    names = [prefix + name for name in _SEPARATE]
    if all(name in state_dict for name in names):
        state_dict[prefix + "in_proj_weight"] = torch.cat([state_dict.pop(name) for name in names])


@dataclass(frozen=True)
class _Scaled:
    """A dot-product score of normalised vectors, with the scale of the original score."""

    scale: float

    def transform(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor, float]:
        return query, key, self.scale


class GatedAttentionUnit(Recorded):
    r"""A gated attention unit (GAU): attention and gated linear unit in one.

    .. math::
        u, v, z = \mathrm{silu}(x W_u), \mathrm{silu}(x W_v), \mathrm{silu}(x W_z), \qquad
        q = \gamma_q \odot z + \beta_q, \quad k = \gamma_k \odot z + \beta_k, \\
        a_{ij} = \tfrac{1}{n_i} \mathrm{relu}(q_i \cdot k_j / \sqrt{s})^2, \qquad
        o_i = \Bigl(u_i \odot \textstyle\sum_j a_{ij} v_j\Bigr) W_o

    Query and key share one narrow z, each with a scale and an offset per component. The norm before
    the unit and the residual sum are not part of the module: ``x + unit(norm(x))``.

    The articles differ in constants. Su divides by :math:`n s`, as here. The first article's code
    has :math:`\mathrm{relu}(q \cdot k / n)^2`, 1/n² in all, and a relative bias instead of rotary
    positions. Here n is the number of keys that the row sees, not the padded length.

    Args:
        embed_dim: width of input and output, d.
        key_dim: width of z, s.
        expansion: u and v have width ``expansion · embed_dim``.
        bias: add a bias to the projections.
        weights: ``"relu2"`` as in the articles; ``"softmax"`` with ``scaling=LogN(train_length=512,
            n_min=1)`` is Su's softmax plus; any other weighting of :mod:`acutance.weights`.
        score: a name or score of :mod:`acutance.scores`.
        scaling: a name or law of :mod:`acutance.scaling`.
        positions: None, ``"rotary"`` or a :class:`Rotary`.
        dropout: probability of dropping a weight in training.
        statistics: ``"detached"``, ``"graph"`` or ``"off"``, see :class:`Recorded`.
        device, dtype: of the parameters.

    Attributes:
        last_statistics: statistics of the last forward, fields (B, 1, L).

    Raises:
        TypeError: if an argument is of the wrong kind.
        ValueError: if one does not fit.

    Example:
        >>> unit = GatedAttentionUnit(16, key_dim=8, positions="rotary")
        >>> unit(torch.randn(2, 10, 16), is_causal=True).shape
        torch.Size([2, 10, 16])
        >>> unit.last_statistics.sparsity.shape
        torch.Size([2, 1, 10])

        >>> from acutance.scaling import LogN
        >>> law = LogN(train_length=512, n_min=1)
        >>> plus = GatedAttentionUnit(16, weights="softmax", scaling=law)

    Source:
        Hua et al. (2022), arXiv:2202.10447; Su Jianlin, kexue.fm articles 8934 and 9019 (softmax
        plus).
    """

    def __init__(
        self,
        embed_dim: int,
        key_dim: int = 128,
        expansion: int = 2,
        *,
        bias: bool = True,
        weights: str | Weighting = "relu2",
        score: str | Score = "scaled_dot",
        scaling: str | AnyScaling | None = None,
        positions: Positions = None,
        dropout: float = 0.0,
        statistics: Recording = "detached",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(statistics)
        self.embed_dim = check_count("embed_dim", embed_dim, 1)
        self.key_dim = check_count("key_dim", key_dim, 1)
        self.hidden = check_count("expansion", expansion, 1) * embed_dim
        self.positions = find_positions(positions, alibi=False)
        if self.positions is not None and key_dim % 2:
            raise ValueError(f"positions='rotary' needs an even key_dim, got {key_dim}")
        self.dropout = check_number("dropout", dropout, above=0.0, below=1.0, including=True)
        check_flag("bias", bias)
        wide = 2 * self.hidden + key_dim
        self.in_proj = nn.Linear(embed_dim, wide, bias=bias, device=device, dtype=dtype)
        self.out_proj = nn.Linear(self.hidden, embed_dim, bias=bias, device=device, dtype=dtype)
        self.gamma = nn.Parameter(torch.empty(2, key_dim, device=device, dtype=dtype))
        self.beta = nn.Parameter(torch.empty(2, key_dim, device=device, dtype=dtype))
        self.score = hold_score(score, key_dim, 1, 1, device=device, dtype=dtype)
        self.weights = HeldWeights(weights, 1, device=device, dtype=dtype)
        self.scaling = scalings.get(scaling)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise as published: Glorot projections, zero biases, γ ~ N(0, 0.02²), β = 0."""
        for layer in (self.in_proj, self.out_proj):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        nn.init.normal_(self.gamma, std=0.02)
        nn.init.zeros_(self.beta)

    def forward(
        self, x: Tensor, key_padding_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """The unit's output, before the residual sum.

        Args:
            x: (B, L, embed_dim), already normalised.
            key_padding_mask: boolean (B, L), **True hides**.
            is_causal: row i sees rows up to i.

        Returns:
            (B, L, embed_dim).
        """
        if check_tensor("x", x).dim() != 3 or x.shape[2] != self.embed_dim:
            raise ValueError(
                f"x must have shape (B, L, embed_dim={self.embed_dim}), got {tuple(x.shape)}"
            )
        wide = silu(self.in_proj(x))
        u, v, z = wide.split([self.hidden, self.hidden, self.key_dim], -1)
        q, k = (z.unsqueeze(-2) * self.gamma + self.beta).unsqueeze(1).unbind(-2)
        if isinstance(self.positions, Rotary):
            q, k = self.positions(q), self.positions(k)
        out, stats = attention(
            q,
            k,
            v.unsqueeze(1),
            is_causal=check_flag("is_causal", is_causal),
            key_mask=key_mask(key_padding_mask, x.shape[0], x.shape[1]),
            dropout_p=self.dropout if self.training else 0.0,
            score=self.score,
            weights=self.weights(),
            scaling=self.scaling,
            return_stats=True,
        )
        self._record(stats)
        gated: Tensor = self.out_proj(u * out.squeeze(1))
        return gated

    def extra_repr(self) -> str:
        """The sizes, for ``print``."""
        return (
            f"{self.embed_dim}, key_dim={self.key_dim}, hidden={self.hidden}, "
            f"scaling={self.scaling}, positions={self.positions}"
        )


_RECORDS = (General, Additive, Location)


def hold_score(
    score: str | Score, width: int, num_heads: int, num_kv_heads: int, **factory: Any
) -> Score:
    """The score for a name, trainable if it has parameters, or the given score.

    Parameters are created with the device and dtype of ``factory``.

    Raises:
        ValueError: if the name is unknown, or its parameters must be given explicitly.
        TypeError: if it is not a score, or a record whose parameters would not be trained.
    """
    if score == "general":
        return GeneralScore(width, num_heads=num_heads, **factory)
    if score == "additive":
        return AdditiveScore(width, num_heads=num_heads, num_kv_heads=num_kv_heads, **factory)
    for name, part in (vars(score) if isinstance(score, _RECORDS) else {}).items():
        if isinstance(part, nn.Parameter):
            kind = type(score).__name__
            raise TypeError(
                f"score={kind}(...) contains the Parameter {name}, which this module would not "
                f"train: pass the module scores.{kind}Score"
            )
    return scores.get(score)


class HeldWeights(nn.Module):
    """A weighting whose tensors are parameters or buffers of this module.

    Args:
        weights: a name or a weighting. ``"sink"`` trains a sink for each head, initially 0.
        num_heads: number of query heads, Hq.
        factory: device and dtype of new parameters.
    """

    def __init__(self, weights: str | Weighting, num_heads: int, **factory: Any) -> None:
        super().__init__()
        if weights == Sink.name:
            weights = Sink(nn.Parameter(torch.zeros(num_heads, **factory)))
        record = weightings.get(weights)
        self.names = [name for name, part in vars(record).items() if isinstance(part, Tensor)]
        for name in self.names:
            tensor = getattr(record, name)
            if isinstance(tensor, nn.Parameter):
                self.register_parameter(name, tensor)
            else:
                self.register_buffer(name, tensor)
        self.record = record

    def forward(self) -> Weighting:
        """The weighting with the current tensors."""
        if not self.names:
            return self.record
        tensors: dict[str, Any] = {name: getattr(self, name) for name in self.names}
        return replace(self.record, **tensors)

    def extra_repr(self) -> str:
        """The weighting's name, for ``print``."""
        return repr(self.record.name)


def key_mask(key_padding_mask: Tensor | None, batch: int, keys: int) -> Tensor | None:
    """The inverse of a boolean padding mask: (B, S), True for visible keys.

    Raises:
        TypeError: if it is not boolean.
        ValueError: if it is not (B, S).
    """
    if key_padding_mask is None:
        return None
    if check_tensor("key_padding_mask", key_padding_mask).dtype != torch.bool:
        raise TypeError(
            f"key_padding_mask must be boolean, True for hidden keys, got {key_padding_mask.dtype}"
        )
    _check_padding(key_padding_mask, batch, keys)
    return torch.logical_not(key_padding_mask)


def _check_padding(key_padding_mask: Tensor, batch: int, keys: int) -> None:
    """Raise ValueError unless a padding mask is (B, S)."""
    if tuple(key_padding_mask.shape) != (batch, keys):
        raise ValueError(
            f"key_padding_mask must have shape (B, S) = ({batch}, {keys}), got "
            f"{tuple(key_padding_mask.shape)}"
        )


def translate(
    attn_mask: Tensor | None,
    key_padding_mask: Tensor | None,
    size: tuple[int, int, int, int],
    *,
    is_causal: bool,
    extra: int,
) -> dict[str, Tensor | None]:
    """Convert the masks of ``nn.MultiheadAttention``, for keys preceded by ``extra`` further keys.

    ``size`` is (B, Hq, L, S), without those further keys.

    Raises:
        TypeError: if a mask is neither boolean nor floating.
        ValueError: if its shape does not fit.
    """
    batch, _, _, keys = size
    biases = []
    seen = None
    if key_padding_mask is not None:
        if _check_kind("key_padding_mask", key_padding_mask) == torch.bool:
            seen = key_mask(key_padding_mask, batch, keys)
            assert seen is not None
            seen = pad(seen, (extra, 0), value=True) if extra else seen
        else:
            _check_padding(key_padding_mask, batch, keys)
            biases.append(pad(key_padding_mask, (extra, 0)).view(batch, 1, 1, extra + keys))
    mask = None
    if attn_mask is not None:
        boolean = _check_kind("attn_mask", attn_mask) == torch.bool
        mask = _four_dimensional(attn_mask, size)
        mask = torch.logical_not(mask) if boolean else mask
        if extra:
            mask = pad(mask, (extra, 0), value=True) if boolean else pad(mask, (extra, 0))
        if is_causal:  # attention() takes one or the other; a bias goes with both
            if boolean:
                mask = torch.zeros_like(mask, dtype=torch.float32).masked_fill(~mask, -torch.inf)
            biases.append(mask)
            mask = None
    bias = functools.reduce(torch.add, biases) if biases else None
    return {"attn_mask": mask, "key_mask": seen, "bias": bias}


def _check_kind(name: str, mask: Tensor) -> torch.dtype:
    """Dtype of a mask; raises TypeError unless it is boolean or floating."""
    dtype = check_tensor(name, mask).dtype
    if dtype != torch.bool and dtype not in FLOATS:
        raise TypeError(
            f"{name} must be boolean (True hides) or floating-point (added to the scores), got "
            f"{dtype}"
        )
    return dtype


def _four_dimensional(mask: Tensor, size: tuple[int, int, int, int]) -> Tensor:
    """Reshape a mask (L, S) or (B·Hq, L, S) to (1, 1, L, S) or (B, Hq, L, S)."""
    batch, heads, queries, keys = size
    if tuple(mask.shape) == (queries, keys):
        return mask[None, None]
    if tuple(mask.shape) == (batch * heads, queries, keys):
        return mask.view(size)
    raise ValueError(
        f"attn_mask must have shape (L, S) = ({queries}, {keys}) or (B·Hq, L, S) = "
        f"({batch * heads}, {queries}, {keys}), got {tuple(mask.shape)}"
    )
