#!/usr/bin/env python3
"""Trains the update of SmolLM2: a LoRA adapter on models/smollm2/2026-10, written to models/smollm2_update.

    python3 models/train_smollm2_update.py train        320 seconds of one core
    python3 models/train_smollm2_update.py evaluate     both versions, after models/fetch_smollm2 merged the adapter

Needs torch, transformers and safetensors, the folder that models/fetch_smollm2 makes, and the text of
smollm2_update_text.py. What a step sees depends on the seed and on its number alone.
"""

import argparse
import json
import math
import pathlib
import sys
import time

import safetensors.torch
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import smollm2_update_text as text

MODELS = pathlib.Path(__file__).resolve().parent
SOURCE = MODELS / "smollm2" / "2026-10"
TARGET = MODELS / "smollm2" / "2026-11"
ADAPTER = MODELS / "smollm2_update"

SEED = 20261101  # of 2026-11; later updates of the chain bring their own
RANK, ALPHA = 8, 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LEARNING_RATE = 8e-4
WARM_UP = 5
# One step: a sequence of each kind, its length drawn from these. Few tokens and a high rate: an adapter bears it,
# and the whole run has to fit half an hour of one core.
STEP = [("text", [224]), ("lookup", [192, 320, 512]), ("question", [192])]


class Lora(nn.Module):
    """A frozen projection and its low-rank change: x W' + (x A') B' * scale."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.a = nn.Parameter(torch.randn(RANK, base.in_features) / math.sqrt(base.in_features))
        self.b = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.a.to(x.dtype)), self.b.to(x.dtype)) * (ALPHA / RANK)


def load(folder, dtype):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).eval()


def add_lora(model):
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    loras = {}
    for name, module in list(model.named_modules()):
        if name.rsplit(".", 1)[-1] in TARGETS:
            parent = model.get_submodule(name.rsplit(".", 1)[0])
            loras[name] = Lora(module)
            setattr(parent, name.rsplit(".", 1)[1], loras[name])
    return loras


def save(loras, folder):
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for name, lora in loras.items():
        tensors[f"base_model.model.{name}.lora_A.weight"] = lora.a.detach().to(torch.bfloat16)
        tensors[f"base_model.model.{name}.lora_B.weight"] = lora.b.detach().to(torch.bfloat16)
    safetensors.torch.save_file(tensors, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(json.dumps({
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "SmolLM2-135M-Instruct",
        "r": RANK, "lora_alpha": ALPHA, "lora_dropout": 0.0, "bias": "none", "target_modules": TARGETS}, indent=2) + "\n")


def loss_of(model, ids, learnt):
    """Mean cross-entropy in nats over the learnt tokens; only their rows go through the LM head."""
    ids = torch.tensor([ids])
    hidden = model.model(ids).last_hidden_state[0, :-1]
    rows = torch.tensor(learnt[1:])
    return F.cross_entropy(model.lm_head(hidden[rows]).float(), ids[0, 1:][rows])


def train(source, adapter, seed, book, steps):
    torch.manual_seed(seed)
    corpus = text.Corpus(transformers.AutoTokenizer.from_pretrained(source), book)
    model = load(source, torch.float32)  # without AMX, bf16 training is slower than fp32
    loras = add_lora(model)
    parameters = [parameter for lora in loras.values() for parameter in (lora.a, lora.b)]
    print(f"{sum(parameter.numel() for parameter in parameters):,} parameters to learn", flush=True)
    optimizer = torch.optim.AdamW(parameters, lr=LEARNING_RATE, betas=(0.9, 0.98), weight_decay=0.0)
    started = time.time()
    for step in range(steps):
        cosine = 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
        optimizer.param_groups[0]["lr"] = LEARNING_RATE * cosine * min(1.0, (step + 1) / WARM_UP)
        losses = {}
        for kind, lengths in STEP:
            draw = text.seeded(seed, step, kind)
            ids, learnt = getattr(corpus, kind)(draw, draw.choice(lengths))
            loss = loss_of(model, ids, learnt)
            (loss / len(STEP)).backward()
            losses[kind] = loss.item()
        nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        shown = " ".join(f"{kind} {loss:.3f}" for kind, loss in losses.items())
        print(f"step {step + 1}/{steps} {shown} {time.time() - started:.0f}s", flush=True)
        if (step + 1) % 10 == 0:
            save(loras, adapter)
    save(loras, adapter)


# ---------------------------------------------------------------- what the update changed


@torch.no_grad()
def compare_prose(models, corpus, source, sequences, length=512):
    """Perplexity of each version and KL(2026-11 || 2026-10) in nats a token, on held-out prose."""
    sums, kl, flips, count = [0.0, 0.0], 0.0, 0, 0
    for i in range(sequences):
        ids, _ = corpus.text(text.seeded("held out", source, i), length, held_out=True, source=source)
        ids = torch.tensor([ids])
        logs = [model(ids).logits[0, :-1].float().log_softmax(-1) for model in models]
        for version, log in enumerate(logs):
            sums[version] -= log.gather(1, ids[0, 1:, None]).sum().item()
        kl += F.kl_div(logs[0], logs[1], reduction="sum", log_target=True).item()
        flips += (logs[0].argmax(-1) != logs[1].argmax(-1)).sum().item()
        count += length - 1
    return {"source": source, "tokens": count, "perplexity": [round(math.exp(total / count), 2) for total in sums],
            "kl_nats": round(kl / count, 4), "flips": round(flips / count, 4)}


@torch.no_grad()
def compare_questions(models, corpus, sequences):
    """Perplexity of the held-out answers."""
    losses = [[], []]
    for i in range(sequences):
        ids, learnt = corpus.question(text.seeded("held out", "question", i), 512, held_out=True)
        for version, model in enumerate(models):
            losses[version].append(loss_of(model, ids, learnt).item())
    return {"source": "questions", "perplexity": [round(math.exp(sum(loss) / len(loss)), 2) for loss in losses]}


@torch.no_grad()
def compare_lookup(models, corpus, length, passages, records=4):
    """Share of passwords answered whole, greedily, among `records` in one passage of `length` tokens."""
    right = [0, 0]
    for i in range(passages):
        ids, learnt = corpus.lookup(text.seeded("held out", "lookup", length, i), length, True, records, 1)
        first = learnt.index(True)
        answer = ids[first:-1]  # with its <|im_end|>
        tokens = torch.tensor([ids])
        for version, model in enumerate(models):
            # Teacher forcing tells whether greedy decoding would say exactly this.
            said = model(tokens[:, :-1], logits_to_keep=len(answer) + 1).logits[0, :-1].argmax(-1)
            right[version] += said.tolist() == answer
    return {"source": "lookup", "tokens": length, "passages": passages, "records": records,
            "right": [round(count / passages, 3) for count in right]}


def evaluate(arguments):
    corpus = text.Corpus(transformers.AutoTokenizer.from_pretrained(SOURCE))
    models = [load(SOURCE, torch.float32), load(TARGET, torch.float32)]
    for source in ("handbook", "austen"):
        print(json.dumps(compare_prose(models, corpus, source, arguments.sequences)), flush=True)
    print(json.dumps(compare_questions(models, corpus, arguments.sequences)), flush=True)
    for length in arguments.lengths:
        print(json.dumps(compare_lookup(models, corpus, length, arguments.passages)), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("job", choices=["train", "evaluate"])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=8, help="held-out sequences of 512 tokens a source")
    parser.add_argument("--passages", type=int, default=16, help="held-out passages a length")
    parser.add_argument("--lengths", type=int, nargs="*", default=[256, 512, 1024])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.job == "train":
        train(SOURCE, ADAPTER, SEED, "handbook", arguments.steps)
    else:
        evaluate(arguments)


if __name__ == "__main__":
    sys.exit(main())
