"""The statistics of the study: intervals and tests, in the standard library.

Sources of the formulas: Wilson (1927) for the interval of a share, the percentile bootstrap for means, and McNemar's exact
test (a binomial one on the pairs that changed).
"""

import math
import random


def wilson(hits, n, z=1.96):
    """(low, high) of a share, 95 %."""
    if n == 0:
        return math.nan, math.nan
    p, square = hits / n, z * z
    middle = (p + square / (2 * n)) / (1 + square / n)
    half = z * math.sqrt(p * (1 - p) / n + square / (4 * n * n)) / (1 + square / n)
    return max(0.0, middle - half), min(1.0, middle + half)


def mean(values):
    return sum(values) / len(values) if values else math.nan


def quantile(values, q):
    """Linear between order statistics, as numpy's default."""
    if not values:
        return math.nan
    ordered, at = sorted(values), q * (len(values) - 1)
    low = math.floor(at)
    return ordered[low] + (at - low) * (ordered[min(low + 1, len(ordered) - 1)] - ordered[low])


def bootstrap(values, rounds=2000, seed=20261201):
    """(low, high) of a mean, 95 %, by the percentile bootstrap."""
    if not values:
        return math.nan, math.nan
    draw = random.Random(seed)
    means = [mean(draw.choices(values, k=len(values))) for _ in range(rounds)]
    return quantile(means, 0.025), quantile(means, 0.975)


def mcnemar(lost, gained):
    """Two-sided exact p of as lopsided a split if each changed pair were a coin's toss."""
    n, k = lost + gained, min(lost, gained)
    if n == 0:
        return 1.0
    return min(1.0, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2 ** n)


def spearman(x, y):
    """Rank correlation; ties get their mean rank."""
    def ranks(values):
        order = sorted(range(len(values)), key=values.__getitem__)
        out, i = [0.0] * len(values), 0
        while i < len(order):
            j = i
            while j + 1 < len(order) and values[order[j + 1]] == values[order[i]]:
                j += 1
            for k in range(i, j + 1):
                out[order[k]] = (i + j) / 2
            i = j + 1
        return out
    a, b = ranks(x), ranks(y)
    ma, mb = mean(a), mean(b)
    top = sum((p - ma) * (q - mb) for p, q in zip(a, b))
    below = math.sqrt(sum((p - ma) ** 2 for p in a) * sum((q - mb) ** 2 for q in b))
    return top / below if below else math.nan


def area_under_curve(higher, lower):
    """Probability that one of `higher` is over one of `lower` (Mann and Whitney); ties count half."""
    wins = sum((a > b) + 0.5 * (a == b) for a in higher for b in lower)
    return wins / (len(higher) * len(lower)) if higher and lower else math.nan
