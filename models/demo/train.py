#!/usr/bin/env python3
"""Trains the demo pair: version 2026-10 and its update 2026-11.

    python3 train.py                 everything: text, tokenizer, both versions, the two folders
    python3 train.py STAGE...        only those stages, of: text tokenizer base update export

It needs two cores, about 4 GB of memory and the packages in requirements.txt. The text comes from four
Debian packages: r-cran-janeaustenr, bible-kjv, debian-handbook and jargon-text.

A run that was interrupted goes on from its last checkpoint. What step N sees depends on the seed and on N
alone, so the interruption changes nothing but rounding.
"""

import argparse
import json
import math
import os
import shutil
import time

import torch
import torch.nn.functional as F
from torch import nn

from corpus import SEED, SPECIALS, VOCAB, Words, batch, make_text, make_tokenizer

HERE = os.path.dirname(os.path.abspath(__file__))

# ---------------------------------------------------------------- the two versions

CONFIG = dict(
    vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=4,
    num_attention_heads=4, num_key_value_heads=2, head_dim=64,
    max_position_embeddings=4096, rope_theta=500000.0, rms_norm_eps=1e-5)

# A stage: (steps, sequence length, sequences a step, weight of an answer against a token of prose).
# Prose and facts together, at rising length.
PLAN = {
    "2026-10": [
        (400, 256, 16, 12),
        (600, 512, 8, 12),
        (400, 1024, 4, 12),
        (200, 2304, 2, 12),
    ],
    "2026-11": [
        (150, 512, 8, 12),
        (150, 1024, 4, 12),
        (100, 2304, 2, 12),
    ],
}
PEAK = {"2026-10": 1.0, "2026-11": 0.7}     # learning-rate scale
DECAY = {"2026-10": 0.35, "2026-11": 0.6}   # share of the steps over which it falls to zero
WARMUP = {"2026-10": 10, "2026-11": 3}
LR_MUON, LR_ADAM = 0.01, 1e-3


# ---------------------------------------------------------------- model

class Layer(nn.Module):
    def __init__(self, c):
        super().__init__()
        d, q, kv = c["hidden_size"], c["num_attention_heads"] * c["head_dim"], c["num_key_value_heads"] * c["head_dim"]
        self.c = c
        self.input_layernorm = nn.RMSNorm(d, c["rms_norm_eps"])
        self.post_attention_layernorm = nn.RMSNorm(d, c["rms_norm_eps"])
        linear = lambda i, o: nn.Linear(i, o, bias=False)
        self.self_attn = nn.ModuleDict(dict(q_proj=linear(d, q), k_proj=linear(d, kv), v_proj=linear(d, kv), o_proj=linear(q, d)))
        f = c["intermediate_size"]
        self.mlp = nn.ModuleDict(dict(gate_proj=linear(d, f), up_proj=linear(d, f), down_proj=linear(f, d)))

    def forward(self, x, cos, sin):
        b, n, _ = x.shape
        a, m, size = self.self_attn, self.mlp, self.c["head_dim"]
        h = self.input_layernorm(x)
        q, k, v = (a[p](h).view(b, n, -1, size).transpose(1, 2) for p in ("q_proj", "k_proj", "v_proj"))
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + a["o_proj"](h.transpose(1, 2).reshape(b, n, -1))
        h = self.post_attention_layernorm(x)
        return x + m["down_proj"](F.silu(m["gate_proj"](h)) * m["up_proj"](h))


