#!/usr/bin/env python3
"""Draws the pictures of docs/fidelity.md and writes all tables (tables.md), from what bench/study/run.py left.

    python3 bench/study/figures.py --from build/study/results --to docs/fidelity

Needs matplotlib (bench/study/requirements.txt).
"""

import argparse
import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402
from matplotlib.ticker import FuncFormatter, NullLocator  # noqa: E402

import records  # noqa: E402
import tables  # noqa: E402
from intervals import bootstrap, mean, wilson  # noqa: E402

# Okabe and Ito's colours, which colour-blind readers tell apart; markers differ, too.
BLUE, ORANGE, GREEN, RED, SKY, GREY, PINK = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#56B4E9", "#666666", "#CC79A7"
LOOKS = [(BLUE, "o"), (RED, "s"), (GREEN, "^"), (ORANGE, "D"), (PINK, "v"), (SKY, "P"), (GREY, "X")]

plt.rcParams.update({
    "font.size": 9, "axes.spines.top": False, "axes.spines.right": False, "axes.grid": True, "grid.alpha": 0.25,
    "axes.titlesize": 10, "axes.titleweight": "bold", "axes.titlelocation": "left", "legend.frameon": False,
    "legend.fontsize": 8, "figure.facecolor": "white", "savefig.facecolor": "white", "lines.markersize": 5})

PERCENT = FuncFormatter(lambda value, _: f"{100 * value:g} %")


def save(figure, folder, name, legends=()):
    """legends: axes whose lines are explained below the panels, where they hide nothing."""
    explained = {}
    for axes in legends:
        explained |= {label: line for line, label in zip(*axes.get_legend_handles_labels())}
    rows = -(-len(explained) // 4)
    height = figure.get_figheight() + 0.22 * rows
    figure.set_figheight(height)
    figure.tight_layout(rect=(0, 0.22 * rows / height, 1, 1))
    if explained:
        figure.legend(explained.values(), explained.keys(), loc="lower center", ncols=4)
    figure.savefig(folder / f"{name}.png", dpi=110, pil_kwargs={"optimize": True})
    plt.close(figure)


def by_length(axes, cells, value, look, label, style="-", shift=1.0):
    """One line over prefix lengths with its 95 % intervals. value(items) gives (middle, low, high)."""
    color, marker = look
    lengths = sorted(cells)
    points = [value(cells[length]) for length in lengths]
    x = [length * shift for length in lengths]
    y = [point[0] for point in points]
    errors = [[max(0, p[0] - p[1]) for p in points], [max(0, p[2] - p[0]) for p in points]]
    axes.errorbar(x, y, yerr=errors, color=color, marker=marker, linestyle=style, label=label, linewidth=1.4, capsize=2,
                  elinewidth=0.8, markerfacecolor=color if style == "-" else "white")
    axes.set_xscale("log", base=2)
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))


def share(test):
    def value(items):
        hits = sum(map(bool, map(test, items)))
        return (hits / len(items), *wilson(hits, len(items)))
    return value


def average(measure):
    def value(items):
        values = [measure(item) for item in items]
        return (mean(values), *bootstrap(values))
    return value


