"""deploy/prometheus: promtool accepts configuration and rules, the rules' own tests pass, and no alert goes untested
or leads nowhere.

    rules_test.py
"""

import pathlib
import re
import subprocess
import sys

import missing

try:
    import yaml
except ImportError:
    missing.skip("PyYAML")

ROOT = pathlib.Path(__file__).resolve().parents[2]
FOLDER = ROOT / "deploy/prometheus"
RULES = sorted(FOLDER.glob("rules/*.yml"))
TESTS = sorted(FOLDER.glob("tests/*.yml"))

failures = []


def check(condition, what):
    if not condition:
        failures.append(what)


def promtool(*arguments):
    result = subprocess.run(["promtool", *map(str, arguments)], capture_output=True, text=True, timeout=100)
    said = result.stdout + result.stderr
    check(result.returncode == 0 and "FAILED" not in said and "lint error" not in said,
          f"promtool {' '.join(map(str, arguments[:2]))}:\n{said}")


def rules():
    for file in RULES:
        for group in yaml.safe_load(file.read_text(encoding="utf-8"))["groups"]:
            yield from group["rules"]


def anchors(page):
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}


def check_alerts():
    quiet, firing = {}, {}  # alert -> the alerts that are expected
    for file in TESTS:
        for test in yaml.safe_load(file.read_text(encoding="utf-8"))["tests"]:
            for case in test.get("alert_rule_test", []):
                expected = case.get("exp_alerts") or []
                (firing if expected else quiet).setdefault(case["alertname"], []).extend(expected)
    for rule in rules():
        if "alert" not in rule:
            check(re.fullmatch(r"(instance|job|plan|pair|target):carryover_\w+:\w+", rule["record"]),
                  f"{rule['record']} is not named level:metric:operation")
            continue
        name, severity = rule["alert"], rule["labels"].get("severity")
        check(severity in ("critical", "warning", "info"), f"{name} has the severity {severity}")
        for part in ("summary", "description", "runbook"):
            check(rule["annotations"].get(part), f"{name} has no {part}")
        page, _, anchor = rule["annotations"].get("runbook", "").partition("#")
        check(anchor == name.lower() and anchor in anchors(page), f"{name}: there is no {page}#{anchor}")
        # An alert of several rules is told apart by what it adds as labels.
        same = lambda labels: all(labels.get(key) == value for key, value in rule["labels"].items())
        check(any(same(alert["exp_labels"]) for alert in firing.get(name, [])),
              f"no test sees {name} fire with {rule['labels']}")
        check(name in quiet, f"no test sees {name} stay quiet")
    known = {rule["alert"] for rule in rules() if "alert" in rule}
    check(anchors("docs/runbook.md") >= {name.lower() for name in known}, "the runbook lacks alerts")
    for anchor in anchors("docs/runbook.md"):
        check(not anchor.startswith("carryover") or anchor in {name.lower() for name in known},
              f"docs/runbook.md#{anchor} is about no alert")
    for name in set(quiet) | set(firing):
        check(name in known, f"a test is about {name}, which does not exist")


def main():
    missing.require_program("promtool")
    check(len(RULES) == 2 and TESTS, "the rules or their tests are gone")
    promtool("check", "config", FOLDER / "prometheus.yml")
    promtool("check", "rules", *RULES)
    check_alerts()
    promtool("test", "rules", *TESTS)
    for failure in failures:
        print(f"rules_test: {failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