def rotate(x, cos, sin):
    """Rotary positions as Hugging Face lays them out: halves, not neighbours."""
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Llama(nn.Module):
    """The Llama architecture under Hugging Face's tensor names, with tied embeddings."""

    def __init__(self, c, share=None):
        super().__init__()
        self.embed_tokens = nn.Embedding(c["vocab_size"], c["hidden_size"])
        self.layers = nn.ModuleList(Layer(c) for _ in range(c["num_hidden_layers"]))
        self.norm = nn.RMSNorm(c["hidden_size"], c["rms_norm_eps"])
        angle = torch.outer(torch.arange(c["max_position_embeddings"]).float(),
                            c["rope_theta"] ** (-torch.arange(0, c["head_dim"], 2).float() / c["head_dim"]))
        self.register_buffer("cos", torch.cat((angle, angle), -1).cos(), persistent=False)
        self.register_buffer("sin", torch.cat((angle, angle), -1).sin(), persistent=False)
        for name, p in self.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                nn.init.zeros_(p)       # every layer starts as the identity
            elif p.dim() == 2:
                nn.init.normal_(p, std=0.02)
        if share is not None:
            self.plant(c, share)

    @torch.no_grad()
    def plant(self, c, share):
        """Starts training from token frequencies and a rough induction circuit: "say what came after it before".

        Such a circuit forms by itself, but only after more tokens than two cores can afford, and retrieval
        depends on it. All it needs is two heads. In layer 0, head 0 looks one token back and writes a
        part of that token's embedding where layer 1 finds it; in layer 1, head 0 looks for places whose previous
        token equals the current one and copies the token found there. Training is free to change all of it.

        Each token's share of the text is there from the start because learning it would tear the circuit up:
        without an output bias, the quickest way to learn it runs through what all embeddings have in common,
        and that is what head 0 of layer 0 stands on.
        """
        d, size = c["hidden_size"], c["head_dim"]
        half = size // 2
        speed = c["rope_theta"] ** (-torch.arange(half).float() / half)
        basis = torch.linalg.qr(torch.randn(d, d))[0]
        constant, frequency, token, previous = basis[0], basis[1], basis[2:2 + size], basis[2 + size:2 + 2 * size]
        # A Llama layer has no biases, so a pattern over positions needs a part common to all embeddings.
        embedding = self.embed_tokens.weight
        embedding += (0.32 - embedding @ constant)[:, None] * constant
        share = share.log()
        embedding += (0.05 * (share - share.mean()) - embedding @ frequency)[:, None] * frequency
        last = self.layers[-1].self_attn
        last["v_proj"].weight[-1] = constant
        last["o_proj"].weight[:, -1] = 0.2 * frequency
        self.norm.weight.fill_(3.0)

        first, second = self.layers[0].self_attn, self.layers[1].self_attn
        fast = torch.where(speed > 0.05, 5 / 16, 0.0)
        first["k_proj"].weight[:half] += torch.outer(fast, constant)
        first["q_proj"].weight[:half] += torch.outer(2 * fast * speed.cos(), constant)
        first["q_proj"].weight[half:size] += torch.outer(-2 * fast * speed.sin(), constant)
        first["v_proj"].weight[:size] = token
        first["o_proj"].weight[:, :size] = 0.1 * previous.T
        # Words are compared in the dimensions that positions turn so slowly that distance does not matter.
        slow = (speed < 1e-3).repeat(2)[:, None]
        second["q_proj"].weight[:size] += 2 * slow * token
        second["k_proj"].weight[:size] += 2 * slow * previous
        second["v_proj"].weight[:size] = token
        second["o_proj"].weight[:, :size] = 1.5 * token.T

    def forward(self, tokens):
        x = self.embed_tokens(tokens)
        n = tokens.shape[1]
        for layer in self.layers:
            x = layer(x, self.cos[:n], self.sin[:n])
        return self.norm(x)

    def logits(self, hidden):
        return hidden @ self.embed_tokens.weight.T


# ---------------------------------------------------------------- training

def scale(version, step):
    total = sum(s[0] for s in PLAN[version])
    fall = total * DECAY[version]
    return PEAK[version] * min(1, (step + 1) / WARMUP[version], (total - step) / fall)


def optimizers(model):
    """Muon for the matrices, which learn faster with it; AdamW for embeddings and norms."""
    matrices = [p for n, p in model.named_parameters() if p.dim() == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.dim() != 2 or "embed" in n]
    return [torch.optim.Muon(matrices, lr=LR_MUON, weight_decay=0.01, momentum=0.95),
            torch.optim.AdamW(others, lr=LR_ADAM, betas=(0.9, 0.95), weight_decay=0.01, fused=True)]


