"""Converts a Llama-architecture GGUF file with a byte-level BPE tokenizer to a Hugging Face folder.

Weights are dequantised in fp32 and rounded to bf16, the precision in which the model was
published; the 4-bit quantisation of the file is some fifty times coarser than this rounding.
"""

import json
import pathlib

import gguf
import numpy as np
import safetensors

# GGUF's name of a block's tensor -> Hugging Face's.
BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
OTHER_TENSORS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}

CONTROL_TOKEN = 3  # GGUF's token type of special tokens


def to_bf16(values):
    """fp32 -> bf16 bits (uint16), rounded to nearest even. Values are finite."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def from_bf16(bits):
    return (bits.astype(np.uint32) << 16).view(np.float32)


def save_bf16(tensors, path):
    """Writes {name: uint16 array of bf16 bits} as safetensors."""
    safetensors.serialize_file(
        {name: {"dtype": "bfloat16", "shape": list(bits.shape), "data": bits.tobytes()}
         for name, bits in sorted(tensors.items())},
        str(path), {"format": "pt"})


def hf_name(name):
    stem = name.removesuffix(".weight")
    if stem.startswith("blk."):
        _, layer, part = stem.split(".", 2)
        return f"model.layers.{int(layer)}.{BLOCK_TENSORS[part]}.weight"
    return f"{OTHER_TENSORS[stem]}.weight"


def half_rotation_rows(weight, heads):
    """Rows of a Q or K projection from GGUF's order to Hugging Face's.

    GGUF keeps the two numbers that RoPE rotates together next to each other (row 2i with row 2i+1
    of a head); Hugging Face keeps them half a head apart (row i with row i + head_size/2).
    """
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def read_fields(reader):
    def field(name, default=None):
        found = reader.fields.get(name)
        return default if found is None else found.contents()
    return field


def make_config(field, tied):
    heads = field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": len(field("tokenizer.ggml.tokens")),
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv", heads),
        "head_dim": field("llama.rope.dimension_count"),
        "hidden_act": "silu",
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": float(f"{field('llama.attention.layer_norm_rms_epsilon'):.6g}"),
        "rope_theta": float(field("llama.rope.freq_base")),
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "torch_dtype": "bfloat16",
    }


def make_tokenizer(field):
    if field("tokenizer.ggml.model") != "gpt2" or field("tokenizer.ggml.pre") != "smollm":
        raise ValueError(f"unknown tokenizer {field('tokenizer.ggml.model')}/{field('tokenizer.ggml.pre')}")
    tokens = field("tokenizer.ggml.tokens")
    types = field("tokenizer.ggml.token_type")
    special = [{"id": i, "content": token, "single_word": False, "lstrip": False, "rstrip": False,
                "normalized": False, "special": True}
               for i, (token, kind) in enumerate(zip(tokens, types)) if kind == CONTROL_TOKEN]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": special,
        "normalizer": None,
        "pre_tokenizer": {"type": "Sequence",
                          "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level]},
        "post_processor": None,
        "decoder": {**byte_level, "add_prefix_space": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)},
                  "merges": list(field("tokenizer.ggml.merges"))},
    }


def make_tokenizer_config(field, added_tokens):
    tokens = field("tokenizer.ggml.tokens")
    return {
        "tokenizer_class": "GPT2Tokenizer",
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": field("llama.context_length"),
        "bos_token": tokens[field("tokenizer.ggml.bos_token_id")],
        "eos_token": tokens[field("tokenizer.ggml.eos_token_id")],
        "unk_token": tokens[field("tokenizer.ggml.unknown_token_id")],
        "pad_token": tokens[field("tokenizer.ggml.padding_token_id")],
        "additional_special_tokens": [token["content"] for token in added_tokens if token["id"] in (1, 2)],
        "added_tokens_decoder": {str(token["id"]): {k: v for k, v in token.items() if k != "id"}
                                 for token in added_tokens},
        "chat_template": field("tokenizer.chat_template"),
    }


def make_weights(reader, field, say):
    heads = field("llama.attention.head_count")
    kv_heads = field("llama.attention.head_count_kv", heads)
    tensors = {}
    for i, tensor in enumerate(reader.tensors):
        shape = tuple(int(n) for n in reversed(tensor.shape))  # GGUF lists the fastest dimension first
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).reshape(shape)
        if tensor.name.endswith("attn_q.weight"):
            values = half_rotation_rows(values, heads)
        elif tensor.name.endswith("attn_k.weight"):
            values = half_rotation_rows(values, kv_heads)
        if not np.isfinite(values).all():
            raise ValueError(f"{tensor.name} holds a number that is not finite")
        tensors[hf_name(tensor.name)] = to_bf16(values)
        if (i + 1) % 68 == 0 or i + 1 == len(reader.tensors):
            say(f"  converted {i + 1} of {len(reader.tensors)} tensors")
    return tensors


def write_json(path, value):
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def convert(gguf_file, folder, say=print):
    """Writes config.json, generation_config.json, model.safetensors, tokenizer.json and tokenizer_config.json."""
    folder = pathlib.Path(folder)
    reader = gguf.GGUFReader(str(gguf_file))
    field = read_fields(reader)
    if field("general.architecture") != "llama":
        raise ValueError(f"architecture {field('general.architecture')} is not llama")
    tensors = make_weights(reader, field, say)
    tied = "lm_head.weight" not in tensors
    save_bf16(tensors, folder / "model.safetensors")
    tokenizer = make_tokenizer(field)
    write_json(folder / "config.json", make_config(field, tied))
    write_json(folder / "generation_config.json", {"bos_token_id": field("tokenizer.ggml.bos_token_id"),
                                                   "eos_token_id": field("tokenizer.ggml.eos_token_id"),
                                                   "pad_token_id": field("tokenizer.ggml.padding_token_id")})
    write_json(folder / "tokenizer.json", tokenizer)
    write_json(folder / "tokenizer_config.json", make_tokenizer_config(field, tokenizer["added_tokens"]))
