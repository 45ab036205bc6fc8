"""Writes the weights of a Hugging Face folder (Llama architecture) as a GGUF file, for llama.cpp to serve.

Runs in build/peers/venv. bf16 keeps the folder's bf16 weights bit for bit, and so does f32; f16 rounds those below its
normal range; q8_0 has 8 bits a weight and a scale for 32 of them. The vocabulary of a byte-level BPE comes along, since
llama-server does not start without one; the benchmarks speak in token ids.
"""

import json
import pathlib
import sys

import gguf
import numpy as np
from gguf import quants

from weights import read_safetensors

# Hugging Face's name of a layer's tensor -> GGUF's.
LAYER_TENSORS = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_TENSORS = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
FILE_TYPES = {"bf16": gguf.LlamaFileType.MOSTLY_BF16, "f16": gguf.LlamaFileType.MOSTLY_F16,
              "f32": gguf.LlamaFileType.ALL_F32, "q8_0": gguf.LlamaFileType.MOSTLY_Q8_0}


def gguf_name(name):
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        _, _, layer, part = stem.split(".", 3)
        return f"blk.{layer}.{LAYER_TENSORS[part]}.weight"
    return f"{OTHER_TENSORS[stem]}.weight"


def interleaved_rows(weight, heads):
    """Rows of a Q or K projection: RoPE's pairs lie half a head apart in the folder, side by side in GGUF."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def bf16_bytes(values):
    """fp32 to the bytes of bf16, rounded to nearest even."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16).view(np.uint8)


def add_tensor(writer, name, values, precision):
    if values.ndim == 1 or precision == "f32":  # norms are fp32 in every file
        writer.add_tensor(name, values)
    elif precision == "f16":
        writer.add_tensor(name, values.astype(np.float16))
    elif precision == "q8_0":
        writer.add_tensor(name, quants.quantize(values, gguf.GGMLQuantizationType.Q8_0),
                          raw_dtype=gguf.GGMLQuantizationType.Q8_0)
    else:
        writer.add_tensor(name, bf16_bytes(values), raw_dtype=gguf.GGMLQuantizationType.BF16)


def add_vocabulary(writer, folder, config):
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model = tokenizer["model"]
    if model["type"] != "BPE":
        raise ValueError(f"{folder}/tokenizer.json: model.type is {model['type']}, not BPE")
    special = {token["id"]: token["content"] for token in tokenizer["added_tokens"]}
    words = {number: word for word, number in model["vocab"].items()} | special
    count = config["vocab_size"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([words.get(i, f"[unused {i}]") for i in range(count)])
    writer.add_token_types([gguf.TokenType.CONTROL if i in special else gguf.TokenType.NORMAL for i in range(count)])
    writer.add_token_merges([merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]])
    writer.add_bos_token_id(config["bos_token_id"])
    writer.add_eos_token_id(config["eos_token_id"])
    writer.add_add_bos_token(False)


def convert(folder, target, precision):
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError(f"{folder}: only plain Llama models are compared")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    writer = gguf.GGUFWriter(target, "llama")
    writer.add_file_type(FILE_TYPES[precision])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_rope_dimension_count(config.get("head_dim") or config["hidden_size"] // heads)
    writer.add_vocab_size(config["vocab_size"])
    add_vocabulary(writer, folder, config)
    for name, values in read_safetensors(folder / "model.safetensors").items():
        if name.endswith("q_proj.weight"):
            values = interleaved_rows(values, heads)
        elif name.endswith("k_proj.weight"):
            values = interleaved_rows(values, kv_heads)
        add_tensor(writer, gguf_name(name), np.ascontiguousarray(values), precision)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    convert(pathlib.Path(sys.argv[1]), sys.argv[2], sys.argv[3])