def lengths_figure(items, folder, name, title):
    """Utility beside fidelity, by prefix length: the two criteria of one model."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(9.2, 3.5))
    tasks = records.tasks(items)
    for i, task in enumerate(tasks):
        look, shift = LOOKS[i % len(LOOKS)], 1 + 0.02 * (i - len(tasks) / 2)
        cells = records.split(records.where(items, task=task), "length")
        if any(item.labelled for item in records.where(items, task=task)):
            by_length(left, cells, share(lambda item: item.right("native")), look, None, "--", shift)
            by_length(left, cells, share(lambda item: item.right("carried")), look, task, "-", shift)
        by_length(right, cells, share(lambda item: item.flip), look, task, "-", shift)
    left.set_title(f"{title}: is it still right?")
    left.set_ylabel("answers that are right")
    left.set_ylim(-0.03, 1.05)
    right.set_title("is it what the new version says?")
    right.set_ylabel("first tokens that differ from native")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.yaxis.set_major_formatter(PERCENT)
        axes.set_xlabel("prefix, tokens")
    left.plot([], [], color=GREY, linestyle="--", marker="o", markerfacecolor="white", label="dashed: native")
    save(figure, folder, name, [right, left])


def margins_figure(groups, folder):
    """Native margin of the first token against the carried one, and the share of flips by native margin."""
    figure, axes = plt.subplots(1, len(groups) + 1, figsize=(3.4 * (len(groups) + 1), 3.5))
    for panel, (title, items) in zip(axes, groups.items()):
        kinds = {"same first token": (lambda item: not item.flip, BLUE, "o", 0.35),
                 "another first token": (lambda item: item.flip, RED, "x", 0.8)}
        for label, (test, color, marker, alpha) in kinds.items():
            chosen = [item for item in items if test(item)]
            panel.scatter([item.first["native_margin"] for item in chosen], [item.first["carried_margin"] for item in chosen],
                          s=10, c=color, marker=marker, alpha=alpha, linewidths=0.8, label=f"{label} ({len(chosen)})")
        top = max(item.first["native_margin"] for item in items)
        panel.plot([0, top], [0, top], color=GREY, linewidth=0.8, linestyle=":")
        panel.axhline(0, color="black", linewidth=0.8)
        panel.set_title(title)
        panel.set_xlabel("native margin, nats")
        panel.legend(loc="upper left", handletextpad=0.2)
    axes[0].set_ylabel("carried margin of the native choice, nats")
    edges = [0, 0.25, 0.5, 1, 2, 4, 8, 100]
    names = ["<¼", "¼–½", "½–1", "1–2", "2–4", "4–8", ">8"]
    for i, (title, items) in enumerate(groups.items()):
        x, y, low, high = [], [], [], []
        for k in range(len(names)):
            chosen = [item for item in items if edges[k] <= item.first["native_margin"] < edges[k + 1]]
            if len(chosen) < 8:
                continue
            hits = sum(item.flip for item in chosen)
            bounds = wilson(hits, len(chosen))
            x.append(k + 0.08 * (i - len(groups) / 2))
            y.append(hits / len(chosen))
            low.append(y[-1] - bounds[0])
            high.append(bounds[1] - y[-1])
        color, marker = LOOKS[i]
        axes[-1].errorbar(x, y, yerr=[low, high], color=color, marker=marker, label=title, capsize=2, elinewidth=0.8)
    axes[-1].set_xticks(range(len(names)), names)
    axes[-1].set_xlabel("native margin, nats")
    axes[-1].set_title("flips by margin")
    axes[-1].yaxis.set_major_formatter(PERCENT)
    axes[-1].set_ylim(bottom=0)
    axes[-1].legend()
    save(figure, folder, "margins")


def chain_figure(groups, folder):
    """A cache of v0 read by later and later versions, and each version's cache read by the next."""
    figure, axes = plt.subplots(len(groups), 3, figsize=(11.6, 3.0 * len(groups)), squeeze=False)
    panels = [("answers that are right", share(lambda item: item.right("carried")), True),
              ("first tokens that differ", share(lambda item: item.flip), False),
              ("total variation, mean", average(lambda item: item.tv), False)]
    for row, (title, items) in zip(axes, groups.items()):
        tasks = records.tasks(items)
        for panel, (ylabel, value, needs_label) in zip(row, panels):
            for i, task in enumerate(tasks):
                chosen = records.where(items, task=task)
                if needs_label and not any(item.labelled for item in chosen):
                    continue
                color, marker = LOOKS[i % len(LOOKS)]
                for style, pairs in (("-", [("v0", f"v{k}") for k in range(1, 5)]),
                                     (":", [(f"v{k - 1}", f"v{k}") for k in range(1, 5)])):
                    x, points = [], []
                    for k, (source, target) in enumerate(pairs, 1):
                        cell = records.where(chosen, source=source, target=target)
                        if cell:
                            x.append(k + 0.04 * (i - len(tasks) / 2))
                            points.append(value(cell))
                    if not points:
                        continue
                    y = [p[0] for p in points]
                    errors = [[max(0, p[0] - p[1]) for p in points], [max(0, p[2] - p[0]) for p in points]]
                    panel.errorbar(x, y, yerr=errors if style == "-" else None, color=color, marker=marker, linestyle=style,
                                   capsize=2, elinewidth=0.8, markerfacecolor=color if style == "-" else "white",
                                   label=task if style == "-" else None)
            panel.set_xticks(range(1, 5), [f"v{k}" for k in range(1, 5)])
            panel.set_xlabel("version that reads the cache")
            panel.set_title(f"{title}: {ylabel}" if panel is row[0] else ylabel)
            if panel is not row[2]:
                panel.yaxis.set_major_formatter(PERCENT)
            panel.set_ylim(bottom=0)
        row[2].plot([], [], color=GREY, label="cache of v0")
        row[2].plot([], [], color=GREY, linestyle=":", label="of the version before")
        row[2].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    save(figure, folder, "chain")


