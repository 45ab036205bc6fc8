#!/usr/bin/env python3
"""Reference values of the divergence op from numpy and scipy, in fp64.

  make_divergence.py        writes reference/divergence.json

Needs the packages of requirements.txt. What it wrote is committed; run it again only to add a case.

A case holds what its logits are made of, so that the file stays small; the C++ test makes the same
ones, bit for bit, since every step is exact or one rounding in f32:
  draws     x' = 1664525 x + 1013904223 mod 2^32 from `seed` (Knuth's and Lewis' generator);
            u = (x' >> 8) / 2^24 - 1/2. First `vocab` draws for native, then as many for carried
  native    u * scale, rounded down to a multiple of `quantum` where that is not 0
  carried   (native + u * noise), rounded down alike, + shift
  raise     [arm, id, by]: added afterwards
  mask      [arm, modulus, remainder]: ids that give the remainder are -inf
Scale, noise and quantum are powers of two. Infinite results are the strings "inf" and "-inf".
"""

import json
import pathlib

import numpy as np
from scipy.spatial.distance import jensenshannon
from scipy.special import logsumexp, rel_entr

HERE = pathlib.Path(__file__).resolve().parent
TOP = 10
WIDE = 151936


def draws(seed, count):
    """`count` draws and the state after them; by doubling, since the generator is affine."""
    a, c, mask = 1664525, 1013904223, 0xFFFFFFFF
    states = np.array([(a * seed + c) & mask], dtype=np.uint64)
    step_a, step_c = a, c
    while len(states) < count:
        states = np.concatenate([states, (states * np.uint64(step_a) + np.uint64(step_c)) & np.uint64(mask)])
        step_a, step_c = (step_a * step_a) & mask, (step_a * step_c + step_c) & mask
    states = states[:count]
    return ((states >> np.uint64(8)).astype(np.float32) / np.float32(2**24) - np.float32(0.5)), int(states[-1])


def logits(case):
    vocab, seed = case["vocab"], case["seed"]
    u, state = draws(seed, vocab)
    v, _ = draws(state, vocab)
    quantum = np.float32(case.get("quantum", 0))
    down = (lambda x: np.floor(x / quantum) * quantum) if quantum else (lambda x: x)
    native = down(u * np.float32(case["scale"]))
    carried = down(native + v * np.float32(case["noise"])) + np.float32(case.get("shift", 0))
    arms = [native.astype(np.float32), carried.astype(np.float32)]
    for arm, index, by in case.get("raise", []):
        arms[arm][index] += np.float32(by)
    for arm, modulus, remainder in case.get("mask", []):
        arms[arm][np.arange(vocab) % modulus == remainder] = -np.inf
    return arms


def top_ids(z):
    order = np.lexsort((np.arange(len(z)), -z))
    return [int(i) for i in order[:TOP] if np.isfinite(z[i])]


def margin(z, a):
    others = np.delete(z, a)
    return z[a] - (others.max() if len(others) else -np.inf)


def measure(case):
    z32, w32 = logits(case)
    z, w = z32.astype(np.float64), w32.astype(np.float64)
    log_z, log_w = logsumexp(z), logsumexp(w)
    p, q = np.exp(z - log_z), np.exp(w - log_w)
    p, q = p / p.sum(), q / q.sum()
    possible = p > 0
    kl = (p[possible] * ((z - log_z) - (w - log_w))[possible]).sum()
    by_scipy = rel_entr(p, q).sum()  # +inf also where a q underflows
    assert np.isinf(by_scipy) or abs(kl - by_scipy) < 1e-12 * (1 + kl), case["name"]
    top_z, top_w = top_ids(z), top_ids(w)
    union = sorted(set(top_z) | set(top_w))
    delta = w[union] - z[union]
    answer = case.get("answer", -1)
    a = answer if answer >= 0 else top_z[0]
    stops = sorted({i for i in case["stops"] if 0 <= i < case["vocab"]})
    return {
        "kl": max(kl, 0.0),
        "js": jensenshannon(p, q) ** 2,
        "tv": np.abs(p - q).sum() / 2,
        "native_log_sum_exp": log_z,
        "carried_log_sum_exp": log_w,
        "native_margin": margin(z, a),
        "carried_margin": margin(w, a),
        "native_gap": margin(z, top_z[0]),
        "delta_range": np.inf if np.isinf(delta).any() else delta.max() - delta.min(),
        "native_stop": p[stops].sum(),
        "carried_stop": q[stops].sum(),
        "native_top": top_z,
        "carried_top": top_w,
        "overlap": len(set(top_z) & set(top_w)),
        # Of all finite logits, exact in fp64: whether the test made the same ones.
        "sum": float(z[np.isfinite(z)].sum() + w[np.isfinite(w)].sum()),
    }


