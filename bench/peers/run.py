#!/usr/bin/env python3
"""carryover beside llama.cpp, OpenVINO GenAI and CTranslate2: same weights, prompts and threads, in one run, taking turns."""

import argparse
import json
import os
import pathlib
import shutil
import signal
import statistics
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/demo"))

import prepare  # noqa: E402  (also in this folder; processes is in bench/demo)
import processes  # noqa: E402

VERSION = "2026-10"
DECODE_TOKENS = 64
SCREENING_RUNS = 1  # of each setting of a peer, after one that does not count, before its best one meets the others
REST_SECONDS = 0.5
PEERS = ("llama.cpp", "OpenVINO", "CTranslate2")
STARTED = time.monotonic()

EXAMPLE = """\
Tokens per second; the last column is ours as a share of the best peer's: above 1, ours is faster. Ours answers over gRPC,
the peers are called in their processes, without a server. For every row each setting of a peer is tried first, and its
best one takes turns with the others. Groups: bf16 (OpenVINO reads the weights as f16 and computes in bf16; CTranslate2
has no bf16 on CPUs and computes the same values in fp32) and int8 (Q8_0, int8), which is left out while the server has no
such weights.

example, on a quiet machine (the first run builds llama.cpp before):
  python3 bench/peers/run.py --json peers.json
one row alone:
  python3 bench/peers/run.py --groups bf16 --prefill 4096 --batches ''
a first look:
  python3 bench/peers/run.py --prefill 128 --batches 2 --context 64 --repeats 1
"""


def say(text):
    print(f"peers: [{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def numbers(lowest, highest):
    def parse(text):
        try:
            values = sorted({int(part) for part in text.split(",") if part})
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers")
        if any(not lowest <= value <= highest for value in values):
            raise argparse.ArgumentTypeError(f"numbers are from {lowest} to {highest}")
        return values
    return parse


def parse(arguments):
    parser = argparse.ArgumentParser(prog="bench/peers/run.py", description=__doc__, epilog=EXAMPLE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models/smollm2", metavar="FOLDER",
                        help=f"a Hugging Face folder, or one with {VERSION} in it (default: models/smollm2)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", metavar="FOLDER",
                        help="where bin/carryover-server is (default: build)")
    parser.add_argument("--prefill", type=numbers(16, 8000), default=[512, 4096], metavar="N,N,...",
                        help="prompt lengths; '' for none (default: 512,4096)")
    parser.add_argument("--batches", type=numbers(1, 64), default=[1, 16], metavar="N,N,...",
                        help="sequences that decode side by side; '' for none (default: 1,16)")
    parser.add_argument("--context", type=int, default=512, metavar="N", help="tokens that they stand behind (default: 512)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="turns a row; 7 or more count (default: 7)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="for each side (default: 2)")
    parser.add_argument("--groups", default="bf16,int8", metavar="G,G", help="of weights (default: bf16,int8)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every number there too")
    options = parser.parse_args(arguments)
    options.groups = options.groups.split(",")
    if not set(options.groups) <= {"bf16", "int8"}:
        parser.error("--groups are bf16 and int8")
    if options.repeats < 1 or options.threads < 1 or not 16 <= options.context <= 8000:
        parser.error("--repeats and --threads are at least 1, --context is from 16 to 8000")
    if not options.prefill and not options.batches:
        parser.error("nothing to measure")
    if (options.model / VERSION).is_dir():
        options.model /= VERSION
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.resolve().parent}")
    return options


def rested(contender, prompts, new_tokens):
    """Waits until the one before sleeps: OpenMP's threads spin for 200 ms after their work."""
    time.sleep(REST_SECONDS)
    return contender.run(prompts, new_tokens)


def take_turns(contenders, inputs, new_tokens, repeats):
    """{contender: [Sample]}; each begins as often as the others, after one run of each that does not count."""
    for contender in contenders:
        rested(contender, inputs[0], new_tokens)
    samples = {contender: [] for contender in contenders}
    for i in range(repeats):
        turn = i % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            samples[contender].append(rested(contender, inputs[i % len(inputs)], new_tokens))
    return samples


