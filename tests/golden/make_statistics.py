#!/usr/bin/env python3
"""Reference values of the evaluator's statistics from scipy and numpy.

  make_statistics.py        writes reference/statistics.json

Needs the packages of requirements.txt. What it wrote is committed; run it again only to add a case.

wilson     scipy's binomtest(k, n).proportion_ci(method="wilson"), 95 %
mcnemar    scipy's binomtest(b, b + c, 1/2), two-sided
spearman   scipy's spearmanr
paired     difference of paired rates: the Wilson limits of both rates, squared and added with the
           phi coefficient (Newcombe 1998), from the formula, in numpy, with scipy's limits
bootstrap  scipy's bootstrap (percentile, 100,000 resamples) of clusters' sums and counts: the two
           are resampled together, and the statistic is their ratio. Resampling is random, so that
           ours must only come near.
"""

import json
import math
import pathlib

import numpy as np
from scipy import stats

HERE = pathlib.Path(__file__).resolve().parent


def wilson(k, n):
    interval = stats.binomtest(k, n).proportion_ci(method="wilson")
    return [float(interval.low), float(interval.high)]


def paired(both, first, second, neither):
    n = both + first + second + neither
    p1, p2 = (both + first) / n, (both + second) / n
    (l1, u1), (l2, u2) = wilson(both + first, n), wilson(both + second, n)
    margins = (both + first) * (second + neither) * (both + second) * (first + neither)
    phi = (both * neither - first * second) / math.sqrt(margins) if margins else 0.0
    down = math.sqrt((p1 - l1) ** 2 - 2 * phi * (p1 - l1) * (u2 - p2) + (u2 - p2) ** 2)
    up = math.sqrt((u1 - p1) ** 2 - 2 * phi * (u1 - p1) * (p2 - l2) + (p2 - l2) ** 2)
    return {"cells": [both, first, second, neither], "mean": p1 - p2, "lower": p1 - p2 - down, "upper": p1 - p2 + up}


def bootstrap(seed, clusters, sizes):
    rng = np.random.default_rng(seed)
    values, names = [], []
    for cluster in range(clusters):
        size = int(rng.integers(1, sizes + 1))
        values += np.round(rng.normal(rng.normal(0.4, 0.2), 0.1, size), 6).tolist()
        names += [cluster] * size
    sums = np.bincount(names, weights=values)
    counts = np.bincount(names).astype(float)
    result = stats.bootstrap((sums, counts), lambda s, c, axis=-1: s.sum(axis=axis) / c.sum(axis=axis), paired=True,
                             n_resamples=100000, method="percentile", rng=np.random.default_rng(1))
    return {"values": values, "clusters": names, "mean": float(np.mean(values)),
            "lower": float(result.confidence_interval.low), "upper": float(result.confidence_interval.high)}


def main():
    rng = np.random.default_rng(3)
    ranks = []
    for n, ties in [(5, False), (30, False), (40, True)]:
        x = rng.normal(size=n)
        y = x + rng.normal(size=n)
        if ties:
            x, y = np.round(x), np.round(y)
        ranks.append({"x": x.tolist(), "y": y.tolist(), "rho": float(stats.spearmanr(x, y).statistic)})
    reference = {
        "wilson": [[k, n, *wilson(k, n)] for k, n in
                   [(0, 1), (1, 1), (0, 20), (1, 20), (10, 20), (20, 20), (3, 64), (63, 64), (199, 200), (1, 100000)]],
        "mcnemar": [[b, c, float(stats.binomtest(min(b, c), b + c, 0.5).pvalue)] for b, c in
                    [(1, 0), (5, 0), (0, 10), (3, 3), (12, 4), (60, 40), (500, 430)]],
        "spearman": ranks,
        "paired": [paired(*cells) for cells in
                   [(36, 12, 2, 0), (20, 0, 0, 0), (0, 0, 0, 20), (1, 97, 1, 1), (60, 8, 4, 28), (0, 10, 0, 10),
                    (500, 3, 2, 7)]],
        "bootstrap": [bootstrap(11, 12, 1), bootstrap(12, 40, 8), bootstrap(13, 150, 4)],
    }
    (HERE / "reference" / "statistics.json").write_text(json.dumps(reference) + "\n")


main()
