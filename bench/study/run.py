#!/usr/bin/env python3
"""Runs the study of docs/fidelity.md: a server with all versions of a model, tasks, and `carryover eval` for every pair.

    python3 bench/study/run.py                       everything that plan.py names
    python3 bench/study/run.py demo --minutes 5      only this run, each pair for at most five minutes

Needs the programs in build/bin, the texts (texts.py), SmolLM2 (models/fetch_smollm2) and the chains (models/demo/chain.py,
models/smollm2_chain.py). Leaves build/study/results/RUN/SOURCE-TARGET/eval.json and eval.html. A pair that is
finished is left alone, and one that was interrupted or ran out of minutes goes on where it was. Standard library only.
"""

import argparse
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import plan

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench/demo"))

import processes  # noqa: E402

STARTED = time.monotonic()


def say(text):
    print(f"study: [{time.monotonic() - STARTED:5.0f} s] {text}", flush=True)


def start(run, chains, folder, program, threads, map_file=None):
    """A server with every version of the run, each allowed to read all versions before it."""
    completions, admin, http = (f"127.0.0.1:{processes.free_port()}" for _ in range(3))
    versions = []
    for i, version in enumerate(run.versions):
        sources = "".join(f' carry_from: "{earlier}"' for earlier in run.versions[:i])
        if map_file is not None and version == run.pairs[0][1]:
            sources += f' map: "{map_file}"'
        path = (chains / run.model / version if version.startswith("v") else ROOT / "models" / run.model / version).resolve()
        versions.append(f'load {{ model: "{run.model}" version: "{version}" path: "{path}"{sources} promote: 100 }}\n')
    config = pathlib.Path(folder) / "server.txtpb"
    config.write_text(f"""\
listen {{ completions: "{completions}" admin: "{admin}" http: "{http}" }}
engine {{ kv_cache_bytes: {1 << 30} threads: {threads} }}
# Nothing in the background: what is asked for is compared, and nothing else.
fidelity {{ sample_rate: 0 learning_sample_rate: 0 hold_out_rate: 0 }}
{"".join(versions)}""")
    server = processes.Background("carryover-server", [program, "--config", str(config)], folder)
    processes.wait_for_http(server, f"http://{http}/healthz", 300)
    return server, {**os.environ, "CARRYOVER_ADDRESS": completions, "CARRYOVER_ADMIN": admin}


def halve(run, text, out):
    """The first half of each text of the run's tasks, to fit a map on, and the second, to make tasks of."""
    for name in sorted({task.text for task in run.tasks}):
        lines = (text / f"{name}.txt").read_text(encoding="utf-8").splitlines(keepends=True)
        for half, part in (("fit", lines[:len(lines) // 2]), ("tasks", lines[len(lines) // 2:])):
            (out / half).mkdir(parents=True, exist_ok=True)
            (out / half / f"{name}.txt").write_text("".join(part), encoding="utf-8")


def fit(run, options, out, folder):
    """The map of the run's pair, fitted unless it is there."""
    map_file = (out / "map.safetensors").resolve()
    if map_file.exists():
        return map_file
    server, environment = start(run, options.chains, folder, str(options.programs / "carryover-server"), options.threads)
    try:
        (source, target), = run.pairs
        say(f"fitting a map from {source} to {target}")
        command = [str(options.programs / "carryover"), "calibrate", "--model", run.model, "--source", source, "--target", target,
                   "--texts", str(out / "fit"), "--out", str(map_file), *run.fit]
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        (out / "map.txt").write_text(done.stdout + done.stderr, encoding="utf-8")
        if done.returncode != 0:
            raise processes.DemoError(f"carryover calibrate ended with status {done.returncode}: {done.stderr[-500:]}")
    finally:
        server.stop()
    return map_file


def make_tasks(run, text, file, folder, program, environment):
    """One file for all pairs of a run, so ordered that any beginning of it has all tasks and lengths in proportion."""
    placed = []
    for number, task in enumerate(run.tasks):
        for length, count in task.counts.items():
            made = pathlib.Path(folder) / "made.jsonl"
            command = [program, "eval", "tasks", task.kind, "--text", str(text / f"{task.text}.txt"), "--out", str(made),
                       "--lengths", str(length), "--per-length", str(count), "--per-prefix", "2", *task.options]
            if subprocess.run(command, env=environment, stdout=subprocess.DEVNULL).returncode != 0:
                raise processes.DemoError(f"no items for {task.name} at {length} tokens")
            for i, line in enumerate(made.read_text(encoding="utf-8").splitlines()):
                item = json.loads(line)
                item["id"], item["task"] = f"{number}/{length}/{i}", f"{task.kind}.{number}"
                placed.append(((i + 0.5) / count, number, length, i, json.dumps(item, ensure_ascii=False)))
    work = file.with_suffix(".new")
    work.write_text("".join(line + "\n" for *_, line in sorted(placed)), encoding="utf-8")
    work.rename(file)
    say(f"{file.stem}: {len(placed)} items")


def ask(command, environment, server, minutes):
    """Runs `carryover eval`; out of time, it is interrupted and reports on what it has."""
    client = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        client.wait(60 * minutes)
    except subprocess.TimeoutExpired:
        client.send_signal(signal.SIGINT)
        client.wait()
        return
    if client.returncode != 0:
        server.check()
        raise processes.DemoError(f"carryover eval ended with status {client.returncode}")


def evaluate(name, options):
    run = plan.RUNS[name]
    out = options.out / name
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="carryover-study-") as folder:
        text, map_file = options.text, None
        if run.fit is not None:
            halve(run, options.text, out)
            text, map_file = out / "tasks", fit(run, options, out, folder)
        server, environment = start(run, options.chains, folder, str(options.programs / "carryover-server"), options.threads,
                                    map_file)
        try:
            client, tasks = str(options.programs / "carryover"), out / "tasks.jsonl"
            if not tasks.exists():
                make_tasks(run, text, tasks, folder, client, environment)
            for source, target in run.pairs:
                say(f"{name}: {source} -> {target}")
                ask([client, "eval", "--model", run.model, "--source", source, "--target", target, "--tasks", str(tasks),
                     "--out", str(out / f"{source}-{target}"), "--control-rate", str(options.control_rate), "--no-hit",
                     *run.options],
                    environment, server, options.minutes)
            say(f"{name}: done")
        finally:
            server.stop()


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", default=list(plan.RUNS), metavar="RUN", help=", ".join(plan.RUNS))
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "build/bin")
    parser.add_argument("--chains", type=pathlib.Path, default=ROOT / "models/chain")
    parser.add_argument("--text", type=pathlib.Path, default=ROOT / "build/study/text")
    parser.add_argument("--out", type=pathlib.Path, default=ROOT / "build/study/results")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--control-rate", type=float, default=0.1, help="share of items whose native answer is computed twice")
    parser.add_argument("--minutes", type=float, default=1e5, help="for each pair of versions")
    options = parser.parse_args()
    for name in options.runs:
        try:
            evaluate(name, options)
        except processes.DemoError as error:
            print(f"study: {error}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