def train(work, version, start_from=None, stop_at=None, words=None):
    torch.manual_seed(SEED)
    words = words or Words(work)
    model = Llama(CONFIG, torch.from_numpy(words.shares("2026-10")))
    if start_from:
        model.load_state_dict(torch.load(start_from)["model"])
    opts, first, seen, spent = optimizers(model), 0, 0, 0.0
    path = f"{work}/{version}.pt"
    if os.path.exists(path):
        saved = torch.load(path)
        model.load_state_dict(saved["model"])
        for o, s in zip(opts, saved["opts"]):
            o.load_state_dict(s)
        first, seen, spent = saved["step"], saved["seen"], saved["spent"]
    schedule = [s[1:] for s in PLAN[version] for _ in range(s[0])]
    stop_at = min(stop_at or len(schedule), len(schedule))
    mark = time.time()

    def save(step):
        torch.save(dict(model=model.state_dict(), opts=[o.state_dict() for o in opts], step=step, seen=seen,
                        spent=spent + time.time() - mark), path + ".new")
        os.replace(path + ".new", path)

    for step in range(first, stop_at):
        tokens, weight = map(torch.from_numpy, batch(words, version, step, *schedule[step]))
        for o, lr in zip(opts, (LR_MUON, LR_ADAM)):
            for g in o.param_groups:
                g["lr"] = lr * scale(version, step)
        # Logits only where something is to be predicted: in retrieval sequences that is a small share.
        where = weight[:, 1:] > 0
        hidden = model(tokens)[:, :-1][where]
        target, w = tokens[:, 1:][where], weight[:, 1:][where]
        logits = model.logits(hidden)
        each = F.cross_entropy(logits, target, reduction="none")
        loss = (each * w).sum() / w.sum()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for o in opts:
            o.step()
            o.zero_grad()
        seen += tokens.numel()
        if step % 10 == 0 or step + 1 == stop_at:
            answers = w > 1
            hit = (logits.argmax(-1) == target)[answers].float().mean().item()
            pick = lambda m: each[m].mean().item() if m.any() else float("nan")
            now = spent + time.time() - mark
            print(f"{version} step {step} length {tokens.shape[1]} prose {pick(w == 1):.3f} answers {pick(answers):.3f} "
                  f"right {hit:.3f} norm {norm:.2f} tokens {seen} seconds {now:.0f}", flush=True)
        if (step + 1) % 10 == 0:
            save(step + 1)
    save(stop_at)


# ---------------------------------------------------------------- Hugging Face folders

def export(work, version, out):
    """Writes the version as a Hugging Face folder, weights in bfloat16."""
    from safetensors.torch import save_file
    folder = f"{out}/{version}"
    os.makedirs(folder, exist_ok=True)
    saved = torch.load(f"{work}/{version}.pt")
    weights = {f"model.{n}": w.to(torch.bfloat16).contiguous() for n, w in saved["model"].items()}
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    shutil.copy(f"{work}/tokenizer.json", folder)
    config = dict(
        architectures=["LlamaForCausalLM"], model_type="llama", **CONFIG, rope_scaling=None, hidden_act="silu",
        attention_bias=False, mlp_bias=False, attention_dropout=0.0, initializer_range=0.02,
        tie_word_embeddings=True, bos_token_id=0, eos_token_id=0, pad_token_id=1, use_cache=True,
        torch_dtype="bfloat16")
    specials = dict(bos_token=SPECIALS[0], eos_token=SPECIALS[0], pad_token=SPECIALS[1])
    for name, content in {
            "config.json": config,
            "generation_config.json": dict(bos_token_id=0, eos_token_id=0, pad_token_id=1),
            "tokenizer_config.json": dict(
                tokenizer_class="PreTrainedTokenizerFast", **specials, clean_up_tokenization_spaces=False,
                model_max_length=CONFIG["max_position_embeddings"],
                additional_special_tokens=SPECIALS[2:])}.items():
        with open(f"{folder}/{name}", "w") as f:
            json.dump(content, f, indent=2)
            f.write("\n")
    os.chmod(f"{folder}/model.safetensors", 0o644)
    print(f"{version}: {sum(w.numel() for w in weights.values())} parameters, trained on {saved['seen']} tokens "
          f"in {saved['spent']:.0f} s")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help="text, tokenizer, base, update, export")
    parser.add_argument("--work", default="build/demo-training", help="folder for text and checkpoints")
    parser.add_argument("--stop-at", type=int, help="end base or update at this step: see README.md, \"How it was trained\"")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default=HERE, help="folder that the two versions are written to")
    a = parser.parse_args()
    os.makedirs(a.work, exist_ok=True)
    torch.set_num_threads(a.threads)
    stages = {"text": lambda: make_text(a.work), "tokenizer": lambda: make_tokenizer(a.work),
              "base": lambda: train(a.work, "2026-10", stop_at=a.stop_at),
              "update": lambda: train(a.work, "2026-11", f"{a.work}/2026-10.pt", stop_at=a.stop_at),
              "export": lambda: [export(a.work, v, a.out) for v in PLAN]}
    for s in a.stages or stages:
        stages[s]()


if __name__ == "__main__":
    main()
