"""AttentionMonitor.attach in loops that people write: one line, and the same losses."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

import acutance
from acutance.training import AttentionMonitor
from tests.versions import any_global_hook

QUIET: dict[str, Any] = {"false_alarms": None}
STEPS = pytest.mark.parametrize("steps", [6, pytest.param(20, marks=pytest.mark.slow)])
WORDS, TOKENS = 32, 12


def rms(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.shape[-1],))


class Attention(nn.Module):
    """As in nanochat: bias-free projections, rotary embedding, normalised queries and keys."""

    def __init__(self, width: int, heads: int, keys: int) -> None:
        super().__init__()
        self.heads, self.keys, self.size = heads, keys, width // heads
        self.c_q = nn.Linear(width, heads * self.size, bias=False)
        self.c_k, self.c_v = (nn.Linear(width, keys * self.size, bias=False) for _ in range(2))
        self.c_proj = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        batch, tokens, _ = x.shape
        q = self.c_q(x).view(batch, tokens, self.heads, self.size)
        k, v = (p(x).view(batch, tokens, self.keys, self.size) for p in (self.c_k, self.c_v))
        q, k = (rms(self.rotate(part, cos, sin)) for part in (q, k))
        q, k, v = (part.transpose(1, 2) for part in (q, k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.c_proj(y.transpose(1, 2).reshape(batch, tokens, -1))

    @staticmethod
    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        first, second = x.chunk(2, -1)
        return torch.cat([first * cos + second * sin, second * cos - first * sin], -1)


class GPT(nn.Module):
    """A decoder in nanochat's style: forward returns the loss, ``generate`` samples."""

    def __init__(self) -> None:
        super().__init__()
        width, heads = 16, 4
        self.wte, self.lm_head = nn.Embedding(WORDS, width), nn.Linear(width, WORDS, bias=False)
        self.h = nn.ModuleList(
            nn.ModuleDict({"attn": Attention(width, heads, 2), "mlp": nn.Linear(width, width)})
            for _ in range(2)
        )
        angles = torch.outer(torch.arange(2.0 * TOKENS), torch.tensor([1.0, 0.1]))
        self.register_buffer("cos", angles.cos()[:, None, :], persistent=False)
        self.register_buffer("sin", angles.sin()[:, None, :], persistent=False)

    def forward(self, ids: Tensor, targets: Tensor | None = None) -> Tensor:
        x = rms(self.wte(ids))
        for block in self.h:
            x = x + block["attn"](rms(x), self.cos[: ids.shape[1]], self.sin[: ids.shape[1]])
            x = x + block["mlp"](F.relu(rms(x)).square())
        logits = 15 * torch.tanh(self.lm_head(rms(x)) / 15)
        return (
            logits if targets is None else F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        )

    @torch.inference_mode()
    def generate(self, ids: Tensor, new: int) -> Tensor:
        for _ in range(new):
            ids = torch.cat([ids, self(ids)[:, -1:].argmax(-1)], 1)
        return ids


class Muon(torch.optim.Optimizer):
    """Momentum, orthogonalised by Newton–Schulz iterations."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                buffer = self.state[p].setdefault("momentum", torch.zeros_like(p))
                buffer.lerp_(p.grad, 0.05)
                update = buffer / (buffer.norm() + 1e-7)
                for _ in range(3):
                    update = 1.5 * update - 0.5 * update @ update.T @ update
                p.add_(update, alpha=-group["lr"])


def batches(steps: int) -> Iterator[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for _ in range(steps):
        ids = torch.randint(0, WORDS, (2, TOKENS + 1), generator=generator)
        yield ids[:, :-1], ids[:, 1:]


def nanochat(steps: int, monitor: AttentionMonitor | None, **given: Any) -> list[float]:
    """Accumulated gradients, Muon for matrices and AdamW for the rest, samples while it trains."""
    torch.manual_seed(0)
    model: Any = GPT()
    matrices = list(model.h.parameters())
    optimizers = [
        torch.optim.AdamW([*model.wte.parameters(), *model.lm_head.parameters()], 1e-2),
        Muon([p for p in matrices if p.dim() == 2], 1e-2),
    ]
    original = model
    if given.get("compile"):
        model = torch.compile(model, dynamic=False, backend="aot_eager")
    if monitor is not None:
        monitor.attach(model, optimizers)
    losses, data = [], batches(2 * steps)
    for step in range(steps):
        for _ in range(2):
            loss = model(*next(data))
            (loss / 2).backward()
            losses.append(loss.item())
        for optimizer in optimizers:
            optimizer.step()
        model.zero_grad(set_to_none=True)
        if step % 2 == 0:  # a sample and the validation loss
            original.generate(torch.zeros(1, 1, dtype=torch.long), 3)
            with torch.no_grad():
                original(*next(batches(1)))
    return losses


class Blocks(nn.ModuleDict):
    """torchtitan keeps blocks in a dict and compiles or checkpoints each of them."""


class Titan(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tok_embeddings, self.output = nn.Embedding(WORDS, 16), nn.Linear(16, WORDS)
        layer: Callable[[], nn.Module] = lambda: nn.TransformerEncoderLayer(  # noqa: E731
            16, 2, 32, dropout=0.1, batch_first=True, norm_first=True
        )
        self.layers = Blocks({str(i): layer() for i in range(2)})

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
        for layer in self.layers.values():
            x = layer(x, src_mask=mask, is_causal=True)
        return self.output(x)


class OptimizersContainer(torch.optim.Optimizer):
    """torchtitan's: one optimiser for each part of the model, stepped together."""

    def __init__(self, parts: list[nn.Module]) -> None:
        self.optimizers = [torch.optim.AdamW(part.parameters(), 1e-2) for part in parts]
        super().__init__([p for part in parts for p in part.parameters()], {})

    def step(self, closure: Any = None) -> None:
        for optimizer in self.optimizers:
            optimizer.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)


