"""The text and the tasks that the demo pair is trained on.

The text comes from four Debian packages: r-cran-janeaustenr, bible-kjv, debian-handbook and jargon-text. The
tasks ask for facts noted earlier in the prompt, in one prompt style for each version.
"""

import glob
import gzip
import html
import json
import os
import re
import subprocess

import numpy as np

SEED = 20261001
VOCAB = 4096
SPECIALS = ["<|endoftext|>", "<|pad|>", "<|user|>", "<|assistant|>"]

# The update keeps some of the old text and of the old style, as real updates do: without them the model forgets
# both within a few hundred steps, and a carried cache would be judged against a broken model.
REPLAY = 0.2

HELD_OUT = 0.04     # share of every source that is never trained on


# ---------------------------------------------------------------- text

def run(*command):
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def austen():
    """Six novels, lines joined to paragraphs."""
    books = run("Rscript", "-e",
                'b <- janeaustenr::austen_books(); '
                'for (n in levels(b$book)) cat(b$text[b$book == n], "\\f", sep = "\\n")').split("\f")
    return [paragraphs(b) for b in books if b.strip()]


def bible():
    """The King James Version, one verse a line, chapter and verse numbers dropped."""
    verses = run("bible", "-f", "Gen1:1-Rev22:21").splitlines()
    books = {}
    for v in verses:
        where, _, text = v.partition(" ")
        books.setdefault(re.match(r"\d?[A-Za-z]+", where).group(), []).append(text.strip())
    return ["\n".join(b) for b in books.values()]


def handbook():
    """The Debian Administrator's Handbook, English."""
    out = []
    for path in sorted(glob.glob("/usr/share/doc/debian-handbook/html/en-US/*.html")):
        page = open(path, encoding="utf-8").read()
        page = page[page.index('xml:lang="en-US"'):] if 'xml:lang="en-US"' in page else page
        page = re.sub(r'<(script|style)\b.*?</\1>|<dl class="toc">.*?</div>|<ul class="docnav.*?</ul>', " ", page, flags=re.S)
        page = re.sub(r"</(p|h\d|li|div|pre|dt|dd|tr)>", "\n", page)
        page = html.unescape(re.sub(r"<[^>]*>", "", page))
        page = page[page.index(">") + 1:] if page.startswith("xml:lang") else page
        page = "\n".join(re.sub(r"[ \t\xa0]+", " ", line).strip() for line in page.splitlines())
        page = re.sub(r"\n{2,}", "\n\n", page).strip()
        if len(page) > 1000:
            out.append(page)
    return out


def jargon():
    """The Jargon File, lines joined to paragraphs."""
    text = gzip.open("/usr/share/doc/jargon-text/jargon.txt.gz").read().decode("utf-8", "replace")
    entries = re.split(r"\n(?=   :)", text)
    entries = [paragraphs(e) for e in entries[1:]]
    return ["\n\n".join(entries[i:i + 50]) for i in range(0, len(entries), 50)]


def paragraphs(text):
    blocks = re.split(r"\n\s*\n", text)
    return "\n\n".join(" ".join(b.split()) for b in blocks if b.strip())


SOURCES = {"2026-10": {"austen": austen, "kjv": bible}, "2026-11": {"handbook": handbook, "jargon": jargon}}
PLAIN = str.maketrans({"\u2019": "'", "\u2018": "'", "\u201c": '"', "\u201d": '"', "\u2013": "-", "\u2014": "-",
                       "\u2026": "...", "\xa0": " ", "\ufffd": " "})


