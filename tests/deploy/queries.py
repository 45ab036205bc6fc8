"""Asks a Prometheus as Grafana and the rules do, and says what is wrong with the answers."""

import json
import math
import re
import urllib.error
import urllib.parse
import urllib.request


class Prometheus:
    def __init__(self, url, start):
        self.url = url
        self.start = start  # of the run
        self.end = start

    def get(self, path, **parameters):
        """The answer's data; a ValueError with Prometheus' words where it is an error."""
        query = urllib.parse.urlencode(parameters, doseq=True)
        try:
            with urllib.request.urlopen(f"{self.url}/api/v1/{path}?{query}", timeout=20) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise ValueError(json.load(error).get("error", str(error)))

    def values(self, expression, instant=False):
        """[(labels, [numbers])]: what it answers over the run, or now. NaN and infinite values are left out."""
        if instant:
            result = self.get("query", query=expression, time=self.end)["result"]
            rows = [(one["metric"], [one["value"]]) for one in result]
        else:
            result = self.get("query_range", query=expression, start=self.start, end=self.end, step=1)["result"]
            rows = [(one["metric"], one["values"]) for one in result]
        return [(labels, numbers) for labels, samples in rows
                if (numbers := [float(value) for _, value in samples if math.isfinite(float(value))])]

    def label_values(self, query):
        """Of Grafana's label_values(metric, label)."""
        metric, label = re.fullmatch(r"label_values\((.*), (\w+)\)", query).groups()
        return self.get(f"label/{label}/values", **{"match[]": metric, "start": self.start, "end": self.end})


def substitute(expression, variables):
    """As Grafana does before it asks: several chosen values become a pattern of alternatives."""
    def value(match):
        found = variables[match.group(1) or match.group(2)]
        return found if isinstance(found, str) else "(" + "|".join(re.escape(one).replace("\\", "\\\\") for one in found) + ")"
    return re.sub(r"\$(?:\{(\w+)\}|(\w+))", value, expression)


OPERATOR = re.compile(r"(\b(and|or|unless)\b|==|!=|>=|<=|>|<)(\s*(on|ignoring)\s*\([^)]*\))?")


def operands(expression):
    """What an alert compares and combines, down to what has no comparison or set operator outside of functions."""
    expression = expression.strip()
    if expression.startswith("(") and closing(expression, 0) == len(expression) - 1:
        return operands(expression[1:-1])
    parts, depth, start, i = [], 0, 0, 0
    while i < len(expression):
        if expression[i] == '"':
            i = expression.index('"', i + 1)
        depth += {"(": 1, "{": 1, "[": 1, ")": -1, "}": -1, "]": -1}.get(expression[i], 0)
        found = depth == 0 and OPERATOR.match(expression, i)
        if found:
            parts.append(expression[start:i])
            start = i = found.end()
        else:
            i += 1
    if not parts:
        return [expression]
    return [one for part in [*parts, expression[start:]] for one in operands(part)]


def closing(expression, opening):
    depth = 0
    for i in range(opening, len(expression)):
        depth += {"(": 1, ")": -1}.get(expression[i], 0)
        if depth == 0:
            return i
    return -1
