"""What to do about each cause of a difference."""

from __future__ import annotations

__all__ = ["advice_for"]

_ADVICE = {
    "sinks": "Use an attention function that takes the sinks (s_aux in transformers), or merge "
    "them with its log-sum-exp.",
    "wrong sinks": "Pass the module's sinks parameter, and check that the checkpoint loaded it.",
    "window": "Hide keys at key <= query - sliding_window in the layers that have a window.",
    "softcap": "Apply softcap * tanh(scores / softcap) after the scale, or use an implementation "
    "that does.",
    "scale": "Pass the scale of the configuration to the attention function.",
    "bias": "Add the bias after the scale, before the softmax.",
    "padding": "Pass attention_mask with 1 on real tokens, and hide the keys where it is 0.",
    "hidden keys": "Give hidden keys a score of minus infinity, not 0.",
    "boolean mask": "Turn a boolean mask into scores before it is added: 0 for visible keys, minus "
    "infinity for hidden ones.",
    "mask": "Compare the mask that the attention function gets with the one of eager attention.",
    "documents": "Pass position_ids, starting anew in each document, to the function that makes "
    "the masks, and no attention_mask; or use flash attention, which reads them itself.",
    "not causal": "Pass is_causal=True or a causal mask.",
    "causal by mistake": "Pass is_causal=False where no mask is passed.",
    "implementations differ": "Compare the masks that the model makes for each implementation.",
    "mask inverted": "In a boolean mask of scaled_dot_product_attention, True marks visible keys.",
    "causal": "Align the last query with the last key: query i sees keys up to i + S - L.",
    "heads": "Repeat key heads with repeat_interleave: query head h uses key head h // group.",
    "RoPE": "Compute the frequencies from the rope_parameters of this layer's type.",
    "wrong RoPE": "Compute the frequencies from the rope_parameters of this layer's type.",
    "LongRoPE": "Choose the factors by the length of the text.",
    "wrong attention factor": "Multiply cos and sin by the attention factor of rope_parameters, "
    "once.",
    "positions rounded": "Compute positions, frequencies and their cos and sin in float32.",
    "positions": "Count only real tokens: position_ids = attention_mask.cumsum(-1) - 1, continued "
    "while decoding.",
    "not rotated": "Rotate both queries and keys.",
    "wrong pairs": "Pair the components as the checkpoint was trained: halves, or neighbours.",
    "scores": "Compute the scores in float32, also under autocast.",
    "weights": "Compute the softmax and its product with the values in float32.",
    "inputs": "Check autocast: queries and keys are rounded before the product.",
    "cache": "Check what the cache stores, and that it crops only what the window hides.",
    "gradient of lse": "Use an attention function whose log-sum-exp is differentiable, such as "
    "flex_attention, or do not train with this one.",
    "gradient": "Compare with eager attention, whose gradients autograd computes.",
    "backward": "Compare with eager attention, whose gradients autograd computes.",
}
_OTHERWISE = "Compare with eager attention, and look at the arguments of this layer's call."


def advice_for(cause: str) -> str:
    """What to do about a cause, by the longest entry that it begins or ends with.

    Example:
        >>> advice_for("window off by one")
        'Hide keys at key <= query - sliding_window in the layers that have a window.'
        >>> advice_for("unexplained")[:12]
        'Compare with'
    """
    fits = [
        name for name in _ADVICE if cause.startswith(name) or cause.endswith(name.partition(" ")[0])
    ]
    begins = [name for name in fits if cause.startswith(name)] or fits
    return _ADVICE[max(begins, key=len)] if begins else _OTHERWISE