def make_text(work):
    """Writes train and held-out text of each source; the end of every source is held out."""
    for sources in SOURCES.values():
        for name, read in sources.items():
            documents = [d.translate(PLAIN) for d in read()]
            if name == "austen" or name == "kjv":
                parts = [(d[:int(len(d) * (1 - HELD_OUT))], d[int(len(d) * (1 - HELD_OUT)):]) for d in documents]
                train, held = [p[0] for p in parts], [p[1] for p in parts]
            else:
                # Whole pages and whole groups of entries: their order says nothing, so every 25th will do.
                train = [d for i, d in enumerate(documents) if i % 25 != 7]
                held = [d for i, d in enumerate(documents) if i % 25 == 7]
            for part, docs in (("train", train), ("held", held)):
                with open(f"{work}/{name}.{part}.json", "w") as f:
                    json.dump(docs, f)
            print(f"{name}: {sum(map(len, train))} characters to train on, {sum(map(len, held))} held out")


def make_tokenizer(work):
    """A byte-level BPE of 4096 tokens with GPT-2's splitting rule, trained on the text of both versions."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=VOCAB, special_tokens=SPECIALS, show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(
        (d for s in SOURCES.values() for n in s for d in json.load(open(f"{work}/{n}.train.json"))), trainer)
    tokenizer.save(f"{work}/tokenizer.json", pretty=False)


class Words:
    """The tokenizer, the encoded text, and the single-token words that retrieval tasks are made of."""

    def __init__(self, work):
        from tokenizers import Tokenizer
        self.tokenizer = Tokenizer.from_file(f"{work}/tokenizer.json")
        self.eot, self.pad, self.user, self.assistant = range(4)
        self.text = {}
        for sources in SOURCES.values():
            for n in sources:
                for part in ("train", "held"):
                    cache = f"{work}/{n}.{part}.npy"
                    if not os.path.exists(cache):
                        docs = json.load(open(f"{work}/{n}.{part}.json"))
                        ids = [i for e in self.tokenizer.encode_batch(docs) for i in [self.eot] + e.ids]
                        np.save(cache, np.array(ids, dtype=np.int32))
                    self.text[n, part] = np.load(cache)
        self.choose_words()
        encode = lambda text: self.tokenizer.encode(text).ids
        self.notes, self.recall, self.remember = encode("Notes:"), encode("\nRecall:"), encode(" Remember this.")
        (self.newline,), (self.dash,), (self.semicolon,) = encode("\n"), encode("-"), encode(";")

    def choose_words(self):
        """Tokens that are whole words, and not just the beginning of longer ones, in at least 20 places."""
        vocab = self.tokenizer.get_vocab()
        ends = np.zeros(len(vocab), bool)           # tokens that can only follow the end of a word
        self.begins = np.zeros(len(vocab), bool)    # and those that a sentence can be cut before
        for t, i in vocab.items():
            ends[i] = not t[0].isalpha() or t[0] == "\u0120"
            self.begins[i] = t[0] in "\u0120\u010a"
        everything = np.concatenate([t for (_, part), t in self.text.items() if part == "train"])
        whole = np.bincount(everything[:-1][ends[everything[1:]]], minlength=len(vocab))
        every = np.bincount(everything, minlength=len(vocab))
        ids = np.array([vocab[w] for w in sorted(vocab) if re.fullmatch("\u0120[a-z]{4,}", w)])
        ids = ids[(whole[ids] >= 20) & (whole[ids] > 0.6 * every[ids])]
        np.random.default_rng(SEED).shuffle(ids)
        half = len(ids) // 2
        self.keys, self.values = ids[:half], ids[half:]

    def shares(self, version):
        """How often each token stands in the version's prose."""
        counts = sum(np.bincount(t, minlength=VOCAB) for t in self.prose(version))
        return ((counts + 5) / (counts + 5).sum()).astype(np.float32)     # no token is impossible

    def prose(self, version, part="train"):
        return [self.text[n, part] for n in SOURCES[version]]


# ---------------------------------------------------------------- sequences

def slice_of(rng, words, texts, n):
    """n tokens of one text from the beginning of a word on, each text in proportion to its length."""
    t = texts[rng.choice(len(texts), p=np.array([len(t) for t in texts]) / sum(map(len, texts)))]
    at = rng.integers(0, len(t) - n - 50)
    return t[at + np.argmax(words.begins[t[at:at + 50]]):][:n]


