#!/usr/bin/env python3
"""carryover beside llama.cpp: same weights, same prompts, same threads, in one run, taking turns."""

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

import cases  # noqa: E402  (these five are in bench/demo and here)
import measure  # noqa: E402
import prepare  # noqa: E402
import processes  # noqa: E402
import sides  # noqa: E402

MODEL, VERSION = "smollm2", "2026-10"
DECODE_TOKENS = 64
SCREENING_RUNS = 2  # of each of llama.cpp's settings, before the best two meet us
FINALISTS = 2
UBATCHES = (512, 1024, 2048)
STARTED = time.monotonic()

EXAMPLE = """\
The last column is the speed of ours as a share of the best peer's: above 1, ours is faster. Ours is what a client sees
over gRPC; llama.cpp is called in its process, without a server. At every length each of llama.cpp's settings (precision,
flash attention, ubatch) is tried first, and its best two take turns with us; the better one counts.

example, on a quiet machine (about 15 minutes; the first run builds llama.cpp before):
  python3 bench/peers/run.py --json peers.json
a first look:
  python3 bench/peers/run.py --prefill 512 --decode 128 --repeats 3 --precisions bf16
"""


def say(text):
    print(f"peers: [{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def numbers(text):
    try:
        values = sorted({int(part) for part in text.split(",") if part})
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a list of numbers")
    if any(not 16 <= value <= 8000 for value in values):
        raise argparse.ArgumentTypeError("lengths are from 16 to 8000")
    return values


def precisions(text):
    values = text.split(",")
    if not values or any(value not in ("bf16", "f16", "f32") for value in values):
        raise argparse.ArgumentTypeError("precisions are bf16, f16 and f32")
    return values


def parse(arguments):
    parser = argparse.ArgumentParser(prog="bench/peers/run.py", description=__doc__, epilog=EXAMPLE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models/smollm2", metavar="FOLDER",
                        help=f"a Hugging Face folder, or one with {VERSION} in it (default: models/smollm2)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", metavar="FOLDER",
                        help="where bin/carryover-server is (default: build)")
    parser.add_argument("--prefill", type=numbers, default=[128, 256, 512, 1024, 2048, 4096], metavar="N,N,...",
                        help="prompt lengths; '' for none (default: 128 to 4096, doubling)")
    parser.add_argument("--decode", type=numbers, default=[128, 1024], metavar="N,N,...",
                        help="contexts to decode behind, batch 1; '' for none (default: 128,1024)")
    parser.add_argument("--repeats", type=int, default=7, metavar="N", help="turns a value; 7 or more count (default: 7)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="for each side (default: 2)")
    parser.add_argument("--precisions", type=precisions, default=["bf16", "f16"], metavar="P,P",
                        help="of llama.cpp's weights: bf16, f16, f32; the faster one counts (default: bf16,f16)")
    parser.add_argument("--weights", choices=["auto", "bf16", "fp32"], default="auto", help="of ours (default: auto)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every number there too")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.threads < 1:
        parser.error("--repeats and --threads are at least 1")
    if not options.prefill and not options.decode:
        parser.error("nothing to measure")
    if (options.model / VERSION).is_dir():
        options.model /= VERSION
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.resolve().parent}")
    return options


def settings_for(options, tokens):
    """llama.cpp's settings worth trying: a ubatch beyond the prompt changes nothing."""
    ubatches = [size for size in UBATCHES if size < 2 * tokens] or UBATCHES[:1]
    return [sides.Setting(precision, flash, size) for precision in options.precisions for flash in (True, False)
            for size in ubatches]


def take_turns(contenders, prompts, new_tokens, repeats):
    """{contender: [Sample]}; each begins as often as the others, after one run of each that does not count."""
    for contender in contenders:
        contender.run(prompts[0], new_tokens)
    samples = {contender: [] for contender in contenders}
    for i in range(repeats):
        turn = i % len(contenders)
        for contender in contenders[turn:] + contenders[:turn]:
            samples[contender].append(contender.run(prompts[i % len(prompts)], new_tokens))
    return samples


def compare(ours, worker, settings, prompts, new_tokens, repeats, time_of):
    """Screens llama.cpp's settings, then lets its best meet ours. Returns (ours, best peer, samples, screened)."""
    peers = [sides.Llama(worker, setting) for setting in settings]
    tried = take_turns(peers, prompts, new_tokens, SCREENING_RUNS)
    fastest = {peer: min(map(time_of, tried[peer])) for peer in peers}
    finalists = sorted(peers, key=fastest.get)[:FINALISTS]
    samples = take_turns([ours] + finalists, prompts, new_tokens, repeats)
    best = min(finalists, key=lambda peer: statistics.median(map(time_of, samples[peer])))
    return best, samples, {peer.name: round(fastest[peer], 3) for peer in peers}


def spread(values):
    return [round(measure.quantile(values, share), 3) for share in (0.25, 0.5, 0.75)]


def shared_tokens(left, right):
    """How many tokens two answers begin with alike."""
    return next((i for i, (a, b) in enumerate(zip(left, right)) if a != b), min(len(left), len(right)))


def check_same_model(ours, best, samples, length):
    same = [shared_tokens(a.tokens, b.tokens) for a, b in zip(samples[ours], samples[best])]
    # Rounding may part two answers where two tokens are nearly as likely, but not most of them at once.
    if 2 * sum(count > 0 for count in same) < len(same):
        raise processes.DemoError(f"at {length} tokens the first tokens differ: these are not the same weights")
    return same


def measure_prefill(options, ours, worker, documents):
    rows = []
    for length in options.prefill:
        prompts = [document[:length] for document in documents]
        best, samples, screened = compare(ours, worker, settings_for(options, length), prompts, 1, options.repeats,
                                          lambda sample: sample.first_ms)
        same = check_same_model(ours, best, samples, length)
        mine, theirs = (spread([sample.first_ms for sample in samples[side]]) for side in (ours, best))
        rows.append({"tokens": length, "ours_ms": mine[1],
                     "ours_engine_ms": spread([sample.engine_ms for sample in samples[ours]])[1], "peer_ms": theirs[1],
                     "peer_setting": best.name, "ratio": round(theirs[1] / mine[1], 3), "ours_quartiles_ms": mine,
                     "peer_quartiles_ms": theirs, "screened_ms": screened,
                     "same_first_token": f"{sum(count > 0 for count in same)}/{len(same)}"})
        say(f"prefill of {length}: ours {mine[1]:.0f} ms, llama.cpp {theirs[1]:.0f} ms ({best.name}), ratio {rows[-1]['ratio']}")
    return rows


def measure_decode(options, ours, worker, documents):
    rows = []
    for length in options.decode:
        prompts = [document[:length] for document in documents]
        best, samples, screened = compare(ours, worker, settings_for(options, 1), prompts, DECODE_TOKENS + 1,
                                          options.repeats, lambda sample: sample.rest_ms)
        same = check_same_model(ours, best, samples, length)
        mine, theirs = (spread([1000 * DECODE_TOKENS / sample.rest_ms for sample in samples[side]]) for side in (ours, best))
        rows.append({"context": length, "ours_tokens_per_s": mine[1], "peer_tokens_per_s": theirs[1],
                     "peer_setting": best.name, "ratio": round(mine[1] / theirs[1], 3), "ours_quartiles": mine,
                     "peer_quartiles": theirs, "screened_ms": screened, "shared_tokens": statistics.median(same)})
        say(f"decode behind {length}: ours {mine[1]:.1f}, llama.cpp {theirs[1]:.1f} tokens/s ({best.name}), ratio "
            f"{rows[-1]['ratio']}")
    return rows


def table(headings, rows):
    cells = [headings] + rows
    widths = [max(len(row[i]) for row in cells) for i in range(len(headings))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths)) for row in cells]
    return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:]])


