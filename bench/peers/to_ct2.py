"""Writes the weights of a Hugging Face folder (Llama architecture) as a CTranslate2 model.

Runs in build/peers/venv. CTranslate2's own converter wants transformers and torch, which are a gigabyte; its model
specification does not. A token is spelled as its number: the benchmark speaks in token ids.
"""

import json
import pathlib
import sys

import ctranslate2
import numpy as np
from ctranslate2.specs import common_spec, transformer_spec

from weights import read_safetensors


def convert(folder, target, precision):
    config = json.loads((folder / "config.json").read_text())
    if config["model_type"] != "llama" or config.get("rope_scaling"):
        raise ValueError(f"{folder}: only plain Llama models are compared")
    weights = read_safetensors(folder / "model.safetensors")
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"], heads, activation=common_spec.Activation.SWISH, pre_norm=True, ffn_glu=True,
        rms_norm=True, rotary_dim=0, rotary_interleave=False, rotary_base=config["rope_theta"],
        num_heads_kv=None if kv_heads == heads else kv_heads)
    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = weights["model.embed_tokens.weight"]
    decoder.layer_norm.gamma = weights["model.norm.weight"]
    decoder.projection.weight = weights.get("lm_head.weight", weights["model.embed_tokens.weight"])
    for i, layer in enumerate(decoder.layer):
        def of(name):
            return weights[f"model.layers.{i}.{name}.weight"]
        layer.self_attention.layer_norm.gamma = of("input_layernorm")
        layer.self_attention.linear[0].weight = np.concatenate([of(f"self_attn.{part}_proj") for part in "qkv"])
        layer.self_attention.linear[1].weight = of("self_attn.o_proj")
        layer.ffn.layer_norm.gamma = of("post_attention_layernorm")
        layer.ffn.linear_0.weight = of("mlp.gate_proj")
        layer.ffn.linear_0_noact.weight = of("mlp.up_proj")
        layer.ffn.linear_1.weight = of("mlp.down_proj")
    spec.register_vocabulary([str(i) for i in range(config["vocab_size"])])
    spec.config.bos_token, spec.config.eos_token = str(config["bos_token_id"]), str(config["eos_token_id"])
    spec.config.unk_token = "0"
    spec.config.layer_norm_epsilon = config["rms_norm_eps"]
    spec.validate()
    spec.optimize(quantization=precision)
    target.mkdir()
    spec.save(str(target))


if __name__ == "__main__":
    convert(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), sys.argv[3])