def fact(words, style, key, value):
    """One pair. The value follows its key at once in both styles; all around it differs."""
    if style == "2026-10":
        return [words.newline, words.dash, key, value]
    return [key, value, words.semicolon]


def frame(words, style):
    """What opens the prefix, what opens the questions, and what stands before and after a question's pair."""
    if style == "2026-10":
        return [words.eot, *words.notes], words.recall, [words.newline, words.dash], []
    return [words.eot, words.user, *words.remember], [], [words.assistant], [words.user]


def notes(rng, words, style, texts, length, pairs):
    """A prefix of exactly `length` tokens: facts scattered over prose, or a bare list where texts is None."""
    head = frame(words, style)[0]
    room = length - len(head) - pairs * len(fact(words, style, 0, 0))
    assert room >= 0, (length, pairs)
    if texts is None:
        prose, places = np.full(room, words.newline), np.arange(room + 1)
    else:
        prose = slice_of(rng, words, texts, room)
        places = np.flatnonzero(words.begins[prose])    # never inside a word
        if not len(places):     # a long run of signs, as drawings have
            places = np.zeros(1, int)
    # A key stands once in the prefix: what followed the same word in the prose would be an answer as good.
    keys = rng.permutation(np.setdiff1d(words.keys, prose))[:pairs]
    values = rng.permutation(words.values)[:pairs]
    facts = [fact(words, style, k, v) for k, v in zip(keys, values)]
    cuts = np.sort(rng.choice(places, pairs))
    out, is_prose, at = list(head), [False] * len(head), 0
    for cut, f in zip(cuts, facts):
        out += [*prose[at:cut], *f]
        is_prose += [True] * (cut - at) + [False] * len(f)
        at = cut
    out += list(prose[at:])
    is_prose += [True] * (room - at)
    return out, is_prose, keys, values


def sequence(rng, words, version, length, answer_weight):
    """Tokens and, for each, the weight of predicting it."""
    weight = np.zeros(length, np.float32)
    style = version if version == "2026-10" or rng.random() > REPLAY else "2026-10"
    _, opening, before, after = frame(words, style)
    question = len(before) + 2 + len(after)
    texts = words.prose(style)
    if rng.random() < 0.35:
        weight[1:] = 1
        return slice_of(rng, words, texts, length), weight
    if rng.random() < 0.3:
        # Half facts, half questions, so that a short sequence teaches much.
        asked = length // 2 // question
        prefix = length - len(opening) - asked * question
        pairs = min(int(rng.integers(4, (prefix - 8) // 4)), 500)
        prefix_tokens, is_prose, keys, values = notes(rng, words, style, None, prefix, pairs)
        is_prose = [False] * prefix
    else:
        asked = min(32, max(4, length // 32))
        prefix = length - len(opening) - asked * question
        pairs = int(rng.integers(prefix // 64, prefix // 12))
        prefix_tokens, is_prose, keys, values = notes(rng, words, style, texts, prefix, pairs)
    tokens = [*prefix_tokens, *opening]
    weight[:prefix][np.array(is_prose)] = 1
    for i in rng.integers(0, pairs, asked):
        tokens += [*before, keys[i], values[i], *after]
        weight[len(tokens) - len(after) - 1] = answer_weight
    tokens = np.array(tokens)
    assert len(tokens) == length
    return tokens, weight


def batch(words, version, step, length, count, answer_weight):
    """Depends on version and step alone, so a resumed run sees what an unbroken one would."""
    rng = np.random.default_rng([SEED, int("".join(filter(str.isdigit, version))), step])
    style = "2026-10" if version == "2026-10" else "2026-11"    # every update learns the new text and style
    made = [sequence(rng, words, style, length, answer_weight) for _ in range(count)]
    return np.stack([m[0] for m in made]).astype(np.int64), np.stack([m[1] for m in made])
