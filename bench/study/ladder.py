#!/usr/bin/env python3
"""Lets the gate find a plan by itself, from nothing: a server with two versions, a map and the default ladder serves prompts
that the source has cached, compares all plans by every request, and what the gate knows is printed as it learns.

    python3 bench/study/ladder.py --model smollm2 --source 2026-10 --target 2026-11 \\
        --map build/study/results/smollm2-repairs/map.safetensors \\
        --text build/study/results/smollm2-repairs/tasks/smollm2-novels.txt --tokens 1024

Needs the programs in build/bin, the versions' folders and a map (run.py fits one). Prompts are pieces of the text that begin at
different places. Ends when the cell serves by some plan, or is closed, or after --requests. Standard library only.
"""

import argparse
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/demo"))

import processes  # noqa: E402


class Client:
    def __init__(self, program, environment):
        self.program, self.environment = program, environment

    def __call__(self, *words, text=None):
        done = subprocess.run([self.program, *words, "--json"], env=self.environment, input=text, capture_output=True, text=True)
        if done.returncode != 0:
            raise processes.DemoError(f"carryover {words[0]} ended with status {done.returncode}: {done.stderr[-500:]}")
        return json.loads(done.stdout)


def prompts(options):
    """Characters enough for the tokens that are asked for; the server keeps the last of them."""
    text = options.text.read_text(encoding="utf-8")
    size = 8 * options.tokens
    step = (len(text) - size) // options.requests
    if step < 1:
        raise processes.DemoError(f"{options.text} is too short for {options.requests} prompts")
    return [text[i * step:i * step + size] for i in range(options.requests)]


def waiting(http):
    """Requests whose comparison is not done."""
    page = processes.http_get(f"http://{http}/metrics")
    return float(re.search(r"^carryover_shadows_waiting (\S+)", page, re.MULTILINE).group(1))


def show(number, cell, began):
    rungs = []
    for rung in cell["rungs"]:
        measures = ", ".join(f"{m['name']} {m.get('mean', 0):.3f} [{m.get('lower', 0):.3f}, {m.get('upper', 1):.3f}]"
                             for m in rung.get("measures", []))
        rungs.append(f"    {rung['plan']:22} {rung.get('state', 'UNPROVED'):9} {rung.get('samples', 0):>4} samples  {measures}")
    print(f"{number} requests, {time.monotonic() - began:.0f} s: {cell.get('state', 'LEARNING')}\n" + "\n".join(rungs), flush=True)


def run(options, folder):
    completions, admin, http = (f"127.0.0.1:{processes.free_port()}" for _ in range(3))
    path = options.versions or ROOT / "models" / options.model
    limits = " ".join(f"{name}_limit: {getattr(options, name)}" for name in ("flip", "tv", "stop") if getattr(options, name))
    config = pathlib.Path(folder) / "server.txtpb"
    config.write_text(f"""\
listen {{ completions: "{completions}" admin: "{admin}" http: "{http}" }}
engine {{ kv_cache_bytes: {1 << 30} threads: {options.threads} }}
fidelity {{ sample_rate: 1 learning_sample_rate: 1 rungs_rate: 1 hold_out_rate: 0 control_rate: 0.1 old_rate: 0
  gate {{ {limits} }} }}
load {{ model: "m" version: "{options.source}" path: "{(path / options.source).resolve()}" }}
load {{ model: "m" version: "{options.target}" path: "{(path / options.target).resolve()}" carry_from: "{options.source}"
  map: "{options.map.resolve()}" promote: 100 }}
""")
    server = processes.Background("carryover-server", [str(options.programs / "carryover-server"), "--config", str(config)], folder)
    try:
        processes.wait_for_http(server, f"http://{http}/healthz", 300)
        environment = {**os.environ, "CARRYOVER_ADDRESS": completions, "CARRYOVER_ADMIN": admin}
        client = Client(str(options.programs / "carryover"), environment)
        began, cell = time.monotonic(), None
        for number, prompt in enumerate(prompts(options), 1):
            ask = ["complete", "--prompt-file", "-", "--truncate-prompt-tokens", str(options.tokens), "--temperature", "0"]
            client(*ask, "--version", options.source, "--max-tokens", "0", text=prompt)
            client(*ask, "--version", options.target, "--max-tokens", "16", "--ignore-eos", text=prompt)
            # One at a time, or comparisons pile up until they are too old.
            while waiting(http) > 0 or not (cells := client("fidelity", "report").get("cells")):
                server.check()
                time.sleep(0.05)
            cell = cells[0]
            if number % options.every == 0 or cell.get("state", "LEARNING") != "LEARNING":
                show(number, cell, began)
            if cell.get("state", "LEARNING") != "LEARNING":
                break
        print(cell["explanation"])
        if options.json:
            options.json.write_text(json.dumps(cell, indent=1) + "\n", encoding="utf-8")
    finally:
        server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="folder under models/ with a folder for each version")
    parser.add_argument("--versions", type=pathlib.Path, help="that folder, where it is elsewhere")
    parser.add_argument("--source", default="2026-10")
    parser.add_argument("--target", default="2026-11")
    parser.add_argument("--map", type=pathlib.Path, required=True)
    parser.add_argument("--text", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--every", type=int, default=25, help="requests between two looks that are printed")
    parser.add_argument("--json", type=pathlib.Path, help="the last report, for programs")
    for name in ("flip", "tv", "stop"):
        parser.add_argument(f"--{name}", type=float, help=f"the gate's {name}_limit; default: the server's")
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "build/bin")
    parser.add_argument("--threads", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="carryover-ladder-") as folder:
        try:
            run(options, folder)
        except processes.DemoError as error:
            print(f"ladder: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
