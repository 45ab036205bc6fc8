"""What the study asks: the runs, their versions and pairs, and how many items of which task at which prefix length."""

import dataclasses
import pathlib


@dataclasses.dataclass
class Task:
    name: str
    kind: str      # of `carryover eval tasks`
    text: str      # file of texts.py
    counts: dict   # prefix length: items
    options: list  # more of `carryover eval tasks`


@dataclasses.dataclass
class Run:
    model: str
    versions: list  # oldest first; each may read all before it
    pairs: list     # (whose cache, who reads it)
    tasks: list
    options: list = dataclasses.field(default_factory=list)  # more of `carryover eval`
    # A map is fitted for the one pair first, with these options of `carryover calibrate`: on the first half of each text that
    # the tasks are from. The tasks are made of the second half then.
    fit: list = None


def demo_tasks(counts, only=None):
    old, new = ["--style", "demo-2026-10"], ["--style", "demo-2026-11"]
    # The words that both versions were trained to look up.
    words = ["--words", str(pathlib.Path(__file__).resolve().parents[2] / "models/demo/words.json")]
    tasks = [Task("look-up, old style", "kv", "demo-old", counts, old + words),
             Task("look-up, new style", "kv", "demo-new", counts, new + words),
             Task("three look-ups, new style", "needles", "demo-new", counts, new + words),
             Task("text goes on, old", "text", "demo-old", counts, old),
             Task("text goes on, new", "text", "demo-new", counts, new)]
    return [task for task in tasks if only is None or task.name in only]


def smollm2_tasks(counts, only=None, longer=None):
    """longer: more of counts, for the tasks whose text is long enough also where it is halved."""
    novels = counts | (longer or {})
    chat = ["--style", "chat"]
    tasks = [Task("look-up", "kv", "smollm2-handbook", counts, []),
             Task("password, chat", "kv", "smollm2-handbook", counts, chat),
             Task("two hops", "hops", "smollm2-handbook", counts, []),
             Task("three codes", "needles", "smollm2-handbook", counts, []),
             Task("sentence", "qa", "smollm2-novels", novels, []),
             Task("text goes on", "text", "smollm2-novels", novels, ["--max-tokens", "16"])]
    return [task for task in tasks if only is None or task.name in only]


FROM_V0 = [("v0", f"v{k}") for k in range(1, 5)]
STEP_BY_STEP = [(f"v{k - 1}", f"v{k}") for k in range(2, 5)]  # v0 -> v1 is among the others

# Where the divergence comes from, and what the plans that follow from it bring.
PARTS = ["--sensitivity", "--plan", "direct", "--plan", "bottom(25%)", "--plan", "bottom(50%)", "--plan", "bottom(75%)",
         "--plan", "tail(32)"]

# What repairs bring and cost.
REPAIRS = [word for name in ["direct", "tail(32)", "tail(10%)", "bottom(50%)", "calibrated", "calibrated+tail(32)",
                             "calibrated+tail(10%)", "calibrated+bottom(25%)"] for word in ("--plan", name)]
REPAIRED = ["look-up", "password, chat", "sentence", "text goes on"]
DEMO_FIT, SMOLLM2_FIT = ["--piece-tokens", "512"], ["--piece-tokens", "1024", "--max-tokens", "24576"]

RUNS = {
    "demo": Run("demo", ["2026-10", "2026-11"], [("2026-10", "2026-11")],
                demo_tasks({256: 100, 512: 100, 1024: 100, 2048: 100})),
    "smollm2": Run("smollm2", ["v0", "v1"], [("v0", "v1")],
                   smollm2_tasks({256: 32, 512: 32, 1024: 16, 2048: 8, 4096: 4})),
    "demo-chain": Run("demo", ["v0", "v1", "v2", "v3", "v4"], FROM_V0 + STEP_BY_STEP, demo_tasks({512: 64, 2048: 24})),
    "smollm2-chain": Run("smollm2", ["v0", "v1", "v2", "v3", "v4"], FROM_V0 + STEP_BY_STEP,
                         smollm2_tasks({512: 16}, ["look-up", "password, chat", "sentence", "text goes on"])),
    "demo-parts": Run("demo", ["2026-10", "2026-11"], [("2026-10", "2026-11")],
                      demo_tasks({512: 32, 1024: 32}, ["look-up, old style", "look-up, new style", "text goes on, old",
                                                       "text goes on, new"]), PARTS),
    "smollm2-parts": Run("smollm2", ["2026-10", "2026-11"], [("2026-10", "2026-11")],
                         smollm2_tasks({512: 10, 1024: 6}, ["look-up", "password, chat", "sentence", "text goes on"]), PARTS),
    "demo-repairs": Run("demo", ["2026-10", "2026-11"], [("2026-10", "2026-11")], demo_tasks({512: 40, 1024: 40}), REPAIRS, DEMO_FIT),
    "smollm2-repairs": Run("smollm2", ["2026-10", "2026-11"], [("2026-10", "2026-11")],
                           smollm2_tasks({1024: 12, 2048: 4}, REPAIRED, {4096: 4}),
                           REPAIRS, SMOLLM2_FIT),
    "smollm2-large-repairs": Run("smollm2", ["v0", "v4"], [("v0", "v4")],
                                 smollm2_tasks({1024: 12}, REPAIRED, {4096: 4}),
                                 REPAIRS, SMOLLM2_FIT),
}
