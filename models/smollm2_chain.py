#!/usr/bin/env python3
"""Trains a chain of updates of SmolLM2 for docs/fidelity.md: v0 = 2026-10, v1 = 2026-11, then v2 to v4.

    python3 models/smollm2_chain.py            trains v2, v3 and v4: 320 seconds of one core each
    python3 models/smollm2_chain.py evaluate   perplexities and look-ups of all five; KL from one version to the next

Each update is a LoRA adapter like 2026-11's, of as many steps, trained on the merged version before it, with another
seed and, in turn, another book. Needs what train_smollm2_update.py needs, and the text of jargon-text. A version
that is complete is left alone, so an interrupted run loses one version at most.
"""

import argparse
import json
import math
import pathlib
import shutil
import sys

import numpy as np
import safetensors.torch
import torch
import torch.nn.functional as F
import transformers

import merge_lora
import smollm2_update_text as text
import train_smollm2_update as update

CHAIN = update.MODELS / "chain" / "smollm2"
# v2 on: (seed, the book that its text and questions are about)
UPDATES = {"v2": (20261202, "jargon"), "v3": (20270103, "handbook"), "v4": (20270204, "jargon")}
FILES = ["config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"]


def make(folder, source, target):
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in (("v0", source), ("v1", target)):
        if not (folder / name).exists():
            (folder / name).symlink_to(made.resolve())
    before = folder / "v1"
    for name, (seed, book) in UPDATES.items():
        final, adapter = folder / name, folder / f"{name}-adapter"
        if not final.exists():
            work = folder / f".{name}.new"
            shutil.rmtree(work, ignore_errors=True)
            if not adapter.exists():
                print(f"{name}: on the {book}, from {before.name}", flush=True)
                update.train(before, work, seed, book, 40)
                work.rename(adapter)
            work.mkdir()
            for file in FILES:
                shutil.copyfile(before / file, work / file)
            bits = merge_lora.merged_tensors(before / "model.safetensors", adapter)
            # Not merge_lora.merge: it is written for the older safetensors of models/requirements.txt.
            safetensors.torch.save_file({key: torch.from_numpy(value.view(np.int16).copy()).view(torch.bfloat16)
                                         for key, value in bits.items()}, work / "model.safetensors", {"format": "pt"})
            work.rename(final)
        before = final


@torch.no_grad()
def evaluate(folder, sequences, passages, length=512):
    """All versions on the same held-out text: perplexity, look-ups, and KL(version || the one before) in nats a token."""
    corpora = {book: text.Corpus(transformers.AutoTokenizer.from_pretrained(folder / "v0"), book) for book in text.BOOKS}
    before = {}
    for name in ["v0", "v1", *UPDATES]:
        model, row = update.load(folder / name, torch.float32), {"version": name}
        for source, corpus in (*corpora.items(), ("austen", corpora["handbook"])):
            loss, kl, flips, count = 0.0, 0.0, 0, sequences * (length - 1)
            for i in range(sequences):
                ids, _ = corpus.text(text.seeded("held out", source, i), length, held_out=True, source=source)
                ids = torch.tensor([ids])
                log = model(ids).logits[0, :-1].float().log_softmax(-1)
                loss -= log.gather(1, ids[0, 1:, None]).sum().item()
                old = before.get((source, i), log)
                kl += F.kl_div(old, log, reduction="sum", log_target=True).item()
                flips += (old.argmax(-1) != log.argmax(-1)).sum().item()
                before[source, i] = log
            row[source] = {"perplexity": round(math.exp(loss / count), 2), "kl_nats": round(kl / count, 4),
                           "flips": round(flips / count, 4)}
        for size in (256, 1024):
            right = 0
            for i in range(passages):
                ids, learnt = corpora["handbook"].lookup(text.seeded("held out", "lookup", size, i), size, True, 4, 1)
                answer = ids[learnt.index(True):-1]
                said = model(torch.tensor([ids])[:, :-1], logits_to_keep=len(answer) + 1).logits[0, :-1].argmax(-1)
                right += said.tolist() == answer
            row[f"lookup_{size}"] = round(right / passages, 3)
        print(json.dumps(row), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("job", nargs="?", choices=["train", "evaluate"], default="train")
    parser.add_argument("--folder", type=pathlib.Path, default=CHAIN)
    parser.add_argument("--models", type=pathlib.Path, default=update.SOURCE.parent, help="what models/fetch_smollm2 made")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--sequences", type=int, default=4, help="held-out sequences of 512 tokens a source")
    parser.add_argument("--passages", type=int, default=16, help="held-out passages a length")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.job == "train":
        make(arguments.folder, arguments.models / "2026-10", arguments.models / "2026-11")
    else:
        evaluate(arguments.folder, arguments.sequences, arguments.passages)


if __name__ == "__main__":
    sys.exit(main())
