"""Read the numbers that an HTML page holds: the inverse of its packing."""

import base64
import json
import zlib
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def unpack(text: str) -> tuple[dict[str, Any], dict[str, Array]]:
    """Inverse of ``Packer.text``: the record and the arrays by name."""
    data = zlib.decompress(base64.b64decode(text))
    start = 4 + int.from_bytes(data[:4], "little")
    record = json.loads(data[4:start])
    arrays = {
        name: np.frombuffer(data, np.dtype(kind).newbyteorder("<"), size, start + offset)
        for name, (kind, offset, size) in record["arrays"].items()
    }
    return record, arrays


def decode(codes: Array, low: float, high: float, soft: float) -> Array:
    """Inverse of ``encode`` with the same ``soft``; NaN for numbers that were not finite."""
    if codes.dtype.kind == "f":
        return codes.astype(np.float64)
    none = int(np.iinfo(codes.dtype).max)
    bent = low + codes * ((high - low) / (none - 1))
    return np.where(codes == none, np.nan, np.sinh(bent) * soft)
