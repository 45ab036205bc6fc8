"""The rows of the study's eval.json files, with the names that figures and tables use."""

import dataclasses
import functools
import json
import math
import statistics

import plan


@dataclasses.dataclass
class Item:
    """One prompt, answered by a source, by its target natively (p) and by the target over the source's cache (q)."""

    row: dict
    run: str
    source: str
    target: str
    task: str
    length: int  # of the prefix, tokens

    def arm(self, name):
        return self.row["carried"][0] if name == "carried" else self.row[name]

    @property
    def labelled(self):
        return self.row["native"]["right"] is not None

    def right(self, arm):
        return bool(self.arm(arm)["right"])

    def tokens(self, arm):
        return self.arm(arm)["tokens"]

    def finish(self, arm):
        return self.arm(arm)["finish"]

    @functools.cached_property
    def comparisons(self):
        return {one["comparison"]: one for one in self.row["comparisons"] if one["plan"] in ("direct", "native", "")}

    def mean_of(self, comparison, field):
        values = [value for value in self.comparisons[comparison]["positions"][field] if value is not None]
        return sum(values) / len(values) if values else math.nan

    @property
    def flip(self):
        return self.comparisons["carried"]["first_token_flip"]

    @property
    def tv(self):
        return self.mean_of("carried", "tv")

    @property
    def kl(self):
        return self.mean_of("carried", "kl")

    @property
    def stop_disagreement(self):
        return self.comparisons["carried"]["stop_disagreement"]

    @property
    def old(self):
        """T natively against S natively, on the same positions."""
        if "old" not in self.comparisons:
            return None
        return {"flip": self.comparisons["old"]["first_token_flip"], "kl": self.mean_of("old", "kl")}

    @property
    def control(self):
        if "control" not in self.comparisons:
            return None
        return {"flip": self.comparisons["control"]["first_token_flip"], "tv": self.mean_of("control", "tv"),
                "kl": self.mean_of("control", "kl")}

    @functools.cached_property
    def first(self):
        """The measures of the first position."""
        return {name: values[0] for name, values in self.comparisons["carried"]["positions"].items()}

    @functools.cached_property
    def same_until(self):
        """Tokens that both answers begin with."""
        count = 0
        for a, b in zip(self.tokens("native"), self.tokens("carried")):
            if a != b:
                break
            count += 1
        return count

    @property
    def same_text(self):
        return self.tokens("native") == self.tokens("carried")


def read(folder):
    """{run: [Item]}. Failed rows are left out and told."""
    out = {}
    for name, run in plan.RUNS.items():
        if run.options:  # other pictures, see read_parts
            continue
        for source, target in run.pairs:
            file = folder / name / f"{source}-{target}" / "eval.json"
            if not file.exists():
                continue
            rows = json.loads(file.read_text(encoding="utf-8"))["items"]
            failed = [row for row in rows if "error" in row]
            if failed:
                print(f"{file}: {len(failed)} rows failed, for one: {failed[0]['error']}")
            for row in rows:
                if "error" in row:
                    continue
                number, length, _ = row["id"].split("/")
                out.setdefault(name, []).append(Item(row, name, source, target, run.tasks[int(number)].name, int(length)))
    return out


def read_parts(folder):
    """{run: {task: [parts of one prompt]}} of the runs with --sensitivity; parts: {name: part of eval.json}."""
    out = {}
    for name, run in plan.RUNS.items():
        for source, target in run.pairs if run.options else []:
            file = folder / name / f"{source}-{target}" / "eval.json"
            if not file.exists():
                continue
            for row in json.loads(file.read_text(encoding="utf-8"))["items"]:
                if "sensitivity" not in row:
                    continue
                task = run.tasks[int(row["id"].split("/")[0])].name
                parts = {part["name"]: part for part in row["sensitivity"]["parts"]}
                out.setdefault(name, {}).setdefault(task, []).append(parts)
    return out


def tasks(items):
    """Names in the plan's order."""
    names = [task.name for run in {item.run for item in items} for task in plan.RUNS[run].tasks]
    present = {item.task for item in items}
    return [name for name in dict.fromkeys(names) if name in present]


def where(items, **wanted):
    return [item for item in items if all(getattr(item, key) == value for key, value in wanted.items())]


def split(items, key):
    out = {}
    for item in items:
        out.setdefault(getattr(item, key), []).append(item)
    return out


def pairs(items):
    return sorted({(item.source, item.target) for item in items})


def median_ttft(items, arm):
    return statistics.median(item.arm(arm)["ttft_s"] for item in items)
