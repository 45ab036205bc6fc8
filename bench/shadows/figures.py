"""Percentiles of the runs, their ratios, and the tables that show them."""

import statistics

QUANTILES = {"p50": 0.5, "p95": 0.95, "p99": 0.99}
TARGET = 1.05
TIMES = ("ttft_ms", "server_ttft_ms", "itl_ms")


def quantile(values, q):
    """With linear interpolation, as numpy's default."""
    values = sorted(values)
    place = q * (len(values) - 1)
    below = int(place)
    above = min(below + 1, len(values) - 1)
    return values[below] + (values[above] - values[below]) * (place - below)


def percentiles(values):
    return {name: quantile(values, q) for name, q in QUANTILES.items()} if values else None


def compare(rounds, times, name):
    """One percentile over the rounds: with shadows, and by how much it differs from without."""
    without, beside, noise = [], [], []
    for runs in rounds:
        before, shadows, after = (quantile(run[times], QUANTILES[name]) for run in runs)
        without.append((before + after) / 2)
        beside.append(shadows)
        noise.append(max(before, after) / min(before, after))
    ratios = [b / w for b, w in zip(beside, without)]
    return {
        "without_ms": statistics.median(without), "with_ms": statistics.median(beside),
        "ratio": statistics.median(ratios), "ratios": [round(r, 4) for r in ratios],
        "more_ms": statistics.median(b - w for b, w in zip(beside, without)),
        # Of two runs without shadows, in the same rounds: what a ratio means here.
        "noise": statistics.median(noise), "noise_most": max(noise),
    }


def outcomes(rounds, key):
    counts = {}
    for runs in rounds:
        for outcome, count in runs[1][key].items():
            counts[outcome] = counts.get(outcome, 0) + count
    return counts


def sum_up(direction, load, rate, requests, rounds, layer_ms):
    row = {"direction": direction, "load": load, "rate": rate, "requests_a_run": requests, "rounds": len(rounds)}
    for times in TIMES:
        row[times] = {name: compare(rounds, times, name) for name in QUANTILES}
        for name, found in row[times].items():
            found["within"] = found["ratio"] <= TARGET or (name == "p99" and found["more_ms"] <= layer_ms)
    counts = outcomes(rounds, "shadows")
    tokens, delays, delay_s = (counts.pop(name) for name in ("tokens", "delays", "delay_s"))
    sampled = sum(counts.values())
    row["shadows"] = {"sampled": sampled, "completed_under_load": counts.get("completed", 0) / sampled if sampled else None,
                      "outcomes_under_load": counts, "outcomes_at_last": outcomes(rounds, "shadows_drained"),
                      "tokens": tokens}
    # Counted in the server: how long work that came waited for background work to give way.
    requests_with = sum(runs[1]["completed"] for runs in rounds)
    ttft = sum(sum(runs[1]["ttft_ms"]) for runs in rounds)
    row["delay"] = {"times": delays, "of_requests": delays / requests_with if requests_with else None,
                    "mean_ms": 1000 * delay_s / delays if delays else 0, "share_of_ttft": 1000 * delay_s / ttft if ttft else None}
    row["failed"] = {name: sum(run["failed"] for runs in rounds for run in runs if run["server"] == name)
                     for name in ("on", "off")}
    row["most_at_once"] = {name: max(run["most_at_once"] for runs in rounds for run in runs if run["server"] == name)
                           for name in ("on", "off")}
    return row


def share(value):
    return "-" if value is None else f"{100 * value:.0f} %"


def in_short(row):
    parts = [f"{times[:-3].upper()} " + " ".join(f"{name} x{row[times][name]['ratio']:.3f}" for name in QUANTILES)
             for times in TIMES]
    delay = row["delay"]
    parts.append(f"waited for shadows {delay['mean_ms']:.2f} ms in {share(delay['of_requests'])} of requests")
    return "; ".join(parts) + f"; shadows {share(row['shadows']['completed_under_load'])} done under load"


def cell(found):
    return (f"{found['without_ms']:.3g} → {found['with_ms']:.3g}: {found['ratio']:.3f} "
            f"(±{100 * (found['noise'] - 1):.0f} %)" + ("" if found["within"] else " **over**"))


def table(report):
    lines = [f"model {report['model']}, {report['workload']}, {report['seconds_a_run']:g} s a run, background layer "
             f"{report['background_layer_ms']:.2f} ms, capacity "
             + ", ".join(f"{d} {c:.1f}/s" for d, c in report["capacity"].items()),
             "", "ms without → with shadows: median ratio (what two runs without differ by)", "",
             "| served | load | TTFT p50 | p95 | p99 | in the server p50 | p95 | p99 | ITL p50 | p95 | p99 | waited for shadows | shadows done under load |",
             "|---|---|---|---|---|---|---|---|---|---|---|---|---|"]
    for row in report["rows"]:
        cells = [cell(row[times][name]) for times in TIMES for name in QUANTILES]
        done, delay = row["shadows"], row["delay"]
        cells.append(f"{delay['mean_ms']:.2f} ms, {delay['times']:.0f} times: {100 * (delay['share_of_ttft'] or 0):.2f} % of TTFT")
        lines.append(f"| {row['direction']} | {row['load']:g} | " + " | ".join(cells)
                     + f" | {share(done['completed_under_load'])} of {done['sampled']:.0f} |")
    return "\n".join(lines)
