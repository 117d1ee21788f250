"""DecoderBlock is its formula, written out, and its steps are one forward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from acutance.nn import DecoderBlock
from acutance.scaling import SqrtLogN

B, L, S, D, M, H = 2, 6, 9, 16, 10, 4


def make(dtype: torch.dtype = torch.float64, **options: Any) -> tuple[DecoderBlock, Any]:
    block = DecoderBlock(D, H, memory_dim=M, dtype=dtype, **options)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "bias" in name or "norms" in name:
                parameter.normal_()
    hidden = torch.zeros(B, S, dtype=torch.bool)
    hidden[1, 5:] = True
    x, memory = torch.randn(B, L, D, dtype=dtype), torch.randn(B, S, M, dtype=dtype)
    return block, (x, memory, hidden)


def heads(x: Tensor) -> Tensor:
    return x.reshape(B, -1, H, D // H).permute(0, 2, 1, 3)


def formula(block: DecoderBlock, x: Tensor, memory: Tensor, hidden: Tensor) -> Tensor:
    """With bare matrix products."""
    own, cross = block.self_attention, block.cross_attention
    y = block.norms[0](x)
    q, k, v = (heads(p) for p in (y @ own.in_proj_weight.T + own.in_proj_bias).chunk(3, -1))
    s = (q @ k.mT / 2).masked_fill(torch.ones(L, L).triu(1).bool(), -torch.inf)
    a = (torch.softmax(s, -1) @ v).permute(0, 2, 1, 3).flatten(2)
    x = x + a @ own.out_proj.weight.T + own.out_proj.bias

    bq, bk, bv = cross.in_proj_bias.chunk(3)
    q = heads(block.norms[1](x) @ cross.q_proj_weight.T + bq)
    k = heads(memory @ cross.k_proj_weight.T + bk)
    v = heads(memory @ cross.v_proj_weight.T + bv)
    score = cross.score
    left = torch.einsum("bhld,hed->bhle", q, score.query_weight).unsqueeze(3)
    right = torch.einsum("bhsd,hed->bhse", k, score.key_weight).unsqueeze(2)
    s = torch.einsum("bhlse,he->bhls", torch.tanh(left + right), score.vector)
    p = torch.softmax(s.masked_fill(hidden[:, None, None], -torch.inf), -1)
    a = (p @ v).permute(0, 2, 1, 3).flatten(2)
    x = x + a @ cross.out_proj.weight.T + cross.out_proj.bias

    first, last = block.network[0], block.network[3]
    y = nn.functional.gelu(block.norms[2](x) @ first.weight.T + first.bias)
    return x + y @ last.weight.T + last.bias, p


def test_it_is_its_formula() -> None:
    block, given = make()
    out = block(*given)
    want, p = formula(block, *given)
    torch.testing.assert_close(out, want, rtol=0, atol=1e-11)
    upstream = torch.randn_like(out)
    names, parameters = zip(*block.named_parameters(), strict=True)
    got = torch.autograd.grad(out, parameters, upstream)
    expected = torch.autograd.grad(want, parameters, upstream)
    for name, one, two in zip(names, got, expected, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-9, atol=1e-9, msg=name)
    stats = block.last_statistics
    entropy = -torch.where(p > 0, p * p.log(), 0.0).sum(-1)
    torch.testing.assert_close(stats.entropy, entropy.detach(), rtol=0, atol=1e-11)
    assert stats.n_keys[:, 0, 0].tolist() == [9, 5]
    assert block.self_attention.last_statistics.n_keys[0, 0].tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize("options", [
    {}, {"positions": "rotary"}, {"positions": "alibi", "score": "scaled_dot"},
    {"weights": "relu2", "scaling": SqrtLogN(train_length=4)},
])  # fmt: skip
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
def test_steps_are_one_forward(
    options: dict[str, Any], dtype: torch.dtype, tolerance: float
) -> None:
    block, (x, memory, hidden) = make(dtype, **options)
    want = block(x, memory, hidden)
    state, outs = block.start(memory, hidden), []
    for piece in x.split([3, 1, 2], 1):
        out, state = block.step(piece, state)
        outs.append(out)
    size = max(1.0, float(want.detach().abs().max()))
    torch.testing.assert_close(torch.cat(outs, 1), want, rtol=0, atol=tolerance * size)
    assert state.past.key.shape == (B, H, L, D // H)


def test_padding_of_memory_and_target_plays_no_part() -> None:
    block, (x, memory, hidden) = make()
    target = torch.zeros(B, L, dtype=torch.bool)
    target[0, 4:] = True
    out = block(x, memory, hidden, target)
    noise = torch.randn_like(memory) * hidden.unsqueeze(-1)
    torch.testing.assert_close(block(x, memory + noise, hidden, target), out)
    x = x + torch.randn_like(x) * target.unsqueeze(-1)
    torch.testing.assert_close(block(x, memory, hidden, target)[~target], out[~target])
    assert not torch.allclose(block(x, memory + 1, hidden, target), out)


def test_it_learns_to_copy_from_memory() -> None:
    torch.manual_seed(4)
    block = DecoderBlock(D, 2, hidden=16)
    memory = torch.randn(2, 5, D)
    x = torch.randn(2, 5, D)
    optimiser = torch.optim.Adam(block.parameters(), lr=0.01)
    losses = []
    for _ in range(25):
        loss = nn.functional.mse_loss(block(x, memory), memory.flip(1))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.6 * losses[0]
    assert block.cross_attention.score.vector.grad.abs().max() > 0


def test_dropout_is_for_training() -> None:
    block, given = make(dropout=0.3)
    assert not torch.equal(block(*given), block(*given))
    block.eval()
    assert torch.equal(block(*given), block(*given))


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: DecoderBlock(16, 3), ValueError, "num_heads must divide embed_dim"),
        (lambda: DecoderBlock(16, 4, memory_dim=0), ValueError, "memory_dim must be at least 1"),
        (lambda: DecoderBlock(16, 4, hidden=0), ValueError, "hidden must be at least 1, got 0"),
        (lambda: DecoderBlock(16, 4, dropout=2), ValueError, "dropout must be a finite number"),
        (lambda: DecoderBlock(16, 4)(torch.zeros(2, 3, 8), torch.zeros(2, 3, 16)), ValueError,
         r"x must have shape \(B, L, embed_dim=16\), got \(2, 3, 8\)"),
        (lambda: DecoderBlock(16, 4)(torch.zeros(2, 3, 16), torch.zeros(2, 3, 8)), ValueError,
         "key must have the width 16, got 8"),
        (lambda: DecoderBlock(16, 4)(torch.zeros(2, 3, 16), torch.zeros(1, 3, 16)), ValueError,
         "query and key must have the same batch size: query has B=2, key has B=1"),
        (lambda: DecoderBlock(16, 4).step(torch.zeros(2, 1, 16),
                                          DecoderBlock(16, 4).start(torch.zeros(1, 3, 16))),
         ValueError, "query and key must have the same batch"),
    ],
)  # fmt: skip
def test_bad_input_is_named(call: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        call()
