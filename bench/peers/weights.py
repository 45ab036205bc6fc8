"""Reads the weights of a Hugging Face folder for the converters. Runs in build/peers/venv."""

import json
import struct

import numpy as np


def read_safetensors(file):
    """{name: fp32 array} of a file whose tensors are BF16, F16 or F32."""
    data = np.memmap(file, dtype=np.uint8, mode="r")
    header_bytes = struct.unpack("<Q", data[:8].tobytes())[0]
    header = json.loads(data[8:8 + header_bytes].tobytes())
    tensors = {}
    for name, entry in header.items():
        if name == "__metadata__":
            continue
        begin, end = (8 + header_bytes + offset for offset in entry["data_offsets"])
        raw = data[begin:end]
        if entry["dtype"] == "BF16":
            values = (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        elif entry["dtype"] in ("F16", "F32"):
            values = raw.view(np.float16 if entry["dtype"] == "F16" else np.float32).astype(np.float32)
        else:
            raise ValueError(f"{file}: {name} is {entry['dtype']}, not BF16, F16 or F32")
        tensors[name] = values.reshape(entry["shape"])
    return tensors