def torchtitan(steps: int, monitor: AttentionMonitor | None, **given: Any) -> list[float]:
    """Checkpointed blocks, autocast, clipped gradients, a container of optimisers."""
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    torch.manual_seed(0)
    model = Titan()
    optimizers = OptimizersContainer([model])
    if monitor is not None:  # before the model is wrapped, which changes nothing
        monitor.attach(model, optimizers)
    for name, block in list(model.layers.items()):
        block = checkpoint_wrapper(block)
        if given.get("compile"):
            block.compile(backend="aot_eager")
        model.layers[name] = block
    losses = []
    for tokens, labels in batches(steps):
        optimizers.zero_grad()
        # compiled losses are compared up to the rounding of float32
        with torch.autocast("cpu", torch.bfloat16, enabled=not given.get("compile")):
            logits = model(tokens)
            loss = F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())
        del logits
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizers.step()
        losses.append(loss.item())
    return losses


def accelerated(steps: int, monitor: AttentionMonitor | None, **given: Any) -> list[float]:
    """Accelerate's own loop, with accumulation by the library."""
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=2, cpu=True)
    model: Any = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    model, optimizer = accelerator.prepare(model, optimizer)
    if monitor is not None:
        monitor.attach(model, optimizer)
    losses = []
    for ids, targets in batches(2 * steps):
        with accelerator.accumulate(model):
            loss = model(ids, targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def fabric(steps: int, monitor: AttentionMonitor | None, **given: Any) -> list[float]:
    """Lightning Fabric, in which litgpt writes its loops."""
    lightning = pytest.importorskip("lightning.fabric")
    torch.manual_seed(0)
    fabric = lightning.Fabric(accelerator="cpu", devices=1)
    model: Any = GPT()
    model, optimizer = fabric.setup(model, torch.optim.AdamW(model.parameters(), 1e-2))
    if monitor is not None:
        monitor.attach(model, optimizer)
    losses = []
    for ids, targets in batches(steps):
        with fabric.no_backward_sync(model, enabled=False):
            loss = model(ids, targets)
            fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@STEPS
@pytest.mark.parametrize(
    ("loop", "module", "passes"),
    [
        (nanochat, "h.0.attn", 2),
        (torchtitan, "layers.0.self_attn", 1),
        (accelerated, "h.0.attn", 2),
        (fabric, "h.0.attn", 1),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.filterwarnings("ignore:.*:UserWarning:(accelerate|lightning).*")
def test_a_loop_with_one_more_line_has_the_same_losses(
    loop: Callable[..., list[float]], module: str, passes: int, steps: int, tmp_path: Path
) -> None:
    path, logged = tmp_path / "attention.jsonl", []
    before = F.scaled_dot_product_attention
    with AttentionMonitor(
        every=3, log=[path, lambda scalars, step: logged.append((step, scalars))], **QUIET
    ) as monitor:
        assert loop(steps, monitor) == loop(steps, None)
    measured = [1, *range(3, steps + 1, 3)]
    assert [step for step, _ in logged] == measured
    assert monitor.steps == steps
    assert monitor.last is not None
    assert [layer.calls for layer in monitor.last.summary.layers] == [passes] * 2
    assert monitor.last.summary.layers[0].rows == 2 * TOKENS * passes
    assert monitor.last.rollout is None
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": step, **scalars} for step, scalars in logged]
    assert 0 < lines[-1][f"attention/{module}/entropy"] < torch.tensor(float(TOKENS)).log()
    assert F.scaled_dot_product_attention is before
    assert not any_global_hook()
    assert not _get_current_function_mode_stack()


@pytest.mark.slow
@pytest.mark.parametrize("loop", [nanochat, torchtitan])
@pytest.mark.filterwarnings("ignore")  # of the compiler
def test_compiled_loops_differ_by_rounding_at_most(loop: Callable[..., list[float]]) -> None:
    logged: list[int] = []
    with AttentionMonitor(every=3, log=lambda _, step: logged.append(step), **QUIET) as monitor:
        torch.testing.assert_close(
            loop(6, monitor, compile=True), loop(6, None, compile=True), rtol=1e-4, atol=1e-4
        )
    assert logged == [1, 3, 6]


def test_the_record_is_that_of_a_probe_and_samples_are_apart() -> None:
    torch.manual_seed(0)
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), 0.0)
    (data,) = batches(1)
    seen: dict[str, float] = {}
    monitor = AttentionMonitor(rollouts=True, log=lambda scalars, _: seen.update(scalars), **QUIET)
    with monitor.attach(model, optimizer):
        model.generate(torch.zeros(1, 1, dtype=torch.long), 3)
        model(*data).backward()
        optimizer.step()
    with acutance.probe(model, profile=False) as probe:
        model(*data)
    with acutance.probe(model, profile=False) as sampled:
        model.generate(torch.zeros(1, 1, dtype=torch.long), 3)
    assert monitor.last is not None
    assert monitor.last.rollout is not None
    for summary, expected in (
        (monitor.last.summary, probe.summary()),
        (monitor.last.rollout, sampled.summary()),
    ):
        assert [layer.calls for layer in summary.layers] == [
            layer.calls for layer in expected.layers
        ]
        torch.testing.assert_close(summary.mean("max_logit"), expected.mean("max_logit"))
    mean = float(sampled.summary().mean("max_logit")[:4].mean())
    assert seen["rollout/attention/h.0.attn/max_logit"] == pytest.approx(mean, rel=1e-9)
    assert "attention/h.0.attn/max_logit" in seen
    assert not any(name.startswith("rollout/attention/alarms") for name in seen)


def test_a_loop_without_gradients_is_told_so_and_watch_measures_it() -> None:
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = AttentionMonitor(**QUIET).attach(model, optimizer)
    model.generate(torch.zeros(1, 1, dtype=torch.long), 1)
    with pytest.raises(acutance.ProbeError, match="GPT ran only without gradients"):
        optimizer.step()
    monitor.close()
    monitor.steps = 0
    with torch.no_grad(), monitor.watch(model):
        model(*next(batches(1)))
    assert monitor.step() is not None


def test_modes_and_optimisers_of_the_loop_stay_in_order() -> None:
    model = GPT()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    with AttentionMonitor(every=1, **QUIET) as monitor:
        with torch.device("cpu"):
            monitor.attach(model, optimizer)
        for ids, targets in batches(2):  # a mode that opens and closes around each step

            def closure() -> Tensor:
                optimizer.zero_grad()
                loss = model(ids, targets)  # noqa: B023
                loss.backward()
                return loss

            with torch.device("cpu"):
                optimizer.step(closure)  # the forward pass runs inside
        assert monitor.steps == 2
        assert monitor.last is not None
        assert monitor.last.summary.layers[0].calls == 1
        copy.deepcopy(model)(*next(batches(1)))
    assert not _get_current_function_mode_stack()
    optimizer.step(closure)
    assert monitor.steps == 2, "closed"


def test_an_exception_in_the_loop_is_cleaned_up_by_with() -> None:
    model = GPT()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    monitor = AttentionMonitor(every=1, **QUIET)
    with pytest.raises(KeyboardInterrupt, match="now"), monitor.attach(model, optimizer):
        raise KeyboardInterrupt("now")
    assert not any_global_hook()
    assert not _get_current_function_mode_stack()
    with monitor.attach(model, optimizer):  # twice: the first no longer counts
        monitor.attach(model, optimizer)
        model(*next(batches(1))).backward()
        optimizer.step()
    assert monitor.steps == 1


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"log": 3}, "log must be a function of scalars and step such as wandb.log, .* got 3"),
        ({"log": [print, Path]}, r"log must be a function .* got <class 'pathlib"),
    ],
)
def test_bad_logs(given: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        AttentionMonitor(**given)


def test_a_log_that_cannot_be_written_is_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"there is no folder .*missing"):
        AttentionMonitor(log=tmp_path / "missing" / "run.jsonl")
    with pytest.raises(IsADirectoryError, match=r"log must be a file, but .* is a folder"):
        AttentionMonitor(log=tmp_path)


def test_bad_optimisers() -> None:
    model, monitor = GPT(), AttentionMonitor()
    with pytest.raises(TypeError, match=r"optimizer must be a torch\.optim\.Optimizer .* got GPT"):
        monitor.attach(model, [model])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="optimizer must be an optimiser or several, got none"):
        monitor.attach(model, [])


def test_numbers_that_are_not_finite_are_null(tmp_path: Path) -> None:
    path = tmp_path / "attention.jsonl"
    model = nn.MultiheadAttention(8, 2, batch_first=True)
    monitor = AttentionMonitor(log=str(path), metrics=["max_logit"], **QUIET)
    x = torch.full((1, 3, 8), 1e30)
    with monitor.watch(model):
        model(x, x, x)
    with pytest.warns(acutance.training.AttentionWarning, match="not finite"):
        monitor.step()
    (line,) = path.read_text().splitlines()
    assert "Infinity" not in line
    assert "NaN" not in line
    assert json.loads(line)["attention/alarms/not_finite"] > 0
