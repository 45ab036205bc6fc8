#!/usr/bin/env python3
"""The tables of docs/repairs.md from the runs NAME-repairs of plan.py, as Markdown. Standard library only."""

import argparse
import json
import pathlib
import statistics

import plan
import tables


def mean(values):
    values = [value for value in values if value is not None]
    return sum(values) / len(values) if values else float("nan")


def measures(rows, name):
    """Of one plan over rows of eval.json: each row counts once."""
    tv, kl, flips, right, native_right, speed = [], [], [], [], [], []
    for row in rows:
        arm = next(arm for arm in row["carried"] if arm["plan"] == name)
        one = next(one for one in row["comparisons"] if one["comparison"] == "carried" and one["plan"] == name)
        tv.append(mean(one["positions"]["tv"]))
        kl.append(mean(one["positions"]["kl"]))
        flips.append(one["first_token_flip"])
        if row["native"]["right"] is not None:
            right.append(arm["right"])
            native_right.append(row["native"]["right"])
        speed.append(row["native"]["ttft_s"] / arm["ttft_s"])
    accuracy = f"{100 * mean(right):.0f} % ({100 * mean(native_right):.0f} %)" if right else "–"
    return [tables.number(mean(tv)), tables.number(mean(kl)), f"{100 * mean(flips):.1f} %", accuracy,
            f"{statistics.median(speed):.1f} ×"]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=pathlib.Path, default=pathlib.Path("build/study/results"))
    options = parser.parse_args()
    head = ["plan", "TV", "KL", "first token flips", "right (native)", "TTFT, native ÷ plan"]
    for name, run in plan.RUNS.items():
        (source, target) = run.pairs[0]
        file = options.results / name / f"{source}-{target}" / "eval.json"
        if run.fit is None or not file.exists():
            continue
        rows = [row for row in json.loads(file.read_text(encoding="utf-8"))["items"] if row.get("comparisons")]
        groups = {}
        for row in rows:
            task = run.tasks[int(row["task"].split(".")[1])].name
            kind = "text" if task.startswith("text") else "labelled answers"
            groups.setdefault((row["bucket"], kind), []).append(row)
            groups.setdefault((row["bucket"], task), []).append(row)
        plans = [word for word in run.options if word != "--plan"]
        for (length, group), chosen in sorted(groups.items()):
            print(f"\n{name}, {source} → {target}, {group}, prefix of {length} tokens, {len(chosen)} prompts\n")
            print(tables.table(head, [[f"`{one}`", *measures(chosen, one)] for one in plans]))


if __name__ == "__main__":
    main()
