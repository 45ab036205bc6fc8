#!/usr/bin/env python3
"""Counts the instructions of bench/perf_work's pieces under valgrind and compares them with bench/perf_baseline.json.

A count does not depend on how busy the machine is. Nor does it on the CPU's model: valgrind shows each program the same
CPU, with AVX2 where the real one has it and never AVX-512. It does depend on the compiler, so the file says which one it
was made with.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODEL = ROOT / "models/demo/2026-10"
SLOWER, FASTER, NEW, GONE = "MORE", "fewer", "no baseline", "gone"


class CheckError(Exception):
    """Something that the user should read, without a traceback."""


def command_output(command):
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode != 0:
        raise CheckError(f"{' '.join(map(str, command))} failed:\n{(result.stderr or result.stdout)[-2000:]}")
    return result.stdout


def instructions(program, name, repeats, profile):
    """(instructions of the whole run, what the program says of its CPU and compiler)"""
    said = command_output(["valgrind", "--tool=callgrind", "--quiet", f"--callgrind-out-file={profile}", program, MODEL, name,
                           str(repeats)])
    found = re.search(r"^(?:summary|totals): (\d+)", profile.read_text(encoding="utf-8"), re.MULTILINE)
    if not found:
        raise CheckError(f"valgrind wrote no total into {profile}")
    return int(found[1]), json.loads(said.splitlines()[-1])


def count(program, work, folder):
    """(instructions of a unit, CPU and compiler). Set-up and warm-up are in both runs, so that their difference has neither."""
    stem = work["name"].replace("/", "-").replace("=", "-")
    idle, _ = instructions(program, work["name"], 0, folder / f"{stem}.idle.callgrind")
    busy, machine = instructions(program, work["name"], work["repeats"], folder / f"{stem}.callgrind")
    return round((busy - idle) / (work["repeats"] * work["units"])), machine


def measure(program, folder):
    """{"target", "compiler", "instructions": {name: {"unit", "count"}}}"""
    works = [json.loads(line) for line in command_output([program, "--list", MODEL]).splitlines()]
    folder.mkdir(parents=True, exist_ok=True)
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as threads:
        counted = list(threads.map(lambda work: count(program, work, folder), works))
    return {**counted[0][1], "instructions": {work["name"]: {"unit": work["unit"], "count": number}
                                              for work, (number, _) in zip(works, counted)}}


def compare(found, baseline, percent):
    """[(name, unit, old, new, change in percent, verdict)]; old or new is None where there is none."""
    rows = []
    old, new = baseline["instructions"], found["instructions"]
    for name in [*new, *(name for name in old if name not in new)]:
        if name not in new or name not in old:
            row = (new.get(name) or old.get(name))
            rows.append((name, row["unit"], old.get(name, {}).get("count"), new.get(name, {}).get("count"), None,
                         NEW if name in new else GONE))
            continue
        before, after = old[name]["count"], new[name]["count"]
        change = 100 * (after - before) / before
        verdict = SLOWER if change > percent else FASTER if change < -percent else ""
        rows.append((name, new[name]["unit"], before, after, change, verdict))
    return rows


def table(rows):
    cells = [("work", "a", "baseline", "now", "change", "")]
    for name, unit, before, after, change, verdict in rows:
        cells.append((name, unit, *("-" if value is None else f"{value:,}" for value in (before, after)),
                      "-" if change is None else f"{change:+.1f} %", verdict))
    widths = [max(len(row[i]) for row in cells) for i in range(6)]
    return "\n".join("  ".join(cell.ljust(width) if i in (0, 1, 5) else cell.rjust(width)
                               for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in cells)


def check_machine(found, baseline):
    if found["target"] != baseline["target"]:
        raise CheckError(f"target: the baselines are of {baseline['target']}, and valgrind shows {found['target']} here: the "
                         "SIMD kernels run other code")
    if found["compiler"] != baseline["compiler"]:
        print(f"perf: note: the baselines are of g++ {baseline['compiler']}, this is {found['compiler']}")


def judge(rows, folder):
    """0 or 1, and what to do."""
    verdicts = {row[5] for row in rows}
    if FASTER in verdicts:
        print("perf: some counts fell: keep that with scripts/check --perf --write, or they may rise again unseen")
    if verdicts & {NEW, GONE}:
        print("perf: FAIL  the baselines are of other work: scripts/check --perf --write", file=sys.stderr)
    if SLOWER in verdicts:
        print(f"perf: FAIL  counts rose. Where they are: callgrind_annotate {folder}/NAME.callgrind. When it is worth it, say "
              "why in the change and run scripts/check --perf --write", file=sys.stderr)
    return 1 if verdicts & {NEW, GONE, SLOWER} else 0


def main(arguments, counter=measure):
    parser = argparse.ArgumentParser(prog="bench/perf_check.py", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", type=pathlib.Path, default=ROOT / "build/bin/perf_work", metavar="FILE")
    parser.add_argument("--baseline", type=pathlib.Path, default=ROOT / "bench/perf_baseline.json", metavar="FILE")
    parser.add_argument("--profiles", type=pathlib.Path, default=ROOT / "build/perf", metavar="FOLDER",
                        help="where valgrind's files are left (default: build/perf)")
    parser.add_argument("--percent", type=float, default=3, metavar="P", help="that a count may rise by (default: 3)")
    parser.add_argument("--write", action="store_true", help="make what is counted now the baselines")
    options = parser.parse_args(arguments)
    try:
        found = counter(options.program, options.profiles)
        if not options.write:
            baseline = json.loads(options.baseline.read_text(encoding="utf-8"))
            check_machine(found, baseline)
            rows = compare(found, baseline, options.percent)
            print(table(rows))
            return judge(rows, options.profiles)
        options.baseline.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
        print(f"perf: {len(found['instructions'])} counts written to {options.baseline}")
        return 0
    except (CheckError, OSError, ValueError, KeyError) as error:
        print(f"perf: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
