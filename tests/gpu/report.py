"""Puts a run's results together: one JSON file, and a short table against floors and targets.

    report.py FOLDER      reads steps.jsonl, device.json and torch.json of tests/gpu/run, as far as
                          they are there; writes results.json

Floors are measured in the same run: PyTorch's largest bf16 product, its copy on the device, its copies
from and to pinned memory. docs/performance.md says what each row's bytes and operations are.
"""
import json
import pathlib
import sys


def read(path):
    return json.loads(path.read_text()) if path.exists() else None


def only(table, **fields):
    """The first row that has all these fields, or None."""
    return next((r for r in table if all(r.get(k) == v for k, v in fields.items())), None)


def rate(row, field):
    """Units a second: TFLOP/s of flops, GB/s of bytes."""
    if row is None or not row["ms"]:
        return None
    return row[field] / row["ms"] / (1e9 if field == "flops" else 1e6)


def rows_of_table(ours, torch):
    """(what, ms, measured, floor's unit, share of the floor, target, PyTorch's ms)."""
    matmul = rate(only(torch, bench="square_matmul"), "flops")
    copy = rate(only(torch, bench="device_copy"), "bytes")
    pinned = {way: rate(only(torch, bench=f"pinned_{way}"), "bytes") for way in ("upload", "download")}

    def row(what, r, field, floor, target, theirs=None):
        value = rate(r, field)
        share = value / floor if value is not None and floor else None
        unit = "TFLOP/s" if field == "flops" else "GB/s"
        return (what, r["ms"], f"{value:.1f} {unit}" if value is not None else "", share, target,
                theirs["ms"] if theirs else None)

    table = []
    for r in ours:
        model, bench = r.get("model", ""), r["bench"]
        if bench == "prefill":
            table.append(row(f"prefill {model} {r['rows']}", r, "flops", matmul,
                             0.60 if r["rows"] >= 8192 else None))
        elif bench == "decode":
            table.append(row(f"decode {model} {r['batch']} x {r['context']}", r, "bytes", copy, 0.75))
        elif bench == "divergence":
            table.append(row(f"divergence {r['rows']} x {r['vocab']}", r, "bytes", copy, 0.70))
        elif bench in pinned:
            table.append(row(f"block {bench} {model}", r, "bytes", pinned[bench], 0.85))
        elif bench == "attention":
            theirs = only(torch, bench="attention", model=model, batch=r["batch"], rows=r["rows"],
                          context=r["context"])
            prefill = r["rows"] > 1
            table.append(row(f"attention {model} {r['batch']} x {r['rows']} of {r['context']}", r,
                             "flops" if prefill else "bytes", matmul if prefill else copy, None,
                             theirs))
        elif bench == "matmul" and r["matrix"] == "gate_up":
            theirs = only(torch, bench="matmul", model=model, matrix="gate_up", rows=r["rows"])
            many = r["rows"] >= 1024
            table.append(row(f"matmul {model} gate_up {r['rows']}", r, "flops" if many else "bytes",
                             matmul if many else copy, None, theirs))
    return table


def first_tokens(ours):
    """(model, prefix, native, hit, carried, carried / hit)."""
    lines = []
    for r in ours:
        if r["bench"] != "ttft_native":
            continue
        key = {"model": r["model"], "prefix": r["prefix"]}
        hit, carried = only(ours, bench="ttft_hit", **key), only(ours, bench="ttft_carried", **key)
        if hit and carried:
            lines.append((r["model"], r["prefix"], r["ms"], hit["ms"], carried["ms"],
                          carried["ms"] / hit["ms"]))
    return lines


def number(value, digits=3):
    return "" if value is None else f"{value:.{digits}g}" if value < 1000 else f"{value:.0f}"


def main():
    folder = pathlib.Path(sys.argv[1])
    device, torch = read(folder / "device.json"), read(folder / "torch.json")
    steps_file = folder / "steps.jsonl"
    steps = [json.loads(s) for s in steps_file.read_text().splitlines()] if steps_file.exists() else []
    ours = device["rows"] if device else []
    table = rows_of_table(ours, torch["rows"] if torch else [])
    lines = first_tokens(ours)
    (folder / "results.json").write_text(json.dumps(
        {"steps": steps, "device": device, "torch": torch,
         "table": [dict(zip(("what", "ms", "rate", "share_of_floor", "target", "torch_ms"), t))
                   for t in table],
         "first_tokens": [dict(zip(("model", "prefix", "native_ms", "hit_ms", "carried_ms",
                                    "carried_over_hit"), t)) for t in lines]}, indent=1))

    names = [r["device"] for r in (device, torch) if r]
    print(f"ours on {names[0]}, PyTorch on {names[-1]}" if device and torch else
          f"on {', '.join(names) or 'nothing'}")
    for s in steps:
        print(f"{s['step']:12} {s['result']:12} {s['seconds']:4} s  {s['last']}")
    if table:
        print(f"\n{'what':44} {'ms':>8} {'rate':>15} {'of floor':>8} {'target':>7} {'PyTorch ms':>10}")
    for what, ms, value, share, target, theirs in table:
        share_text = "" if share is None else f"{100 * share:.0f} %"
        goal = "" if target is None else f"{100 * target:.0f} %"
        if share is not None and target is not None and share < target:
            goal += " !"
        print(f"{what:44} {number(ms):>8} {value:>15} {share_text:>8} {goal:>7} {number(theirs):>10}")
    if lines:
        print(f"\n{'first token, ms':24} {'prefix':>7} {'native':>8} {'hit':>8} {'carried':>8} "
              f"{'carried / hit':>13} (target 1.02)")
    for model, prefix, native, hit, carried, ratio in lines:
        print(f"{model:24} {prefix:7} {number(native):>8} {number(hit):>8} {number(carried):>8} "
              f"{ratio:13.3f}{' !' if ratio > 1.02 else ''}")


if __name__ == "__main__":
    main()
