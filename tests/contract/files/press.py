"""A cache plan as a press for kvpress (written for 0.5.5).

Enter the press around the whole generation, for one sequence without padding:

    with press(model):
        model.generate(...)

kvpress's pipeline enters it for the prompt alone; then heads also keep every key generated later.
"""

import torch
from kvpress import BasePress

#: First and recent keys that each key head of each layer keeps; None is all of them.
HEADS = [
    [(2, 14), (2, 14)],
    [(2, 14), None],
    [None, (2, 14)],
]


class CachePlanPress(BasePress):
    """Masks the keys that heads drop, for every token after the prompt."""

    def post_init_from_model(self, model):
        """Refuse a model with other layers or key heads."""
        config = model.config
        layers = config.num_hidden_layers
        heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
        if layers != len(HEADS) or any(heads != len(layer) for layer in HEADS):
            raise ValueError(
                f"the plan has {len(HEADS)} layers of {len(HEADS[0])} key heads, but "
                f"{type(model).__name__} has {layers} of {heads}"
            )
        if config._attn_implementation == "eager":
            raise ValueError("kvpress masks no keys of single heads in eager attention")

    def forward_hook(self, module, input, kwargs, output):
        """After a layer has run, mask what its next token does not read."""
        cache = kwargs["cache" if "cache" in kwargs else "past_key_values"]
        keys = cache.layers[module.layer_idx].keys
        stored = keys.shape[2]
        masked = torch.zeros(keys.shape[:3], dtype=torch.bool, device=keys.device)
        for head, kept in enumerate(HEADS[module.layer_idx]):
            if kept is not None:
                first, recent = kept  # the next token's own key is one of the recent ones
                masked[:, head, first : max(first, stored - max(recent - 1, 0))] = True
        module.masked_key_indices = torch.nonzero(masked, as_tuple=True)
        return output


press = CachePlanPress()