def same_first_figure(groups, folder):
    """Of the answers whose first token is the same: how many are still the same after n tokens."""
    figure, axes = plt.subplots(1, len(groups), figsize=(4.6 * len(groups), 3.4), squeeze=False)
    for panel, (title, items) in zip(axes[0], groups.items()):
        for i, task in enumerate(records.tasks(items)):
            chosen = [item for item in records.where(items, task=task) if not item.flip]
            longest = max((len(item.tokens("native")) for item in chosen), default=0)
            if len(chosen) < 8 or longest < 4:
                continue
            x = list(range(1, longest + 1))
            y = [mean([item.same_until >= n or item.same_text for item in chosen]) for n in x]
            color, marker = LOOKS[i % len(LOOKS)]
            panel.plot(x, y, color=color, marker=marker, markersize=3.5, label=f"{task} ({len(chosen)})")
        panel.set_title(title)
        panel.set_xlabel("tokens of the answer")
        panel.set_ylim(0, 1.03)
        panel.yaxis.set_major_formatter(PERCENT)
        panel.legend(loc="best")
    axes[0][0].set_ylabel("still the same text")
    save(figure, folder, "same-first-token")


def ttft_figure(groups, folder):
    figure, axes = plt.subplots(1, len(groups), figsize=(4.2 * len(groups), 3.2), squeeze=False)
    for panel, (title, items) in zip(axes[0], groups.items()):
        cells = records.split(items, "length")
        for look, arm, label in ((LOOKS[0], "native", "computed anew"), (LOOKS[1], "carried", "carried")):
            lengths = sorted(cells)
            panel.plot(lengths, [records.median_ttft(cells[n], arm) for n in lengths], color=look[0], marker=look[1], label=label)
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{1000 * value:g} ms"))
        panel.set_title(title)
        panel.set_xlabel("prefix, tokens")
        panel.legend()
    axes[0][0].set_ylabel("time to first token, median")
    save(figure, folder, "ttft")


