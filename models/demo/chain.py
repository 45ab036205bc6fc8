#!/usr/bin/env python3
"""Trains a chain of updates of the demo model for docs/fidelity.md: v0 = 2026-10, then v1 to v4, each from the one before.

    python3 chain.py                 all four, and the folders v0 to v4

Run train.py's stages text, tokenizer and base before, in the same --work folder. An update is a quarter of the
step from 2026-10 to 2026-11: 100 steps on a quarter of the handbook and of the Jargon File that no other update
saw, and on a fifth of 2026-10's text and style. A run that was interrupted goes on from its last checkpoint.
"""

import argparse
import os
import shutil

import numpy as np
import torch

import train
from corpus import SOURCES, Words

HERE = os.path.dirname(os.path.abspath(__file__))
UPDATES = ["v1", "v2", "v3", "v4"]
for version in UPDATES:
    train.PLAN[version] = [(40, 512, 8, 12), (40, 1024, 4, 12), (20, 2304, 2, 12)]
    train.PEAK[version], train.DECAY[version], train.WARMUP[version] = 0.7, 0.6, 3


def words_of(work, version):
    """The text as this update sees it: its quarter of each of 2026-11's sources."""
    words = Words(work)
    part = UPDATES.index(version)
    for name in SOURCES["2026-11"]:
        words.text[name, "train"] = np.array_split(words.text[name, "train"], len(UPDATES))[part]
    return words


def finished(work, version):
    path = f"{work}/{version}.pt"
    return os.path.exists(path) and torch.load(path)["step"] == sum(stage[0] for stage in train.PLAN[version])


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", default="build/demo-training", help="folder for text and checkpoints")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", default=f"{HERE}/../chain/demo", help="folder that the versions are written to")
    a = parser.parse_args()
    torch.set_num_threads(a.threads)
    before = "2026-10"
    for version in UPDATES:
        if not finished(a.work, version):
            train.train(a.work, version, f"{a.work}/{before}.pt", words=words_of(a.work, version))
        before = version
    for version in ["2026-10"] + UPDATES:
        train.export(a.work, version, a.out)
    shutil.rmtree(f"{a.out}/v0", ignore_errors=True)
    os.rename(f"{a.out}/2026-10", f"{a.out}/v0")


if __name__ == "__main__":
    main()