def speed(sample, inputs, new_tokens):
    """Tokens per second: of the prompt where only the first token was asked for, else of those after it."""
    if new_tokens == 1:
        return 1000 * len(inputs[0][0]) / sample.first_ms
    return 1000 * len(inputs[0]) * (new_tokens - 1) / sample.rest_ms


def same_first_tokens(ours, theirs):
    pairs = [(a[0], b[0]) for left, right in zip(ours, theirs) for a, b in zip(left.tokens, right.tokens)]
    return sum(a == b for a, b in pairs), len(pairs)


def measure(work, group, ours, peers, inputs, new_tokens, repeats):
    """One row of the result."""
    finalists = []
    screened = {}
    for name in dict.fromkeys(peer.name for peer in peers):
        settings = [peer for peer in peers if peer.name == name]
        tried = take_turns(settings, inputs, new_tokens, SCREENING_RUNS) if len(settings) > 1 else {}
        best = {peer: max(speed(sample, inputs, new_tokens) for sample in samples) for peer, samples in tried.items()}
        finalists.append(max(best, key=best.get) if best else settings[0])
        screened[name] = {peer.setting: round(value, 1) for peer, value in best.items()}
    samples = take_turns([ours] + finalists, inputs, new_tokens, repeats)
    row = {"work": work, "group": group, "sides": {}, "screened": screened}
    for side, taken in samples.items():
        speeds = [speed(sample, inputs, new_tokens) for sample in taken]
        same, count = same_first_tokens(samples[ours], taken)
        # Rounding may part two answers where two tokens are nearly as likely, but not most of them at once.
        if 2 * same < count:
            raise processes.DemoError(f"{work}: {same} of {count} first tokens of {side.name} are ours: these are not the "
                                      "same weights")
        row["sides"][side.name] = {"setting": side.setting, "tokens_per_s": round(statistics.median(speeds), 2),
                                   "all": [round(value, 2) for value in speeds], "same_first_tokens": f"{same}/{count}"}
    best = max((row["sides"][peer.name]["tokens_per_s"], peer.name) for peer in finalists)
    row["best_peer"] = best[1]
    row["ratio"] = round(row["sides"][ours.name]["tokens_per_s"] / best[0], 3)
    say(f"{work}, {group}: " + ", ".join(f"{name} {side['tokens_per_s']:.0f}" for name, side in row["sides"].items()) +
        f" tokens/s; ours / {best[1]} {row['ratio']:.2f}")
    return row