CASES = [
    {"name": "random", "vocab": 1000, "scale": 16, "noise": 2},
    {"name": "random_far_apart", "vocab": 1000, "scale": 16, "noise": 32},
    {"name": "near", "vocab": 3000, "scale": 16, "noise": 2**-7},
    {"name": "nearly_equal", "vocab": 3000, "scale": 16, "noise": 2**-14},
    {"name": "equal", "vocab": 777, "scale": 16, "noise": 0},
    {"name": "shifted", "vocab": 777, "scale": 16, "noise": 1, "shift": 4096},
    {"name": "flat", "vocab": 513, "scale": 2**-8, "noise": 2**-8},
    {"name": "peaked", "vocab": 2000, "scale": 8, "noise": 1, "raise": [[0, 1500, 24], [1, 1500, 20]]},
    {"name": "peaked_elsewhere", "vocab": 2000, "scale": 8, "noise": 1, "raise": [[0, 1999, 24], [1, 0, 24]]},
    {"name": "underflow", "vocab": 600, "scale": 2048, "noise": 2048},
    {"name": "tied", "vocab": 1500, "scale": 4, "noise": 2, "quantum": 1},
    {"name": "tied_all", "vocab": 40, "scale": 2**-10, "noise": 2**-10, "quantum": 1},
    {"name": "masked_both", "vocab": 1001, "scale": 16, "noise": 2, "mask": [[0, 3, 0], [1, 3, 0]]},
    {"name": "masked_carried", "vocab": 1001, "scale": 16, "noise": 2, "mask": [[1, 3, 0]]},
    {"name": "masked_native", "vocab": 1001, "scale": 16, "noise": 2, "mask": [[0, 3, 0]]},
    {"name": "masked_apart", "vocab": 100, "scale": 4, "noise": 1, "mask": [[0, 2, 0], [1, 2, 1]]},
    {"name": "masked_but_few", "vocab": 21, "scale": 4, "noise": 4, "quantum": 0.5,
     "mask": [[arm, 3, rest] for arm in (0, 1) for rest in (0, 1)]},
    {"name": "one_left", "vocab": 2, "scale": 4, "noise": 1, "mask": [[0, 2, 0], [1, 2, 0]]},
    {"name": "vocab_1", "vocab": 1, "scale": 4, "noise": 1},
    {"name": "vocab_11", "vocab": 11, "scale": 4, "noise": 4},
    {"name": "answer", "vocab": 500, "scale": 8, "noise": 4, "answer": 123},
    {"name": "answer_masked", "vocab": 500, "scale": 8, "noise": 4, "answer": 7, "mask": [[1, 500, 7]]},
    {"name": "wide", "vocab": WIDE, "scale": 16, "noise": 1},
    {"name": "wide_near", "vocab": WIDE, "scale": 16, "noise": 2**-9},
    {"name": "wide_peaked", "vocab": WIDE, "scale": 16, "noise": 1, "raise": [[0, WIDE - 1, 16], [1, WIDE - 1, 14]]},
    {"name": "wide_tied", "vocab": WIDE, "scale": 16, "noise": 4, "quantum": 0.25},
    {"name": "wide_masked", "vocab": WIDE, "scale": 16, "noise": 1, "mask": [[0, 7, 3], [1, 7, 3], [1, 9, 1]]},
]


def plain(value):
    if isinstance(value, (list, int)):
        return value
    value = float(value)
    return value if np.isfinite(value) else str(value)


def main():
    written = []
    for seed, case in enumerate(CASES, start=20261):
        case = {**case, "seed": seed, "stops": [case["vocab"] // 2, 3, 3, case["vocab"], -1]}
        with np.errstate(divide="ignore", invalid="ignore"):
            case["want"] = {key: plain(value) for key, value in measure(case).items()}
        written.append(case)
    lines = ",\n".join(json.dumps(case) for case in written)
    (HERE / "reference" / "divergence.json").write_text(f"[\n{lines}\n]\n")


if __name__ == "__main__":
    main()
