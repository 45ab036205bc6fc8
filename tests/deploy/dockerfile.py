"""Reads the Dockerfile, as far as ours goes: what is not known here is an error, so that no step goes unseen.

    stages = dockerfile.read(path)
"""

import dataclasses
import json
import re
import shlex

STEPS = {"COPY", "RUN", "USER", "ENV", "WORKDIR", "EXPOSE", "VOLUME", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD"}


@dataclasses.dataclass
class Step:
    name: str
    text: str  # without options
    options: dict
    line: int

    def words(self):
        """Of the JSON form, or as a shell would cut them."""
        return json.loads(self.text) if self.text.startswith("[") else shlex.split(self.text)


@dataclasses.dataclass
class Stage:
    name: str
    base: str  # an image, or a stage above
    steps: list

    def last(self, name):
        return next((step for step in reversed(self.steps) if step.name == name), None)


def logical_lines(text):
    """(line number, line), continued lines put together, comments left out."""
    parts, start = [], 0
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("#") or not (line.strip() or parts):
            continue
        if not parts:
            start = number
        parts.append(line.removesuffix("\\"))
        if not line.endswith("\\"):
            yield start, "".join(parts).strip()
            parts = []


def read(path):
    """{name: Stage} in the order of the file."""
    stages = {}
    stage = None
    for line, text in logical_lines(path.read_text(encoding="utf-8")):
        name, _, rest = text.partition(" ")
        if name == "FROM":
            match = re.fullmatch(r"(\S+) AS (\w+)", rest.strip())
            if not match:
                raise ValueError(f"{path.name}:{line}: not FROM IMAGE AS NAME")
            stage = stages[match[2]] = Stage(match[2], match[1], [])
            continue
        if name not in STEPS or stage is None:
            raise ValueError(f"{path.name}:{line}: {name} is not known to tests/deploy/dockerfile.py")
        options = {}
        while match := re.match(r"\s*--([\w-]+)=(\S+)\s*", rest):
            options[match[1]] = match[2]
            rest = rest[match.end():]
        stage.steps.append(Step(name, rest.strip(), options, line))
    return stages
