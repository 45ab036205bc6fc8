#!/usr/bin/env python3
"""Writes the text of the study: prose that none of the models was trained on, and SmolLM2's look-ups.

    python3 bench/study/texts.py --demo-work build/demo-training --smollm2 models/smollm2/2026-10 --out build/study/text

Needs the packages in tests/requirements.txt, the text of models/smollm2_update_text.py and, for the demo pair,
what `models/demo/train.py text` wrote. The outputs are
  demo/{austen,kjv,handbook,jargon}.txt      held-out prose of the demo models
  smollm2/{austen,handbook,jargon}.txt       held-out prose of the SmolLM2 updates
  smollm2/lookup.jsonl                       items for `carryover eval`: a password asked for in SmolLM2's chat format
"""

import argparse
import json
import pathlib
import sys

import tokenizers

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models"))

import smollm2_update_text as text  # noqa: E402

LOOKUP_LENGTHS = (256, 512, 1024, 2048, 4096)
RECORDS = 4


class Tokenizer:
    """What text.Corpus asks of a tokenizer of the transformers package."""

    def __init__(self, folder):
        self.tokenizer = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json")

    def encode(self, string, add_special_tokens):
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens).ids

    def decode(self, ids):
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def convert_tokens_to_ids(self, token):
        return self.tokenizer.token_to_id(token)


def demo_texts(work, out):
    for name in ("austen", "kjv", "handbook", "jargon"):
        documents = json.loads((work / f"{name}.held.json").read_text())
        (out / f"{name}.txt").write_text("\n\n".join(documents) + "\n", encoding="utf-8")


def smollm2_texts(out):
    stretches = [page for i, page in enumerate(text.austen()) if (i // 40) % text.HELD_OUT_EVERY == 0]
    (out / "austen.txt").write_text("\n\n".join(stretches) + "\n", encoding="utf-8")
    for name, (read, _) in text.BOOKS.items():
        sections = text.split(read())[1]
        prose = "\n\n".join("\n\n".join([section.heading, *section.paragraphs]) for section in sections)
        (out / f"{name}.txt").write_text(prose + "\n", encoding="utf-8")


def lookups(tokenizer, count):
    """Held-out passages with four notes in them, one asked for. The prefix ends before the question."""
    corpus = text.Corpus(tokenizer)
    for length in LOOKUP_LENGTHS:
        for i in range(count):
            ids, learnt = corpus.lookup(text.seeded("study", "lookup", length, i), length, True, RECORDS, 1)
            first = learnt.index(True)
            prompt, answer = tokenizer.decode(ids[:first]), tokenizer.decode(ids[first:-2])
            at = prompt.rindex("<|im_start|>user")
            yield {"id": f"lookup-{length}-{i}", "task": "lookup", "prefix": prompt[:at], "suffix": prompt[at:],
                   "answers": [answer], "stop": ["<|im_end|>"], "max_tokens": 8, "length": length}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo-work", type=pathlib.Path)
    parser.add_argument("--smollm2", type=pathlib.Path)
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/study/text")
    parser.add_argument("--lookups", type=int, default=32, help="items a length")
    a = parser.parse_args()
    if a.demo_work:
        (a.out / "demo").mkdir(parents=True, exist_ok=True)
        demo_texts(a.demo_work, a.out / "demo")
    if a.smollm2:
        (a.out / "smollm2").mkdir(parents=True, exist_ok=True)
        smollm2_texts(a.out / "smollm2")
        with open(a.out / "smollm2/lookup.jsonl", "w", encoding="utf-8") as file:
            for item in lookups(Tokenizer(a.smollm2), a.lookups):
                file.write(json.dumps(item, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
