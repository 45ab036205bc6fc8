"""Everything that deploy/ asks of Prometheus has an answer: a real server does all that it can do (traffic.py), a real
Prometheus with our configuration and rules scrapes it, and every query of the dashboard, every recording rule and every
side of every alert is then asked for. None may be an error, none may be empty.

    dashboard_test.py FOLDER-WITH-THE-PROGRAMS [--keep]

Replaced are the target, the intervals (1 s) and, in alerts, `offset`: a run of half a minute has no week before it.
"""

import json
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import missing
import queries
import traffic

try:
    import yaml
except ImportError:
    missing.skip("PyYAML")

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
processes = traffic.processes

# Sides of alerts that are empty when all is well, and what shows that they would see it if it were not.
EMPTY_WHEN_WELL = {
    'absent(up{job="carryover"})': 'up{job="carryover"}',
    'sum by (job, instance, method) (rate(carryover_requests_total{code=~"INTERNAL|UNKNOWN|DATA_LOSS"}[5m]))':
        'sum by (job, instance, method) (rate(carryover_requests_total{code=~"OK|RESOURCE_EXHAUSTED"}[5m]))',
}

failures = []


def check(condition, what):
    if not condition:
        failures.append(what)


def start_prometheus(folder, target):
    """With deploy's own configuration, but for the target and the intervals."""
    config = yaml.safe_load((DEPLOY / "prometheus/prometheus.yml").read_text(encoding="utf-8"))
    config["global"].update(scrape_interval="1s", evaluation_interval="1s")
    (job,) = config["scrape_configs"]
    job["static_configs"] = [{"targets": [target]}]
    config["rule_files"] = [str(DEPLOY / "prometheus" / name) for name in config["rule_files"]]
    file = pathlib.Path(folder) / "prometheus.yml"
    file.write_text(yaml.safe_dump(config), encoding="utf-8")
    address = f"127.0.0.1:{processes.free_port()}"
    prometheus = processes.Background(
        "prometheus", ["prometheus", f"--config.file={file}", f"--storage.tsdb.path={folder}/prometheus",
                       f"--web.listen-address={address}", "--log.level=warn"], folder)
    processes.wait_for_http(prometheus, f"http://{address}/-/ready")
    return prometheus, queries.Prometheus(f"http://{address}", time.time())


def scraped(prometheus, times):
    """Waits until so many more scrapes are in."""
    count = lambda: prometheus.get("query", query="sum_over_time(up[10m])")["result"]
    now = lambda: float(count()[0]["value"][1]) if count() else 0
    wanted, deadline = now() + times, time.monotonic() + 30
    while now() < wanted:
        if time.monotonic() > deadline:
            raise processes.DemoError("Prometheus does not scrape")
        time.sleep(0.2)


def held_outs_rose(prometheus):
    """Whether rates have something to see of requests that were held out, and of what is compared for those."""
    prometheus.end = time.time()
    return all(any(max(rises) > 0 for _, rises in prometheus.values(f"increase({counter}[10s])"))
               for counter in ('carryover_trial_answer_tokens_count{arm="held_out"}',
                               'carryover_fidelity_samples_total{comparison="control"}',
                               'carryover_fidelity_samples_total{comparison="old"}'))


def run(client, prometheus):
    flow = traffic.Traffic(client)

    def do(step, *arguments):
        step(*arguments)
        # Rates need two scrapes with something between them.
        scraped(prometheus, 2)

    scraped(prometheus, 2)
    for step in (flow.source_fills_its_cache, flow.canary_starts, flow.gate_learns, flow.carried_traffic):
        do(step)
    # Who is held out is drawn by lot: none, or all between two scrapes, is rare and no fault.
    for seed in range(20, 26):
        if held_outs_rose(prometheus):
            break
        do(flow.more_carried_traffic, seed)
    for step in (flow.caches_move, flow.queue_overflows, flow.operator_leaves):
        do(step)
    prometheus.end = time.time()


def check_variables(made, prometheus):
    """Returns what Grafana would put for each variable when all of its values are chosen."""
    chosen = {"__rate_interval": "10s"}
    for variable in made["templating"]["list"]:
        if variable["type"] == "query":
            found = prometheus.label_values(queries.substitute(variable["query"]["query"], chosen))
            check(found, f"the variable {variable['name']} has no values")
            chosen[variable["name"]] = found
        elif variable["type"] == "custom":
            chosen[variable["name"]] = variable["current"]["value"]
    return chosen


