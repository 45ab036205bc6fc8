"""What the demo asks: prefixes of exact token counts, and suffixes of 32 tokens.

The text is real prose held out of the demo pair's training (models/demo/prompts.jsonl). Prefixes of one
document are nested, so that warming its longest one warms them all.
"""

import dataclasses
import json
import pathlib

from processes import DemoError

SUFFIX_TOKENS = 32

# For a model that follows instructions: asked about the passage, whatever it is.
QUESTIONS = [
    "What is this passage mainly about?",
    "Who or what is named most often above?",
    "Give one word that fits the mood of the text.",
    "Which place is mentioned above?",
    "Does the writer sound pleased or displeased?",
    "What happens at the end of the passage?",
    "Write a short title for the text above.",
    "What would be a good first question about it?",
    "Is this passage old or modern? Answer briefly.",
    "Repeat one short phrase from the passage.",
    "What does the passage say first of all?",
    "Name one thing that the text explains.",
]
LEAD_IN = ("<|im_start|>user\nHere is a passage from a longer work. Read all of it with care, then answer the "
           "question that follows it, and keep the answer short.\n\n")
FILLER = "\n\n(Here the passage ends. A reader has a question about it and would like a short answer.)\n\n"


@dataclasses.dataclass
class Model:
    name: str
    folder: pathlib.Path
    prefix_lengths: list
    documents: int  # different prefixes of each length
    repeats: int  # measurements of each length and arm
    kv_cache_bytes: int
    chat: bool


def known_models(root):
    lengths = [256, 512, 1024, 2048]
    return {
        "demo": Model("demo", root / "models/demo", lengths, 4, 30, 256 << 20, False),
        "smollm2": Model("smollm2", root / "models/smollm2", lengths + [4096, 7680], 2, 10, 2 << 30, True),
    }


@dataclasses.dataclass
class Case:
    document: int
    prefix: list
    suffix: list


def read_passages(root, shortest, longest):
    """The prose pieces of prompts.jsonl whose length in the demo's tokens is in the range."""
    file = root / "models/demo/prompts.jsonl"
    try:
        rows = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise DemoError(f"cannot read {file}: {error}")
    found = [row["text"] for row in rows if row["kind"] == "text" and shortest <= row["tokens"] <= longest]
    if len(found) < 2:
        raise DemoError(f"{file} holds too few passages")
    return found


def make_documents(root, model, tokenize):
    """Token ids of `documents` passages, each as long as the longest prefix."""
    passages = read_passages(root, 1000, 100000)
    longest = model.prefix_lengths[-1]
    documents = []
    for d in range(model.documents):
        turned = passages[d:] + passages[:d]
        ids = tokenize((LEAD_IN if model.chat else "") + turned[0])
        for passage in turned[1:]:
            if len(ids) >= longest:
                break
            ids += tokenize("\n\n" + passage)
        if len(ids) < longest:
            raise DemoError(f"the passages give {len(ids)} tokens, {longest} are needed")
        documents.append(ids[:longest])
    return documents


def make_suffixes(root, model, tokenize, count):
    """`count` suffixes of exactly SUFFIX_TOKENS tokens."""
    if not model.chat:
        # The small pair continues prose: the start of another passage.
        pieces = [tokenize(passage) for passage in read_passages(root, 0, 999)]
        windows = [piece[start:start + SUFFIX_TOKENS] for start in range(0, 10 * SUFFIX_TOKENS, SUFFIX_TOKENS)
                   for piece in pieces]
        suffixes = [window for window in windows if len(window) == SUFFIX_TOKENS]
    else:
        filler = tokenize(FILLER)
        suffixes = []
        for question in QUESTIONS:
            ids = tokenize(f"{question}<|im_end|>\n<|im_start|>assistant\n")
            suffixes.append((filler + ids)[-SUFFIX_TOKENS:])
    if not suffixes or any(len(suffix) != SUFFIX_TOKENS for suffix in suffixes):
        raise DemoError(f"no suffixes of {SUFFIX_TOKENS} tokens could be made")
    return [suffixes[i % len(suffixes)] for i in range(count)]


def make_cases(documents, suffixes, length, repeats):
    """Every case is another question; the documents take turns."""
    return [Case(i % len(documents), documents[i % len(documents)][:length], suffixes[i]) for i in range(repeats)]
