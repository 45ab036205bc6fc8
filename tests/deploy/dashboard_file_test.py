"""deploy/grafana/carryover.json as a file: it is what its script makes, Grafana's schema knows every field of it, it
lies well on the screen, and what it asks for are metrics that docs/metrics.md knows.

    dashboard_file_test.py
"""

import json
import pathlib
import re
import subprocess
import sys

import missing

try:
    from grafana_foundation_sdk.cog import plugins
    from grafana_foundation_sdk.cog.encoder import JSONEncoder
    from grafana_foundation_sdk.models import dashboard as schema
except ImportError:
    missing.skip("grafana-foundation-sdk")

ROOT = pathlib.Path(__file__).resolve().parents[2]
FILE = ROOT / "deploy/grafana/carryover.json"

failures = []


def check(condition, what):
    if not condition:
        failures.append(what)


def all_panels(made):
    for panel in made["panels"]:
        yield panel
        yield from panel.get("panels", [])


def compare(ours, theirs, path):
    """What Grafana's types read of our JSON and write again has to be all of it: an unknown field gets lost."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, value in ours.items():
            check(key in theirs, f"the schema knows no {path}.{key}")
            if key in theirs:
                compare(value, theirs[key], f"{path}.{key}")
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for i, (one, other) in enumerate(zip(ours, theirs)):
            compare(one, other, f"{path}[{i}]")
    else:
        check(ours == theirs, f"{path} is {ours!r}, the schema makes {theirs!r} of it")


def check_schema(made):
    plugins.register_default_plugins()
    read = schema.Dashboard.from_json(made)
    compare(made, json.loads(JSONEncoder(sort_keys=True).encode(read)), "")


def check_layout(made):
    taken, numbers = set(), set()
    for panel in made["panels"]:
        at = panel["gridPos"]
        check(at["x"] + at["w"] <= 24, f"{panel['title']} is wider than the screen")
        for cell in ((x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])):
            check(cell not in taken, f"{panel['title']} lies over another panel at {cell}")
            taken.add(cell)
    for panel in all_panels(made):
        check(panel["id"] not in numbers, f"two panels have the number {panel['id']}")
        numbers.add(panel["id"])
        if panel["type"] not in ("row", "text"):
            check(len(panel["description"]) > 20, f"{panel['title']} does not say how to read it")
            check(panel["fieldConfig"]["defaults"].get("unit") or panel["type"] in ("table", "heatmap", "state-timeline"),
                  f"{panel['title']} has no unit")


def check_names(made):
    documented = (ROOT / "docs/metrics.md").read_text(encoding="utf-8")
    known = set(re.findall(r"`((?:carryover|process)_\w+)`", documented))
    variables = {variable["name"] for variable in made["templating"]["list"]} | {"__rate_interval"}
    # Of a recorded series: level:metric:operation.
    recorded = set(re.findall(r"record: (\S+)", (ROOT / "deploy/prometheus/rules/recording.yml").read_text(encoding="utf-8")))
    alerts = set(re.findall(r"alert: (\S+)", (ROOT / "deploy/prometheus/rules/alerts.yml").read_text(encoding="utf-8")))
    files = {"the dashboard": [target["expr"] for panel in all_panels(made) for target in panel.get("targets", [])],
             **{name: [(ROOT / "deploy/prometheus/rules" / name).read_text(encoding="utf-8")]
                for name in ("recording.yml", "alerts.yml")}}
    for where, expressions in files.items():
        for expression in expressions:
            for name in re.findall(r"(?<![\w:])[a-z]+:carryover_\w+:\w+", expression):
                check(name in recorded, f"{where} asks for {name}, which is not recorded")
            for name in re.findall(r"(?<![\w:])carryover_\w+(?![\w:])", expression):
                base = re.sub(r"_(bucket|sum|count)$", "", name)
                check(base in known, f"{where} asks for {name}, which docs/metrics.md does not have")
    for expression in files["the dashboard"]:
        for name in re.findall(r"\$\{?(\w+)", expression):
            check(name in variables, f"there is no variable {name}: {expression}")
    for name in re.findall(r"\bCarryover[A-Z]\w+", FILE.read_text(encoding="utf-8")):
        check(name in alerts, f"the dashboard speaks of the alert {name}, which does not exist")


def main():
    text = FILE.read_text(encoding="utf-8")
    script = subprocess.run([sys.executable, ROOT / "deploy/grafana/make_dashboard.py", "--print"], capture_output=True,
                            text=True, timeout=60)
    check(script.returncode == 0 and script.stdout == text,
          f"carryover.json is not what deploy/grafana/make_dashboard.py makes; run it\n{script.stderr}")
    made = json.loads(text)
    check_schema(made)
    check_layout(made)
    check_names(made)
    for failure in failures:
        print(f"dashboard_file_test: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
