#!/usr/bin/env python3
"""The demo itself, started by scripts/demo once everything is built. Standard library only."""

import argparse
import datetime
import json
import os
import pathlib
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time

import cases
import measure
import processes
import report

ROOT = pathlib.Path(__file__).resolve().parents[2]
SOURCE, TARGET = "2026-10", "2026-11"

STARTED = time.monotonic()


def say(text):
    print(f"demo: [{time.monotonic() - STARTED:4.0f} s] {text}", flush=True)


def parse(arguments):
    parser = argparse.ArgumentParser(
        prog="scripts/demo", description="Time to first token after a model update, with and without carried caches.")
    parser.add_argument("--model", choices=["demo", "smollm2"], default="demo",
                        help="demo: the small pair in models/demo; smollm2: SmolLM2-135M (default: demo)")
    parser.add_argument("--json", type=pathlib.Path, default=pathlib.Path("demo.json"), metavar="FILE",
                        help="where the numbers go (default: demo.json)")
    parser.add_argument("--html", type=pathlib.Path, default=pathlib.Path("demo.html"), metavar="FILE",
                        help="where the page goes (default: demo.html)")
    parser.add_argument("--repeats", type=int, metavar="N",
                        help="measurements for each prefix length and way, at least 10 (default: 30, smollm2 10)")
    parser.add_argument("--prefixes", metavar="N,N,...",
                        help="prefix lengths in tokens, multiples of 16 (default: 256 to 2048, smollm2 to 7680)")
    parser.add_argument("--programs", type=pathlib.Path, default=ROOT / "build/bin", metavar="FOLDER",
                        help="where server and client are (default: build/bin)")
    parser.add_argument("--keep", action="store_true", help="keep the folder with configurations and logs")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 10:
        parser.error("--repeats must be at least 10: a median of fewer says little")
    if options.prefixes is not None:
        lengths = sorted({int(part) for part in options.prefixes.split(",") if part.isdecimal()})
        longest = cases.known_models(ROOT)[options.model].prefix_lengths[-1]
        if not lengths or lengths[0] < 16 or lengths[-1] > longest or any(n % 16 for n in lengths):
            parser.error(f"--prefixes takes multiples of 16 up to {longest}, as 256,1024")
        options.prefixes = lengths
    for file in (options.json, options.html):
        if not file.resolve().parent.is_dir():
            parser.error(f"there is no folder {file.resolve().parent}")
    return options


def programs(folder):
    found = [folder / name for name in ("carryover-server", "carryover")]
    for program in found:
        if not os.access(program, os.X_OK):
            raise processes.DemoError(f"{program} is missing; scripts/build makes it")
    return map(str, found)


def describe_machine():
    name = "unknown CPU"
    with open("/proc/cpuinfo", encoding="utf-8") as info:
        for line in info:
            if line.startswith("model name"):
                name = line.split(":", 1)[1].strip()
                break
    return {"cpu": name, "cores": len(os.sched_getaffinity(0)), "load_average": round(os.getloadavg()[0], 2)}


def commit():
    found = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    return found.stdout.strip() or None


def load(client, model, version, folder, *more):
    say(f"loading {model} {version}")
    return client.call("load", "--model", model, "--version", version, "--path", str(folder / version), *more,
                       show_progress=True)


def warm(client, model, version, documents, salt):
    for i, document in enumerate(documents):
        say(f"warming {version}: prefix {i + 1} of {len(documents)}, {len(document):,} tokens")
        result = client.call("warm", "--model", model, "--version", version, "--salt", salt,
                             "--tokens", ",".join(map(str, document)))
        measure.expect(f"warming {version}: stored_tokens", result["stored_tokens"], len(document))


def ask_prometheus(url, runner, model):
    """What Prometheus knows by now. Its count of carried tokens has to be ours."""
    carried = 'sum(carryover_prompt_tokens_total{source="carried"})'
    deadline = time.monotonic() + 15
    while True:
        found = processes.prometheus_query(url, carried)
        if found and found[0][1] == runner.carried_tokens:
            break
        if time.monotonic() > deadline:
            raise processes.DemoError(f"Prometheus says {found} carried tokens, the responses said {runner.carried_tokens}")
        time.sleep(0.5)
    questions = {
        "up": "up",
        "carried prompt tokens": carried,
        "cached prompt tokens": 'sum(carryover_prompt_tokens_total{source="cached"})',
        "computed prompt tokens": 'sum(carryover_prompt_tokens_total{source="computed"})',
        "generated tokens": "sum(carryover_generation_tokens_total)",
        "provenance violations": "sum(carryover_provenance_violations_total)",
    }
    answers = {}
    for name, expression in questions.items():
        found = processes.prometheus_query(url, expression)
        answers[name] = found[0][1] if found else None
    measure.expect("provenance violations in Prometheus", answers["provenance violations"], 0.0)
    return answers


