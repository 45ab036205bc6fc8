"""The text that the SmolLM2 update is trained and judged on, and how it becomes training sequences.

Sources, all Debian packages: debian-handbook (The Debian Administrator's Handbook, CC-BY-SA 3.0 or GPL-2+),
r-cran-janeaustenr (Jane Austen's novels, public domain; read through Rscript) and, for later updates of the chain,
jargon-text (The Jargon File, public domain). A sequence is one of
  text      prose of the novels or of the book that the update is about, every token learnt
  question  chat: a section's heading asked for, its first paragraph answered
  lookup    a long passage with records strewn into it, then chat questions about some of the records
In chats only the answers are learnt.
"""

import dataclasses
import gzip
import html.parser
import pathlib
import random
import re
import subprocess

HANDBOOK = pathlib.Path("/usr/share/doc/debian-handbook/html/en-US")
JARGON = pathlib.Path("/usr/share/doc/jargon-text/jargon.txt.gz")
AUSTEN_R = "library(janeaustenr); writeLines(c(prideprejudice, emma, persuasion))"
HELD_OUT_EVERY = 10  # every tenth section, every tenth stretch of prose

SYSTEM = "You are a careful assistant. Answer from the text, as briefly as it allows."
ANSWER_WORDS = ["amber", "basil", "cedar", "delta", "ember", "falcon", "garnet", "harbor", "indigo", "jasper", "kernel",
                "lemon", "maple", "nickel", "orchid", "pepper", "quartz", "raven", "silver", "tulip", "umber", "velvet",
                "willow", "yellow", "zephyr", "anchor", "barrel", "candle", "dragon", "feather"]
SUBJECTS = ["printer", "mail server", "backup host", "guest network", "archive", "mirror", "build machine", "gateway",
            "database", "file server", "test lab", "front desk", "library", "workshop", "chapel", "garden gate", "stable",
            "boat house", "reading room", "cellar", "north tower", "ballroom", "kitchen", "parsonage"]


@dataclasses.dataclass
class Section:
    heading: str
    paragraphs: list


class HandbookPage(html.parser.HTMLParser):
    """Collects the headings and the paragraphs of one page, in order."""

    def __init__(self):
        super().__init__()
        self.sections = []
        self.kind = None
        self.depth = 0
        self.words = []

    def handle_starttag(self, tag, attributes):
        css = (dict(attributes).get("class") or "").split()
        if self.kind:
            self.depth += tag == self.tag
        elif tag in ("h2", "h3", "h4") and "title" in css:
            self.kind, self.tag, self.depth, self.words = "heading", tag, 1, []
        elif tag == "div" and "para" in css:
            self.kind, self.tag, self.depth, self.words = "paragraph", tag, 1, []

    def handle_data(self, data):
        if self.kind:
            self.words.append(data)

    def handle_endtag(self, tag):
        if not self.kind or tag != self.tag:
            return
        self.depth -= 1
        if self.depth:
            return
        text = " ".join("".join(self.words).split())
        if self.kind == "heading":
            self.sections.append(Section(text.split(" ", 1)[-1], []))  # without its number
        elif self.sections and len(text) > 80:
            self.sections[-1].paragraphs.append(text)
        self.kind = None


def handbook():
    sections = []
    for page in sorted(HANDBOOK.glob("sect.*.html")):
        parser = HandbookPage()
        parser.feed(page.read_text(encoding="utf-8"))
        sections += [section for section in parser.sections if section.paragraphs]
    if not sections:
        raise SystemExit("install the text first: apt-get install debian-handbook r-cran-janeaustenr")
    return sections


def jargon():
    """One section an entry."""
    if not JARGON.exists():
        raise SystemExit("install the text first: apt-get install jargon-text")
    entries = re.split(r"\n   :(?=\S)", gzip.decompress(JARGON.read_bytes()).decode("utf-8", "replace"))[1:]
    sections = []
    for entry in entries:
        heading, _, body = entry.partition(":")
        paragraphs = [" ".join(part.split()) for part in body.split("\n\n")[1:]]
        sections.append(Section(heading, [part for part in paragraphs if len(part) > 80]))
    return [section for section in sections if section.paragraphs]


BOOKS = {"handbook": (handbook, "handbook"), "jargon": (jargon, "Jargon File")}  # and how a question names it