def table(rows):
    cells = [["work", "weights", "ours", *PEERS, "best peer's setting", "ours / best peer"]]
    for row in rows:
        values = [row["sides"].get(name) for name in ("carryover", *PEERS)]
        cells.append([row["work"], row["group"], *(f"{side['tokens_per_s']:,.0f}" if side else "-" for side in values),
                      row["sides"][row["best_peer"]]["setting"], f"{row['ratio']:.2f}"])
    widths = [max(len(row[i]) for row in cells) for i in range(len(cells[0]))]
    lines = ["  ".join(cell.rjust(width) if 2 <= i < 6 else cell.ljust(width)
                       for i, (cell, width) in enumerate(zip(row, widths))).rstrip() for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def peers_of(group, options, places, workers, files):
    """Every peer in every setting worth trying."""
    import sides
    fixed = {"threads": options.threads}
    flash = [(f"flash {'on' if on else 'off'}, ubatch {size}", {"flash": on, "ubatch": size})
             for on in (True, False) for size in (512, 2048)]
    found = [sides.Peer("llama.cpp", f"{kind}, {text}", workers["llama.cpp"], {"model": str(files[kind]), **more, **fixed})
             for kind in (["bf16"] if group == "bf16" else ["q8_0"]) for text, more in flash]
    kind, kv = ("f16", "bf16") if group == "bf16" else ("q8_0", "u8")
    found += [sides.Peer("OpenVINO", f"{kind}, KV {kv}, {size} rows a step", workers["OpenVINO"],
                         {"model": str(files[kind]), "kv": kv, "batch_tokens": size, **fixed}) for size in (256, 512, 4096)]
    kind = "float32" if group == "bf16" else "int8"
    found += [sides.Peer("CTranslate2", f"{kind}, {library}", workers[library],
                         {"model": str(files[f"ct2-{kind}"]), "type": kind, **fixed}) for library in ("oneDNN", "MKL")]
    return found


def inputs_of(stream, count, length, sets):
    """`sets` lists of `count` different windows of the text, each `length` tokens long."""
    if len(stream) < 2 * length:
        raise processes.DemoError(f"the passages give {len(stream)} tokens, {2 * length} are needed")
    step = (len(stream) - length) // max(1, count * sets - 1)
    windows = [stream[i * step:i * step + length] for i in range(count * sets)]
    return [windows[i * count:(i + 1) * count] for i in range(sets)]


def run(options, folder, background, places):
    import cases
    import ours
    import sides
    program = options.build / "bin/carryover-server"
    if not os.access(program, os.X_OK):
        raise processes.DemoError(f"{program} is missing; scripts/build makes it")
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        say(f"other work runs on this machine (load {load_before:.1f}): read the figures as a rough indication")
    server = ours.Server(program, folder, 1 << 30, options.threads)
    background.append(server)
    groups = dict.fromkeys(options.groups)
    loaded = {}
    for group in list(groups):
        precision = next((name for name in server.precisions() if group.upper() in name), None)
        if precision is None:
            say(f"{group}: left out, the server has no such weights")
            del groups[group]
            continue
        loaded[group] = server.load(options.model, group, precision)
    if not groups:
        raise processes.DemoError("no group is left to measure")

    workers = {}
    def start(name, script, environment=()):
        workers[name] = sides.Worker(places.python, ROOT / "bench/peers" / script,
                                     pathlib.Path(folder) / f"{name}.log", environment)
        background.append(workers[name])
        return workers[name].ask({"op": "info"})
    infos = {"llama.cpp": start("llama.cpp", "llama_worker.py", {"LLAMA_CPP_LIB_PATH": str(places.llama)}),
             "OpenVINO": start("OpenVINO", "openvino_worker.py"),
             # It takes MKL only on Intel's processors unless told to.
             "CTranslate2": start("oneDNN", "ct2_worker.py", {"CT2_USE_MKL": "0"})}
    start("MKL", "ct2_worker.py", {"CT2_USE_MKL": "1"})
    prepare.check_build(infos["llama.cpp"]["system_info"])
    for info in infos.values():
        say(f"beside {info['package']}")
    kinds = {"bf16": [("gguf", "bf16"), ("gguf", "f16"), ("ct2", "float32")], "int8": [("gguf", "q8_0"), ("ct2", "int8")]}
    files = {("ct2-" if form == "ct2" else "") + precision: prepare.converted(places, options.model, form, precision, say)
             for group in groups for form, precision in kinds[group]}

    passages = cases.read_passages(ROOT, 1000, 100000)
    stream = server.tokens_of(next(iter(groups)), "\n\n".join(passages))
    rows = []
    for group in groups:
        us = sides.Ours(server, group)
        peers = peers_of(group, options, places, workers, files)
        for length in options.prefill:
            rows.append(measure(f"prefill of {length:,}", group, us, peers, inputs_of(stream, 1, length, 4), 1,
                                options.repeats))
        for batch in options.batches:
            rows.append(measure(f"decode, batch {batch}", group, us, peers, inputs_of(stream, batch, options.context, 1),
                                DECODE_TOKENS + 1, options.repeats))
    return {"rows": rows, "context": options.context, "threads": options.threads, "repeats": options.repeats,
            "ours": {group: {"weights": version.weights_dtype, "kv": version.kv_dtype} for group, version in loaded.items()},
            "peers": infos, "cpu": prepare.cpu()[0], "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
            "seconds": round(time.monotonic() - STARTED)}


def main():
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    background = []
    folder = None
    try:
        places = prepare.environment(ROOT, say)
        prepare.go_on_inside(places, __file__)
        folder = tempfile.mkdtemp(prefix="carryover-peers-")
        result = run(options, folder, background, places)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"\nTokens per second, medians of {options.repeats} turns, {options.threads} threads; decode behind "
              f"{options.context:,} tokens\n{table(result['rows'])}")
        return 0
    except processes.DemoError as error:
        print(f"peers: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\npeers: interrupted", file=sys.stderr)
        return 130
    finally:
        for process in reversed(background):
            process.stop()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
