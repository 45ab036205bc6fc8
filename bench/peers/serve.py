#!/usr/bin/env python3
"""carryover-server beside llama-server and vLLM under the same load: many clients whose prompts share prefixes, taking turns."""

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
PEERS = ["llama-server", "vllm"]
KV_CACHE_GIB = 2  # ours and vLLM's; llama-server's slots hold less
REST_SECONDS = 0.5  # threads of OpenMP spin for a while after their last work
STARTED = time.monotonic()

EXAMPLE = """\
Each client sends its next request when the last one has ended. All servers run, one has work. Every turn is the same
requests for all, with suffixes that none has met; a run before the first turn fills the prefix caches and does not
count. Ours answers over gRPC, the others over HTTP, all streamed to the same clients.

example, on a quiet machine (the first run builds llama.cpp and installs vLLM, 6.3 GB, before):
  python3 bench/peers/serve.py --json serve.json
a first look:
  python3 bench/peers/serve.py --clients 2 --prefix 128 --requests 4 --tokens 8 --turns 1 --peers llama-server
"""


def say(text):
    print(f"serve: [{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def parse(arguments):
    parser = argparse.ArgumentParser(prog="bench/peers/serve.py", description=__doc__, epilog=EXAMPLE,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models/smollm2", metavar="FOLDER",
                        help=f"a Hugging Face folder, or one with {VERSION} in it (default: models/smollm2)")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build", metavar="FOLDER",
                        help="where bin/carryover-server is (default: build)")
    counts = {"clients": (16, "at once"), "prefixes": (4, "that the prompts share"), "prefix": (2048, "tokens of each"),
              "suffix": (32, "tokens of a prompt's own"), "tokens": (64, "of an answer"), "requests": (64, "a turn"),
              "turns": (5, "of each server"), "threads": (2, "of each server")}
    for name, (value, what) in counts.items():
        parser.add_argument(f"--{name}", type=int, default=value, metavar="N", help=f"{what} (default: {value})")
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=PEERS, help="(default: both)")
    parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write every number there too")
    options = parser.parse_args(arguments)
    for name in counts:
        if getattr(options, name) < 1:
            parser.error(f"--{name} is at least 1")
    if (options.model / VERSION).is_dir():
        options.model /= VERSION
    if options.json and not options.json.resolve().parent.is_dir():
        parser.error(f"there is no folder {options.json.resolve().parent}")
    return options


