#!/usr/bin/env python3
"""What comparing costs users: the same open-loop load with and without 10 % shadows, in turns. Standard library only."""

import argparse
import json
import os
import pathlib
import signal
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/demo"))

import figures  # noqa: E402
import processes  # noqa: E402  (bench/demo)
import servers  # noqa: E402

STARTED = time.monotonic()

HELP = """\
Two servers run on this machine, with --rate-of-shadows of the requests compared and with none. Both hold the same weights
twice, as source and target under different fingerprints, so that no gate moves while time is measured. Prefixes are in the
source's cache. Each request has one of them and a suffix of its own, and nothing of it is kept, so that the last request
finds what the first one found.

direction native:  the gate learns: the target computes natively, and shadows are the carried arm.
direction carried: an operator opened the gate: requests are carried, and shadows are native prefills.

First the capacity of each direction: requests a second of a closed loop without shadows. Then rounds at each load, a share
of that capacity: Poisson arrivals, the same in all three runs of a round: without, with, without. What a percentile is with
shadows is told as a ratio to the mean of its two neighbours; the ratio of those two is the noise. A verdict holds the
median ratio of the rounds against 1.05, and p99 also against one background layer more.

examples:
  bench/shadows/run.py --json shadows.json                              the demo pair, about 20 minutes
  bench/shadows/run.py --model smollm2 --json shadows_smollm2.json      SmolLM2-135M, about 25 minutes
  bench/shadows/run.py --quick                                          a look, about 2 minutes
"""


def say(text):
    print(f"shadows: [{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def numbers(text):
    return [float(part) for part in text.split(",")]


def parse(arguments):
    parser = argparse.ArgumentParser(prog="bench/shadows/run.py", description=__doc__, epilog=HELP,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=sorted(servers.WORKLOADS), default="demo")
    parser.add_argument("--folder", type=pathlib.Path, help="of the model's weights (default: under models/)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("shadows.json"), metavar="FILE",
                        help="where the figures go, after each round (default: shadows.json)")
    parser.add_argument("--loads", type=numbers, default=[0.5, 0.8, 1.5], metavar="X,X,...",
                        help="shares of the capacity (default: 0.5,0.8,1.5)")
    parser.add_argument("--directions", default="native,carried", help="native, carried or both (default: both)")
    parser.add_argument("--rounds", type=int, metavar="N", help="at each load (default: 5, smollm2 3)")
    parser.add_argument("--seconds", type=float, metavar="X", help="of a run (default: 12, smollm2 40)")
    parser.add_argument("--rate-of-shadows", type=float, default=0.1, metavar="P",
                        help="share of requests that are compared (default: 0.1)")
    parser.add_argument("--fidelity", default="", metavar="FIELDS",
                        help="more of FidelityConfig for the server with shadows, as 'time_share: 0'")
    parser.add_argument("--quick", action="store_true", help="2 rounds of 4 seconds")
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "build/bin", metavar="FOLDER")
    parser.add_argument("--keep", action="store_true", help="keep the folder with configurations and logs")
    options = parser.parse_args(arguments)
    work = servers.WORKLOADS[options.model]
    work.folder = options.folder or work.folder
    if not (work.folder / "config.json").exists():
        parser.error(f"there is no model in {work.folder}; models/fetch_smollm2 fetches SmolLM2")
    options.rounds = options.rounds or (2 if options.quick else work.rounds)
    options.seconds = options.seconds or (4 if options.quick else work.seconds)
    options.directions = options.directions.split(",")
    if not set(options.directions) <= {"native", "carried"}:
        parser.error("--directions takes native and carried")
    if options.rounds < 1 or options.seconds <= 0 or min(options.loads) <= 0:
        parser.error("--rounds, --seconds and --loads are above 0")
    return options


def measure_load(options, pair, direction, load, capacity, report, layer_ms):
    rate = load * capacity
    requests = max(20, round(rate * options.seconds))
    rounds = []
    for number in range(options.rounds):
        seed = 1000 * number + round(100 * load)
        runs = []
        for name in ("off", "on", "off"):
            server = pair[name]
            server.warm(seed)
            runs.append(server.open_loop(seed, rate, requests))
        rounds.append(runs)
        row = figures.sum_up(direction, load, rate, requests, rounds, layer_ms)
        report["rows"] = [old for old in report["rows"]
                          if (old["direction"], old["load"]) != (direction, load)] + [row]
        options.json.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        say(f"{direction}, {load:g} x capacity, round {number + 1} of {options.rounds}: {figures.in_short(row)}")


def run(options, folder, background):
    work = servers.WORKLOADS[options.model]
    pair = {}
    for name, rate in (("off", 0.0), ("on", options.rate_of_shadows)):
        pair[name] = servers.Server(work, name, rate, options, folder, background)
    report = {"model": options.model, "rate_of_shadows": options.rate_of_shadows, "fidelity": options.fidelity,
              "seconds_a_run": options.seconds, "workload": work.describe(), "machine": servers.machine(ROOT),
              "capacity": {}, "rows": []}
    layer_ms = report["background_layer_ms"] = pair["off"].background_layer_ms()
    say(f"a background layer of 128 tokens takes about {layer_ms:.2f} ms")
    for direction in options.directions:
        for server in pair.values():
            server.turn(direction)
        capacity = report["capacity"][direction] = pair["off"].capacity(options.seconds)
        say(f"{direction}: capacity is {capacity:.1f} requests/s")
        for load in options.loads:
            measure_load(options, pair, direction, load, capacity, report, layer_ms)
    return report


def main():
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    background = []
    with tempfile.TemporaryDirectory(prefix="carryover-shadows-") as folder:
        if options.keep:
            folder = tempfile.mkdtemp(prefix="carryover-shadows-")
        try:
            report = run(options, folder, background)
        except processes.DemoError as error:
            print(f"shadows: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            return 130
        finally:
            for process in background:
                process.stop()
            if options.keep:
                say(f"configurations and logs are in {folder}")
    print()
    print(figures.table(report))
    print()
    say(f"wrote {options.json}; load average at the start {report['machine']['load_average']}, now {os.getloadavg()[0]:.2f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