def tables(result):
    parts = []
    if result["prefill"]:
        parts.append("Time to first token of a cold prompt, median ms\n" + table(
            ["tokens", "ours, over gRPC", "of it engine", "llama.cpp", "its best setting", "same first token",
             "ours ÷ best peer"],
            [[f"{row['tokens']:,}", f"{row['ours_ms']:.1f}", f"{row['ours_engine_ms']:.1f}", f"{row['peer_ms']:.1f}",
              row["peer_setting"], row["same_first_token"], f"{row['ratio']:.2f}"] for row in result["prefill"]]))
    if result["decode"]:
        parts.append(f"Decode at batch 1, median tokens/s over {DECODE_TOKENS} tokens\n" + table(
            ["context", "ours, over gRPC", "llama.cpp", "its best setting", f"alike of {DECODE_TOKENS + 1}",
             "ours ÷ best peer"],
            [[f"{row['context']:,}", f"{row['ours_tokens_per_s']:.1f}", f"{row['peer_tokens_per_s']:.1f}",
              row["peer_setting"], f"{row['shared_tokens']:g}", f"{row['ratio']:.2f}"] for row in result["decode"]]))
    return "\n\n".join(parts)


def run(options, folder, background):
    server_program, client_program = (str(options.build / "bin" / name) for name in ("carryover-server", "carryover"))
    for program in (server_program, client_program):
        if not os.access(program, os.X_OK):
            raise processes.DemoError(f"{program} is missing; scripts/build makes it")
    python = prepare.environment(ROOT, say)
    files = prepare.gguf_files(ROOT, python, options.model, options.precisions, say)
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        say(f"other work runs on this machine (load {load_before:.1f}): read the figures as a rough indication")

    longest = max(options.prefill + options.decode)
    worker = sides.Worker(python, ROOT / "bench/peers/llama_worker.py", pathlib.Path(folder) / "llama.log", files,
                          longest + DECODE_TOKENS + 64, options.threads)
    background.append(worker)
    peer = worker.ask({"op": "info"})
    prepare.check_build(peer["system_info"])
    say(f"{peer['package']}: {peer['system_info']}")

    server, completions, admin, http = processes.start_server(server_program, folder, 1 << 30, options.threads)
    background.append(server)
    client = processes.Client(client_program, completions, admin, server)
    processes.wait_for_http(server, f"http://{http}/healthz")
    loaded = client.call("load", "--model", MODEL, "--version", VERSION, "--path", str(options.model.resolve()),
                         *([] if options.weights == "auto" else ["--weights", options.weights]), show_progress=True)
    model = cases.known_models(ROOT)[MODEL]
    model.prefix_lengths = [longest]
    documents = cases.make_documents(ROOT, model, lambda text: client.tokenize(MODEL, VERSION, text))
    ours = sides.Ours(client, MODEL)
    say(f"ours: weights {loaded['weights_dtype']}, KV {loaded['kv_dtype']}; llama.cpp: weights "
        f"{' or '.join(options.precisions)}, KV f16; {options.threads} threads each, {options.repeats} turns a value")
    return {"prefill": measure_prefill(options, ours, worker, documents),
            "decode": measure_decode(options, ours, worker, documents),
            "ours": {"weights": loaded["weights_dtype"], "kv": loaded["kv_dtype"]}, "peer": {**peer, "kv": "f16"},
            "threads": options.threads, "repeats": options.repeats, "cpu": prepare.cpu()[0],
            "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
            "seconds": round(time.monotonic() - STARTED)}


def main():
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = tempfile.mkdtemp(prefix="carryover-peers-")
    background = []
    try:
        result = run(options, folder, background)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"\n{tables(result)}")
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
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
