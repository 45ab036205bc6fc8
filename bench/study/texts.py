#!/usr/bin/env python3
"""Writes the study's texts: prose that no version was trained on.

    .venv/bin/python bench/study/texts.py

Needs the text of models/smollm2_update_text.py and what `models/demo/train.py text` wrote. Makes
build/study/text/demo-{old,new}.txt (novels and Bible; handbook and Jargon File) and smollm2-{novels,handbook}.txt.
"""

import argparse
import json
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "models"))

import smollm2_update_text as text  # noqa: E402


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--demo-work", type=pathlib.Path, default=ROOT / "build/demo-training")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/study/text")
    a = parser.parse_args()
    a.out.mkdir(parents=True, exist_ok=True)
    held_out = lambda name: json.loads((a.demo_work / f"{name}.held.json").read_text())
    pages = [page for i, page in enumerate(text.austen()) if i // 40 % text.HELD_OUT_EVERY == 0]
    sections = text.split(text.handbook())[1]
    for name, parts in {
            "demo-old": held_out("austen") + held_out("kjv"),
            "demo-new": held_out("handbook") + held_out("jargon"),
            "smollm2-novels": pages,
            "smollm2-handbook": [part for section in sections for part in (section.heading, *section.paragraphs)]}.items():
        (a.out / f"{name}.txt").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
        print(f"{name}: {sum(map(len, parts)):,} characters")


if __name__ == "__main__":
    main()