class Prompts:
    """Prefixes, and suffixes that never come again. Windows of one text."""

    def __init__(self, stream, options):
        self.stream, self.options, self.given = stream, options, 0
        self.step = max(1, (len(stream) - options.prefix) // options.prefixes)
        wanted = options.requests * (options.turns + 1)
        if len(stream) < options.prefix + options.suffix or wanted > len(stream) - options.suffix:
            raise processes.DemoError(f"the passages give {len(stream)} tokens, too few for {wanted} suffixes behind prefixes "
                                      f"of {options.prefix}")

    def turn(self):
        found = []
        for i in range(self.options.requests):
            begin = (i % self.options.prefixes) * self.step
            # A stride that meets each place once before it meets one again.
            at = self.given * 7919 % (len(self.stream) - self.options.suffix)
            self.given += 1
            found.append(self.stream[begin:begin + self.options.prefix] + self.stream[at:at + self.options.suffix])
        return found


def sum_up(turns):
    return {"output_tokens_per_s": round(statistics.median(turn.output_tokens_per_s for turn in turns), 2),
            "ttft_p50_ms": round(statistics.median(turn.ttft(0.5) for turn in turns), 2),
            "ttft_p99_ms": round(statistics.median(turn.ttft(0.99) for turn in turns), 2),
            "turns": [{"output_tokens_per_s": round(turn.output_tokens_per_s, 2), "ttft_p50_ms": round(turn.ttft(0.5), 2),
                       "ttft_p99_ms": round(turn.ttft(0.99), 2)} for turn in turns]}


def ratios(ours, peer):
    """Above 1, ours is better."""
    return {"output_tokens_per_s": round(ours["output_tokens_per_s"] / peer["output_tokens_per_s"], 3),
            **{name: round(peer[name] / ours[name], 3) for name in ("ttft_p50_ms", "ttft_p99_ms")}}


def table(result):
    names = [name for name in ("carryover", *PEERS) if name in result]
    lines = [f"{'':18}" + "".join(f"{name:>14}" for name in names) + "".join(f"{'ours to ' + name:>22}" for name in names[1:])]
    for key, text in (("output_tokens_per_s", "output tokens/s"), ("ttft_p50_ms", "TTFT p50, ms"), ("ttft_p99_ms", "TTFT p99, ms")):
        lines.append(f"{text:18}" + "".join(f"{result[name][key]:>14,.1f}" for name in names) +
                     "".join(f"{result['ratios'][name][key]:>21.2f}×" for name in names[1:]))
    return "\n".join(lines)


def same_first_tokens(turns, asked):
    """{peer: how many first tokens are ours}. Other weights would make the comparison worthless."""
    found = {}
    for name in turns.keys() - {"carryover"}:
        pairs = zip(turns["carryover"], turns[name])
        found[name] = sum(a[0] == b[0] for ours, theirs in pairs for a, b in zip(ours.answers, theirs.answers))
        if 2 * found[name] < asked:
            raise processes.DemoError(f"{found[name]} of {asked} first tokens of {name} are ours: these are not the same weights")
    return found


def run(options, folder, background, places):
    import cases
    import load
    import ours
    from llama_server import LlamaServer
    from vllm_server import VllmServer
    program = options.build / "bin/carryover-server"
    if not os.access(program, os.X_OK):
        raise processes.DemoError(f"{program} is missing; scripts/build makes it")
    load_before = os.getloadavg()[0]
    if load_before > 0.5:
        say(f"other work runs on this machine (load {load_before:.1f}): read the figures as a rough indication")
    server = ours.Server(program, folder, KV_CACHE_GIB << 30, options.threads)
    background.append(server)
    server.load(options.model, VERSION, "BF16")
    sides = [ours.Streams(server, VERSION)]
    # 256 more than needed: llama-server rounds a slot's length.
    slot = options.prefix + options.suffix + options.tokens + 256
    if "llama-server" in options.peers:
        gguf = prepare.converted(places, options.model, "gguf", "bf16", say)
        sides.append(LlamaServer(places, gguf, folder, options.clients, slot, options.threads))
        background.append(sides[-1])
    if "vllm" in options.peers:
        prepare.install_vllm(places, say)
        say("vllm compiles the model")
        sides.append(VllmServer(places, options.model, folder, options.clients, slot, options.threads, KV_CACHE_GIB))
        background.append(sides[-1])
    prompts = Prompts(server.tokens_of(VERSION, "\n\n".join(cases.read_passages(ROOT, 1000, 100000))), options)

    filling = prompts.turn()
    for side in sides:
        taken = load.run(side, filling, options.clients, options.tokens)
        say(f"{side.name}: caches are filled, {taken.output_tokens_per_s:.0f} tokens/s")
    turns = {side.name: [] for side in sides}
    for turn in range(options.turns):
        asked = prompts.turn()
        # Whoever begins changes, and so does who goes before whom.
        order = sides[turn % len(sides):] + sides[:turn % len(sides)]
        for side in order if turn % 2 == 0 else order[::-1]:
            time.sleep(REST_SECONDS)
            turns[side.name].append(load.run(side, asked, options.clients, options.tokens))
            say(f"turn {turn + 1}: {side.name} {turns[side.name][-1].output_tokens_per_s:.0f} tokens/s")
    found = {name: sum_up(taken) for name, taken in turns.items()}
    return {**found, "ratios": {name: ratios(found["carryover"], found[name]) for name in options.peers},
            "same_first_tokens": {"asked": options.requests * options.turns,
                                  **same_first_tokens(turns, options.requests * options.turns)},
            "load": {name: getattr(options, name) for name in
                     ("clients", "prefixes", "prefix", "suffix", "tokens", "requests", "turns", "threads")},
            "cpu": prepare.cpu()[0], "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
            "seconds": round(time.monotonic() - STARTED)}


def main():
    options = parse(sys.argv[1:])
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    background = []
    folder = None
    try:
        places = prepare.environment(ROOT, say)
        prepare.go_on_inside(places, __file__)
        folder = tempfile.mkdtemp(prefix="carryover-serve-")
        result = run(options, folder, background, places)
        if options.json:
            options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        print(f"\n{options.clients} clients, {options.prefixes} prefixes of {options.prefix:,} tokens, answers of "
              f"{options.tokens}; medians of {options.turns} turns\n{table(result)}")
        return 0
    except processes.DemoError as error:
        print(f"serve: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nserve: interrupted", file=sys.stderr)
        return 130
    finally:
        for process in reversed(background):
            process.stop()
        if folder:
            shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main())
