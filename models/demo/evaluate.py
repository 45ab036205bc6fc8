#!/usr/bin/env python3
"""Measures the demo pair and writes prompts.jsonl. Run train.py first: it prepares the held-out text.

    python3 evaluate.py              perplexity, retrieval, what the update changes; prints Markdown
    python3 evaluate.py prompts      writes prompts.jsonl
    python3 evaluate.py --models models/chain/demo --versions v0 v1 v2 v3 v4    the chain: v0's cache, read by all others

Every number comes from the exported folders, through transformers, so it holds for what is shipped.
"""

import argparse
import copy
import json
import os

import numpy as np
import torch
from transformers import LlamaForCausalLM

from corpus import SEED, SOURCES, Words, frame, notes

HERE = os.path.dirname(os.path.abspath(__file__))
STYLES = ["2026-10", "2026-11"]
LENGTHS = [256, 512, 1024, 2048]
QUESTIONS = 8       # asked of each prefix, every one by itself


@torch.no_grad()
def perplexity(model, tokens, window=512, windows=4):
    """Over whole windows, evenly spread; the first token of a window is not scored."""
    starts = np.linspace(0, len(tokens) - window, min(windows, len(tokens) // window)).astype(int)
    loss = 0.0
    for at in range(0, len(starts), 8):
        x = torch.from_numpy(np.stack([tokens[s:s + window] for s in starts[at:at + 8]]).astype(np.int64))
        loss += torch.nn.functional.cross_entropy(
            model(x).logits[:, :-1].reshape(-1, model.config.vocab_size), x[:, 1:].reshape(-1), reduction="sum").item()
    return float(np.exp(loss / (len(starts) * (window - 1))))


def task(rng, words, style, length):
    """A prefix of held-out prose with length / 32 facts in it, questions about it, and their answers."""
    prefix, _, keys, values = notes(rng, words, style, words.prose(style, "held"), length, length // 32)
    _, opening, before, _ = frame(words, style)
    chosen = rng.choice(len(keys), QUESTIONS, replace=False)
    return ([int(t) for t in prefix], [[int(t) for t in [*opening, *before, keys[i]]] for i in chosen],
            [int(values[i]) for i in chosen])


@torch.no_grad()
def prefill(model, prefix):
    return model(torch.tensor([prefix]), use_cache=True, logits_to_keep=1).past_key_values


@torch.no_grad()
def ask(cache, model, questions):
    """The next-token log-probabilities after each question asked of a prefix's KV."""
    cache = copy.deepcopy(cache)
    cache.batch_repeat_interleave(len(questions))
    return model(torch.tensor(questions), past_key_values=cache, logits_to_keep=1).logits[:, -1].log_softmax(-1)


def measure(words, models, prefixes):
    print("Perplexity on held-out text, a token:\n")
    names = [n for s in SOURCES.values() for n in s]
    print("| version | " + " | ".join(names) + " |\n|---|" + "---|" * len(names))
    for v in models:
        row = [f"{perplexity(models[v], words.text[n, 'held']):.1f}" for n in names]
        print(f"| {v} | " + " | ".join(row) + " |", flush=True)

    old, *news = models
    carried = {new: f"{new} on the cache of {old}" for new in news}
    arms = {v: (v, v) for v in models} | {carried[new]: (old, new) for new in news}     # whose cache, and who reads it
    compared = [(new, other) for new in news for other in (old, carried[new])]
    print(f"\nRetrieval, {prefixes * QUESTIONS} questions a row; KL is from the reader's own prefill, in nats at the answer:\n")
    print("| prompt style | prefix | facts | chance | " + " | ".join(arms) + " | " +
          " | ".join(f"KL of {other} from {new}" for new, other in compared) + " |")
    print("|---|---|---|---|" + "---|" * (len(arms) + len(compared)))
    for style in STYLES:
        for length in LENGTHS:
            rng = np.random.default_rng([SEED, 7, length])
            right, kl = {a: 0 for a in arms}, {pair: 0.0 for pair in compared}
            for _ in range(prefixes):
                prefix, questions, answers = task(rng, words, style, length)
                caches = {v: prefill(models[v], prefix) for v in models}
                out = {a: ask(caches[c], models[m], questions) for a, (c, m) in arms.items()}
                for a in arms:
                    right[a] += int((out[a].argmax(-1) == torch.tensor(answers)).sum())
                for new, other in compared:
                    kl[new, other] += (out[new].exp() * (out[new] - out[other])).sum().item()
            n = prefixes * QUESTIONS
            print(f"| {style} | {length} | {length // 32} | {32 / length:.1%} | " +
                  " | ".join(f"{right[a] / n:.1%}" for a in arms) +
                  " | " + " | ".join(f"{kl[pair] / n:.3f}" for pair in compared) + " |", flush=True)

    for begin in ("She was", "And the LORD", "The package", "The hacker"):
        for v in models:
            ids = torch.tensor([[0, *words.tokenizer.encode(begin).ids]])
            torch.manual_seed(SEED)
            with torch.no_grad():
                out = models[v].generate(ids, max_new_tokens=40, do_sample=True, temperature=0.7, top_k=40)
            print(f"\n{v}: {words.tokenizer.decode(out[0].tolist())!r}")


def prompts(words, path):
    """Held-out text and retrieval tasks. Each line says how many tokens it has; decoding and encoding agree."""
    rng, lines = np.random.default_rng([SEED, 11]), []
    decode = lambda ids: words.tokenizer.decode(list(ids), skip_special_tokens=False)
    same = lambda ids: words.tokenizer.encode(decode(ids)).ids == list(ids)
    # Public-domain sources only. Long ones first: any of them can be cut to a prefix of up to 2048 tokens.
    for source, length, count in (("austen", 2300, 3), ("kjv", 2300, 2), ("jargon", 2300, 1), ("austen", 300, 4),
                                  ("jargon", 300, 4)):
        while count:
            at = int(rng.integers(0, len(words.text[source, "held"]) - length - 50))
            tokens = words.text[source, "held"][at:]
            ids = [int(t) for t in tokens[int(np.argmax(words.begins[tokens])):][:length]]
            if 0 not in ids and same(ids):
                lines.append(dict(kind="text", source=source, tokens=length, text=decode(ids)))
                count -= 1
    held = words.text
    words.text = {**held, ("handbook", "held"): held["jargon", "held"]}
    for style in STYLES:
        for length, count in ((256, 4), (512, 3), (1024, 3), (2048, 2)):
            while count:
                prefix, questions, answers = task(rng, words, style, length)
                if 0 in prefix[1:] or not same(prefix) or not all(same(prefix + q) for q in questions):
                    continue
                asked = [dict(suffix=decode(q), answers=[decode([a])]) for q, a in zip(questions, answers)]
                lines.append(dict(kind="retrieval", style=style, tokens=length, prefix=decode(prefix), **asked[0],
                                  more=asked[1:]))
                count -= 1
    words.text = held
    with open(path, "w") as f:
        f.writelines(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    print(f"{len(lines)} prompts, {sum(line['tokens'] for line in lines)} tokens")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", default="measure", choices=["measure", "prompts"])
    parser.add_argument("--work", default="build/demo-training")
    parser.add_argument("--models", default=HERE)
    parser.add_argument("--prefixes", type=int, default=16, help="prefixes a row of the retrieval table")
    parser.add_argument("--versions", nargs="+", default=STYLES, help="folders in --models, the source first")
    parser.add_argument("--threads", type=int, default=2)
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    words = Words(a.work)
    if a.what == "prompts":
        prompts(words, f"{HERE}/prompts.jsonl")
    else:
        models = {v: LlamaForCausalLM.from_pretrained(f"{a.models}/{v}", dtype=torch.float32).eval() for v in a.versions}
        measure(words, models, a.prefixes)


if __name__ == "__main__":
    main()