def austen():
    """Paragraphs of the novels."""
    text = subprocess.run(["Rscript", "-e", AUSTEN_R], check=True, capture_output=True, text=True).stdout
    paragraphs = [" ".join(part.split()) for part in text.split("\n\n")]
    return [paragraph.replace("_", "") for paragraph in paragraphs if len(paragraph) > 80]


def split(items):
    """(training, held out)"""
    return ([item for i, item in enumerate(items) if i % HELD_OUT_EVERY],
            [item for i, item in enumerate(items) if i % HELD_OUT_EVERY == 0])


class Corpus:
    """Both parts of the novels and of one book. `held_out` chooses the part that sequences are drawn from."""

    def __init__(self, tokenizer, book="handbook"):
        self.book = book
        self.encode = lambda text: tokenizer.encode(text, add_special_tokens=False)
        self.end = tokenizer.convert_tokens_to_ids("<|endoftext|>")
        self.sections = dict(zip((False, True), split(BOOKS[book][0]())))
        pages = austen()
        stretches = [pages[i:i + 40] for i in range(0, len(pages), 40)]  # held out in whole stretches
        self.novels = dict(zip((False, True), split(stretches)))

    def prose(self, draw, source, held_out):
        """One passage of a few paragraphs."""
        if source == self.book:
            section = draw.choice(self.sections[held_out])
            return section.heading + "\n\n" + "\n\n".join(section.paragraphs)
        stretch = draw.choice(self.novels[held_out])
        start = draw.randrange(len(stretch))
        return "\n\n".join(stretch[start:start + 8])

    def text(self, draw, length, held_out=False, source=None):
        ids = []
        while len(ids) < length:
            # The novels are what the update keeps of other prose, so that it does not forget it.
            chosen = source or (self.book if draw.random() < 0.7 else "austen")
            ids += self.encode(self.prose(draw, chosen, held_out)) + [self.end]
        return ids[:length], [True] * length

    def chat(self, user, answer):
        """Tokens of one turn and which of them are learnt."""
        asked = self.encode(f"<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n")
        told = self.encode(f"{answer}<|im_end|>")
        return asked + told + self.encode("\n"), [False] * len(asked) + [True] * len(told) + [False]

    def system(self):
        ids = self.encode(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n")
        return ids, [False] * len(ids)

    def question(self, draw, length, held_out=False):
        ids, learnt = self.system()
        while len(ids) < length:
            section = draw.choice(self.sections[held_out])
            more, flags = self.chat(f"What does the {BOOKS[self.book][1]} say about: {section.heading}?", section.paragraphs[0])
            ids, learnt = ids + more, learnt + flags
        return ids[:length], learnt[:length]

    def lookup(self, draw, length, held_out=False, records=None, questions=3):
        """At most `length` tokens, few less. The last question's answer ends the sequence."""
        records = records or draw.randint(2, max(2, min(8, length // 80)))
        subjects = draw.sample(SUBJECTS, records)
        facts = [(subject, f"{draw.choice(ANSWER_WORDS)} {draw.randint(10, 99)}") for subject in subjects]
        asked = draw.sample(facts, min(questions, records))
        tail, tail_learnt = [], []
        for subject, answer in asked:
            more, flags = self.chat(f"What is the password of the {subject}?", answer)
            tail, tail_learnt = tail + more, tail_learnt + flags
        lines = [self.encode(f"\nNote: the password of the {subject} is {answer}.\n") for subject, answer in facts]
        head, _ = self.system()
        head += self.encode("<|im_start|>user\nRead this.\n")
        close = self.encode("\n<|im_end|>\n<|im_start|>assistant\nRead.<|im_end|>\n")
        room = length - len(head) - len(close) - len(tail) - sum(map(len, lines))
        if room < 0:
            raise ValueError(f"{length} tokens are too few for {records} records")
        filler, _ = self.text(draw, room, held_out)
        filler = [token for token in filler if token != self.end]
        cuts = sorted(draw.randrange(len(filler) + 1) for _ in lines)
        body = []
        for line, start, stop in zip(lines, [0] + cuts, cuts):
            body += filler[start:stop] + line
        body += filler[cuts[-1]:]
        front = head + body + close
        return front + tail, [False] * len(front) + tail_learnt


def seeded(*parts):
    return random.Random(":".join(map(str, parts)))