def check_dashboard(prometheus):
    made = json.loads((DEPLOY / "grafana/carryover.json").read_text(encoding="utf-8"))
    chosen = check_variables(made, prometheus)
    count = 0
    for panel in (inner for outer in made["panels"] for inner in [outer, *outer.get("panels", [])]):
        for target in panel.get("targets", []):
            count += 1
            where = f"panel '{panel['title']}' {target['refId']}"
            try:
                found = prometheus.values(queries.substitute(target["expr"], chosen), target.get("instant", False))
            except ValueError as error:
                check(False, f"{where}: {error}\n    {target['expr']}")
                continue
            check(found, f"{where} is empty\n    {target['expr']}")
            for label in re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]):
                check(all(label in labels for labels, _ in found), f"{where} has series without {label}")
    return count


def check_rules(prometheus):
    """Prometheus evaluated all of them without an error, and what they look at is there."""
    recorded, sides = set(), set()
    for group in prometheus.get("rules")["groups"]:
        for rule in group["rules"]:
            check(rule["health"] == "ok", f"rule {rule['name']} is {rule['health']}: {rule.get('lastError')}")
            if rule["type"] == "recording":
                recorded.add((rule["name"], rule.get("labels", {}).get("measure", "")))
            else:
                sides.update((rule["name"], side) for side in queries.operands(rule["query"]))
    for name, measure in sorted(recorded):
        series = name + (f'{{measure="{measure}"}}' if measure else "")
        check(prometheus.values(series), f"{series} was never recorded")
    for name, side in sorted(sides):
        side = " ".join(side.split())
        if re.fullmatch(r"[\d. *]+", side):
            continue
        asked = EMPTY_WHEN_WELL.get(side, re.sub(r"\boffset \w+", "", side))
        try:
            check(prometheus.values(asked), f"alert {name}: nothing to look at in\n    {asked}")
        except ValueError as error:
            check(False, f"alert {name}: {error}\n    {asked}")
    alerts = {alert["labels"]["alertname"] for alert in prometheus.get("alerts")["alerts"]}
    check("CarryoverCellClosed" in alerts, f"the closed cell raised no alert, only {sorted(alerts)}")
    for quiet in ("CarryoverProvenanceViolation", "CarryoverServerDown", "CarryoverInvalidLogits", "CarryoverInternalErrors"):
        check(quiet not in alerts, f"{quiet} was raised")
    return len(recorded), len(sides)


def check_metrics(http):
    """Prometheus' own checker has nothing to say of all that the run made."""
    page = processes.http_get(f"http://{http}/metrics")
    said = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, timeout=60)
    check(said.returncode == 0 and not said.stdout and not said.stderr, f"promtool check metrics: {said.stdout}{said.stderr}")
    samples = [line.rsplit(" ", 1)[0] for line in page.splitlines() if not line.startswith("#")]
    check(len(samples) == len(set(samples)), "two samples have one name and labels")
    return len(samples)


def main():
    missing.require_program("prometheus")
    missing.require_program("promtool")
    folder = tempfile.mkdtemp(prefix="carryover-dashboard-test-")
    background, started = [], time.monotonic()
    try:
        server, client, http = traffic.start_server(pathlib.Path(sys.argv[1]).resolve(), folder)
        background.append(server)
        process, prometheus = start_prometheus(folder, http)
        background.append(process)
        run(client, prometheus)
        counts = (check_dashboard(prometheus), *check_rules(prometheus), check_metrics(http))
        print("{} queries of the dashboard, {} recorded series, {} sides of alerts, {} samples".format(*counts),
              f"in {time.monotonic() - started:.0f} s")
    except processes.DemoError as error:
        check(False, str(error))
    finally:
        for process in reversed(background):
            process.stop()
        if "--keep" in sys.argv:
            print(f"configurations and logs are in {folder}")
        else:
            shutil.rmtree(folder, ignore_errors=True)
    for failure in failures:
        print(f"dashboard_test: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
