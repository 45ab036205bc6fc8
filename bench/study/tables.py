"""The tables of docs/fidelity.md, as Markdown, from records.Item lists."""

import records
from intervals import area_under_curve, mcnemar, mean, quantile, wilson

NAMES = {"demo": "demo pair", "smollm2": "SmolLM2", "demo-chain": "demo chain", "smollm2-chain": "SmolLM2 chain"}


def table(head, rows):
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return "\n".join(lines + ["| " + " | ".join(str(cell) for cell in row) + " |" for row in rows])


def percent(hits, n):
    return f"{100 * hits / n:.1f} %" if n else "–"


def with_interval(hits, n):
    if not n:
        return "–"
    low, high = wilson(hits, n)
    return f"{100 * hits / n:.1f} % ({100 * low:.0f}–{100 * high:.0f})"


def number(value):
    return "–" if value != value else f"{value:.3f}" if value < 10 else f"{value:.1f}"


def cells(items):
    """(task, length, items), in order."""
    for task in records.tasks(items):
        for length, chosen in sorted(records.split(records.where(items, task=task), "length").items()):
            yield task, length, chosen


def utility(items):
    rows = []
    for task, length, chosen in cells([item for item in items if item.labelled]):
        n = len(chosen)
        right = {arm: sum(item.right(arm) for item in chosen) for arm in ("source", "native", "carried")}
        lost = sum(item.right("native") and not item.right("carried") for item in chosen)
        gained = sum(item.right("carried") and not item.right("native") for item in chosen)
        rows.append([task, length, n, percent(right["source"], n), percent(right["native"], n),
                     with_interval(right["carried"], n), lost, gained, f"{mcnemar(lost, gained):.2g}"])
    return table(["task", "prefix", "items", "S native", "T native", "T carried (95 %)", "right → wrong", "wrong → right",
                  "McNemar p"], rows)


def behaviour_row(chosen):
    n = len(chosen)
    old = [item for item in chosen if item.old is not None]
    kl, old_kl = mean([item.kl for item in chosen]), mean([item.old["kl"] for item in old])
    return [n, with_interval(sum(item.flip for item in chosen), n), percent(sum(item.old["flip"] for item in old), len(old)),
            number(mean([item.first["tv"] for item in chosen if item.first])), number(mean([item.tv for item in chosen])),
            number(quantile([item.kl for item in chosen], 0.5)), number(kl),
            number(old_kl), percent(old_kl - kl, old_kl) if old_kl > 0 else "–",
            percent(sum(bool(item.stop_disagreement) for item in chosen), n)]


BEHAVIOUR = ["items", "first token differs (95 %)", "S natively differs", "TV, first token", "TV, mean",
             "KL, median", "KL, mean", "KL(T‖S), mean", "recovered", "stops elsewhere"]


def behaviour(items):
    return table(["task", "prefix", *BEHAVIOUR], [[task, length, *behaviour_row(chosen)] for task, length, chosen in cells(items)])


def same_first(items):
    rows = []
    for task in records.tasks(items):
        chosen = [item for item in records.where(items, task=task) if not item.flip]
        longer = [item for item in chosen if len(item.tokens("native")) > 1]
        if not longer:
            continue
        changed = [item for item in longer if not item.same_text]
        both = [item for item in changed if item.labelled]
        rows.append([task, len(longer), percent(sum(item.same_text for item in longer), len(longer)),
                     percent(sum(not item.stop_disagreement for item in longer), len(longer)),
                     percent(sum(item.finish("native") == item.finish("carried") for item in longer), len(longer)),
                     percent(sum(item.right("native") != item.right("carried") for item in both), len(longer)) if both else "–",
                     f"{quantile([item.same_until for item in changed], 0.5):.0f}" if changed else "–"])
    return table(["task", "items with the same first token", "same answer", "would stop alike (forced)", "ended alike (free)",
                  "and one is right, one wrong", "parted after, tokens (median)"], rows)


def margins(items):
    rows = []
    for task in records.tasks(items):
        chosen = [item for item in records.where(items, task=task) if item.first]
        flips = [item.first["native_margin"] for item in chosen if item.flip]
        kept = [item.first["native_margin"] for item in chosen if not item.flip]
        fragile = [item for item in chosen if item.first["fragile"]]
        rows.append([task, len(chosen), f"{quantile(kept, 0.5):.2f}" if kept else "–", f"{quantile(flips, 0.5):.2f}" if flips else "–",
                     f"{area_under_curve(kept, flips):.2f}" if kept and flips else "–", percent(len(fragile), len(chosen)),
                     percent(sum(item.flip for item in fragile), len(fragile)),
                     f"{quantile([abs(item.first['carried_margin'] - item.first['native_margin']) for item in chosen], 0.5):.2f}"])
    return table(["task", "items", "native margin, first token kept (median)", "native margin, flipped (median)", "AUC", "fragile",
                  "flips among the fragile", "shift of the margin (median)"], rows)


def times(items):
    rows = []
    for length, chosen in sorted(records.split(items, "length").items()):
        native, carried = (records.median_ttft(chosen, arm) for arm in ("native", "carried"))
        rows.append([length, len(chosen), f"{1000 * native:.1f} ms", f"{1000 * carried:.1f} ms", f"{native / carried:.1f}×"])
    return table(["prefix", "items", "T native", "T carried", "faster"], rows)


def chain(items):
    rows = []
    for task in records.tasks(items):
        for length, of_length in sorted(records.split(records.where(items, task=task), "length").items()):
            pairs = sorted(records.pairs(of_length), key=lambda pair: (pair[0] != "v0", pair[1]))
            for source, target in pairs:
                chosen = records.where(of_length, source=source, target=target)
                n = len(chosen)
                right = [percent(sum(item.right(arm) for item in chosen), n) if chosen[0].labelled else "–"
                         for arm in ("native", "carried")]
                rows.append([task, length, f"{source} → {target}", *behaviour_row(chosen)[:1], *right, *behaviour_row(chosen)[1:]])
    return table(["task", "prefix", "cache → reader", "items", "T native right", "T carried right", *BEHAVIOUR[1:]], rows)


def controls(runs):
    """Native twice, cut into other chunks: what the same comparison says where nothing was carried."""
    rows = []
    for name, items in runs.items():
        chosen = [item.control for item in items if item.control is not None]
        if chosen:
            rows.append([NAMES[name], len(chosen), sum(item["flip"] for item in chosen),
                         *(f"{max(item[measure] for item in chosen):.1e}" for measure in ("tv", "kl"))])
    return table(["run", "items computed natively twice", "first token differs", "TV, largest", "KL, largest"], rows)


def all_tables(runs):
    out = [f"### The noise floor\n\n{controls(runs)}\n"]
    for name in ("demo", "smollm2"):
        if runs.get(name):
            for title, make in (("Utility", utility), ("Fidelity", behaviour), ("The same first token", same_first),
                                ("Margins", margins), ("Time to first token", times)):
                out.append(f"### {NAMES[name]}: {title}\n\n{make(runs[name])}\n")
    for name in ("demo-chain", "smollm2-chain"):
        if runs.get(name):
            out.append(f"### {NAMES[name]}\n\n{chain(runs[name])}\n")
    return "\n".join(out)