def demonstrate(options, folder, background):
    server_program, client_program = programs(options.programs)
    model = cases.known_models(ROOT)[options.model]
    model.prefix_lengths = options.prefixes or model.prefix_lengths
    repeats = options.repeats or model.repeats
    machine = describe_machine()

    say("starting the server and Prometheus")
    server, completions, admin, http = processes.start_server(server_program, folder, model.kv_cache_bytes)
    background.append(server)
    client = processes.Client(client_program, completions, admin, server)
    processes.wait_for_http(server, f"http://{http}/healthz")
    prometheus, prometheus_url = processes.start_prometheus(folder, http)
    background.append(prometheus)
    processes.wait_for_http(prometheus, f"{prometheus_url}/-/ready")
    say(f"completions on {completions}, metrics on http://{http}/metrics, Prometheus on {prometheus_url}")

    loaded = load(client, model.name, SOURCE, model.folder)
    tokenize = lambda text: client.tokenize(model.name, SOURCE, text)
    documents = cases.make_documents(ROOT, model, tokenize)
    suffixes = cases.make_suffixes(ROOT, model, tokenize, repeats)
    plan = {length: cases.make_cases(documents, suffixes, length, repeats) for length in model.prefix_lengths}
    runner = measure.Runner(client, model.name, SOURCE, TARGET)
    warm(client, model.name, SOURCE, documents, measure.SOURCE_SALT)
    say(f"{SOURCE} answers from its cache, as before the update")
    old = {length: runner.old_answers(plan[length]) for length in plan}

    load(client, model.name, TARGET, model.folder, "--carry-from", SOURCE)
    client.call("promote", "--model", model.name, "--version", TARGET)
    client.call("unload", "--model", model.name, "--version", SOURCE)
    say(f"{TARGET} serves now; the weights of {SOURCE} are gone, its caches stay")
    # For the comparison only: carrying needs none of this work.
    warm(client, model.name, TARGET, documents, measure.TARGET_SALT)

    rows, example = [], None
    for length in plan:
        responses = runner.length(plan[length], say)
        rows.append(measure.sum_up(length, responses, old[length]))
        example = {arm: responses[arm][0]["choices"][0]["text"] for arm in ("native", "carried")}
    say("asking Prometheus what it scraped")
    metrics = ask_prometheus(prometheus_url, runner, model)
    client.call("cache", "check")
    return {
        "model": model.name, "source_version": SOURCE, "target_version": TARGET,
        "ttft": rows, "median_speedup": round(statistics.median(row["speedup"] for row in rows), 3),
        "answer_tokens": measure.ANSWER_TOKENS, "example": example,
        "weights_dtype": loaded["weights_dtype"], "kv_dtype": loaded["kv_dtype"],
        "prometheus": metrics, "requests": runner.requests, "machine": machine, "commit": commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "seconds": round(time.monotonic() - STARTED, 1)}


def main():
    options = parse(sys.argv[1:])
    # Both end through the clean-up below, also where a shell started the demo with Ctrl-C ignored.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = tempfile.mkdtemp(prefix="carryover-demo-")
    background = []
    status = 1
    try:
        result = demonstrate(options, folder, background)
        options.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
        options.html.write_text(report.page(result), encoding="utf-8")
        print()
        print(report.table(result))
        print()
        say(f"wrote {options.json} and {options.html}")
        status = 0
    except processes.DemoError as error:
        print(f"demo: {error}", file=sys.stderr)
    except KeyboardInterrupt:
        print("\ndemo: interrupted", file=sys.stderr)
        status = 130
    finally:
        # A second signal must not cut this short; stop() takes bounded time.
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_IGN)
        for process in reversed(background):
            process.stop()
        if options.keep:
            print(f"demo: configurations and logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
