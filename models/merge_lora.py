"""Merges a LoRA adapter (PEFT's files and names) into bf16 weights: W + scale * B A.

Sums run in fp32 in a fixed order, one rank after the other, and round once to bf16: the merged
file is the same bytes on every machine, whatever BLAS it has.
"""

import json
import pathlib

import numpy as np
import safetensors

import gguf_to_hf

PREFIX = "base_model.model."


def read_safetensors(path):
    """{name: (dtype, array)}; bf16 as uint16 bits."""
    numpy_dtypes = {"BF16": np.uint16, "F32": np.float32}
    data = pathlib.Path(path).read_bytes()
    return {name: (entry["dtype"], np.frombuffer(entry["data"], numpy_dtypes[entry["dtype"]]).reshape(entry["shape"]))
            for name, entry in safetensors.deserialize(data)}


def as_fp32(entry):
    dtype, values = entry
    return gguf_to_hf.from_bf16(values) if dtype == "BF16" else values


def merged(weight, a, b, scale):
    """weight (out, in) + scale * b (out, rank) @ a (rank, in), all fp32."""
    delta = np.zeros_like(weight)
    for rank in range(a.shape[0]):
        delta += b[:, rank, None] * a[None, rank]
    return weight + np.float32(scale) * delta


def merge(base_file, adapter_folder, out_file, say=print):
    gguf_to_hf.save_bf16(merged_tensors(base_file, adapter_folder, say), out_file)


def merged_tensors(base_file, adapter_folder, say=print):
    """{name: bf16 bits}"""
    adapter_folder = pathlib.Path(adapter_folder)
    config = json.loads((adapter_folder / "adapter_config.json").read_text())
    scale = config["lora_alpha"] / config["r"]
    adapter = read_safetensors(adapter_folder / "adapter_model.safetensors")
    base = read_safetensors(base_file)
    targets = sorted({name.removeprefix(PREFIX).rsplit(".lora_", 1)[0] for name in adapter})
    out = {name: bits if dtype == "BF16" else gguf_to_hf.to_bf16(bits) for name, (dtype, bits) in base.items()}
    for target in targets:
        name = f"{target}.weight"
        if name not in base:
            raise ValueError(f"{adapter_folder}: no tensor {name} in {base_file}")
        a = as_fp32(adapter[f"{PREFIX}{target}.lora_A.weight"])
        b = as_fp32(adapter[f"{PREFIX}{target}.lora_B.weight"])
        out[name] = gguf_to_hf.to_bf16(merged(as_fp32(base[name]), a, b, scale))
    say(f"  merged rank {config['r']} into {len(targets)} tensors")
    return out
