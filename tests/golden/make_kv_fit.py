#!/usr/bin/env python3
"""Reference values of the fit of KV maps, from numpy.

  make_kv_fit.py        writes reference/kv_fit.json

Needs numpy. What it wrote is committed; run it again only to change a case. It takes another way
than the engine: inputs are centred and scaled first and the ridge is solved as a least-squares
problem with rows added for the penalty, by QR; the low rank comes from the singular values of the
predictions, not from an eigenvector problem of sums.
"""

import json
import pathlib

import numpy as np

HERE = pathlib.Path(__file__).resolve().parent
HEADS, HEAD_DIM, ROWS = 2, 2, 30
DIM = 2 * HEADS * HEAD_DIM


def ridge(x, y, lam):
    """W and b of y = W x + b; x (rows, inputs), y (rows, outputs)."""
    mean_x, mean_y = x.mean(0), y.mean(0)
    scale = np.sqrt(((x - mean_x) ** 2).sum(0))
    a = np.vstack([(x - mean_x) / scale, np.sqrt(lam) * np.eye(x.shape[1])])
    b = np.vstack([y - mean_y, np.zeros((x.shape[1], y.shape[1]))])
    w = np.linalg.lstsq(a, b, rcond=None)[0].T / scale
    return w, mean_y - w @ mean_x


def per_layer(x, y, lam):
    w, b = ridge(x, y - x, lam)
    return {"weight": w, "bias": b}


def per_head(x, y, lam):
    weights, bias = [], np.zeros(DIM)
    for head in range(HEADS):
        k = np.arange(HEAD_DIM) + head * HEAD_DIM
        places = np.concatenate([k, k + DIM // 2])
        w, b = ridge(x[:, places], (y - x)[:, places], lam)
        weights.append(w)
        bias[places] = b
    return {"weight": np.stack(weights), "bias": bias}


def low_rank(x, y, lam, rank):
    d = y - x
    w, _ = ridge(x, d, lam)
    centred = x - x.mean(0)
    spread = np.sqrt(((d - d.mean(0)) ** 2).sum(0))
    penalty = np.sqrt(lam) * np.diag(np.sqrt((centred**2).sum(0)))
    predicted = np.vstack([centred, penalty]) @ (w / spread[:, None]).T
    u = np.linalg.svd(predicted)[2][:rank].T
    w = (spread[:, None] * u) @ (u.T @ (w / spread[:, None]))
    return {"product": w, "bias": d.mean(0) - w @ x.mean(0)}


def main():
    rng = np.random.default_rng(4)
    # Inputs that hang together, far from 0, of very different sizes, as K and V are.
    x = rng.normal(size=(ROWS, DIM)) @ rng.normal(size=(DIM, DIM))
    x = x * np.array([20, 1, 5, 0.1, 0.5, 3, 0.02, 1]) + np.array([100, 0, -3, 1, 0, 0, 0.2, -1])
    y = x + 0.3 * x @ rng.normal(size=(DIM, DIM)) / 8 + rng.normal(size=(ROWS, DIM)) * 0.1 + 0.5
    x, y = x.astype(np.float32).astype(float), y.astype(np.float32).astype(float)
    cases = []
    for lam in (1e-6, 0.01, 1.0):
        cases.append({"variant": "per_layer", "lambda": lam, "rank": 0} | per_layer(x, y, lam))
        cases.append({"variant": "per_head", "lambda": lam, "rank": 0} | per_head(x, y, lam))
        for rank in (1, 3, DIM):
            cases.append({"variant": "low_rank", "lambda": lam, "rank": rank}
                         | low_rank(x, y, lam, rank))
    out = {"heads": HEADS, "head_dim": HEAD_DIM, "source": x, "target": y, "cases": cases}

    def plain(value):
        return [float(f"{v:.10g}") for v in value.ravel()]

    text = json.dumps(out, default=plain)
    (HERE / "reference" / "kv_fit.json").write_text(text.replace('}, {', '},\n {') + "\n")


if __name__ == "__main__":
    main()