def parts_figure(groups, folder):
    """What a part of the cache costs when it alone is carried, and what it brings back when it alone is native."""
    figure, axes = plt.subplots(len(groups), 3, figsize=(11.6, 3.1 * len(groups)), squeeze=False)
    for row, (title, by_task) in zip(axes, groups.items()):
        for i, (task, prompts) in enumerate(by_task.items()):
            color, marker = LOOKS[i % len(LOOKS)]
            names = {kind: [name for name, part in prompts[0].items() if part["kind"] == kind]
                     for kind in ("LAYERS", "POSITIONS")}

            def carried(name):
                values = [parts[name]["carried"]["tv"] for parts in prompts]
                return (mean(values), *bootstrap(values))

            def gain(name):
                return mean([parts["all"]["carried"]["tv"] - parts[name]["native"]["tv"] for parts in prompts])

            for panel, kind in ((row[0], "LAYERS"), (row[1], "POSITIONS")):
                x = [k + 0.05 * (i - 1.5) for k in range(len(names[kind]))]
                points = [carried(name) for name in names[kind]]
                errors = [[max(0, p[0] - p[1]) for p in points], [max(0, p[2] - p[0]) for p in points]]
                panel.errorbar(x, [p[0] for p in points], yerr=errors, color=color, marker=marker, capsize=2, elinewidth=0.8,
                               linewidth=1.2, markersize=4)
                panel.plot(x, [gain(name) for name in names[kind]], color=color, linestyle=":", linewidth=1.2)
            x = [k + 0.18 * (i - (len(by_task) - 1) / 2) for k in range(3)]
            points = [carried(name) for name in ("all", "keys", "values")]
            errors = [[max(0, p[0] - p[1]) for p in points], [max(0, p[2] - p[0]) for p in points]]
            row[2].bar(x, [p[0] for p in points], width=0.17, color=color, yerr=errors, error_kw={"linewidth": 0.8}, capsize=2,
                       label=f"{task} ({len(prompts)})")
        layers = len(names["LAYERS"])
        row[0].set_xticks(range(0, layers, 1 if layers < 10 else 5))
        row[0].set_xlabel("layer, from the bottom")
        row[1].set_xticks(range(len(names["POSITIONS"])), [name.replace(" block", "") for name in names["POSITIONS"]],
                          rotation=30)
        row[1].set_xlabel("position in the prefix; first and last: 16 tokens")
        row[2].set_xticks(range(3), ["all", "keys", "values"])
        row[0].set_title(f"{title}: layers")
        row[1].set_title("positions")
        row[2].set_title("keys and values")
        row[0].set_ylabel("total variation, mean")
        for panel in row:
            panel.set_ylim(bottom=min(0, panel.get_ylim()[0]))
        row[2].plot([], [], color=GREY, marker="o", label="this alone is carried")
        row[2].plot([], [], color=GREY, linestyle=":", label="this alone is native:\nTV falls by")
        row[2].legend(loc="upper left", bbox_to_anchor=(1.02, 1))
    save(figure, folder, "parts")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--from", dest="results", type=pathlib.Path, required=True)
    parser.add_argument("--to", type=pathlib.Path, required=True)
    a = parser.parse_args()
    a.to.mkdir(parents=True, exist_ok=True)
    runs = records.read(a.results)
    demo, smollm2 = runs.get("demo", []), runs.get("smollm2", [])
    if demo:
        lengths_figure(demo, a.to, "demo-lengths", "demo pair")
    if smollm2:
        lengths_figure(smollm2, a.to, "smollm2-lengths", "SmolLM2")
    pairs = {title: items for title, items in (("demo pair", demo), ("SmolLM2", smollm2)) if items}
    if pairs:
        margins_figure(pairs, a.to)
        same_first_figure(pairs, a.to)
        ttft_figure(pairs, a.to)
    chains = {title: runs[name] for title, name in (("demo", "demo-chain"), ("SmolLM2", "smollm2-chain")) if runs.get(name)}
    if chains:
        chain_figure(chains, a.to)
    parts = records.read_parts(a.results)
    groups = {title: parts[name] for title, name in (("demo pair", "demo-parts"), ("SmolLM2", "smollm2-parts")) if name in parts}
    if groups:
        parts_figure(groups, a.to)
    if not runs:
        return
    (a.to / "tables.md").write_text(
        "# All tables of the study\n\nMade by `bench/study/figures.py`; [fidelity.md](../fidelity.md) says what they mean.\n\n"
        + tables.all_tables(runs), encoding="utf-8")


if __name__ == "__main__":
    main()
