"""Compares our tokenizers with the reference, the `tokenizers` package: ids and decoded text, line by line.

  tokenizer_reference.py --dump build/bin/tokenizer_dump [--cache FOLDER] [--only NAME]
  tokenizer_reference.py --dump ... --speed     single-threaded throughput of both instead

The first run downloads pinned wheels into the cache and builds the folders there; later runs are
offline. Fails when anything is missing or anything differs; prints the first differences.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import random
import subprocess
import sys
import time
import unicodedata

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import tokenizers  # noqa: E402

import tokenizer_corpus  # noqa: E402
import tokenizer_features  # noqa: E402
import tokenizer_vocabularies as vocabularies  # noqa: E402

SHOWN = 5
RANDOM_SEQUENCES = 500
LEAST_LINES = 10_000
LEAST_SCRIPTS = 12
# The reference's NFC follows a Unicode older than 11, ours 15: lines where that shows are left out.
MOST_NEWER = 3
# These share their words with another tokenizer that reads everything.
SHORTENED = ("llama3-pairs", "mistral-metaspace", "mistral-model-new")


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        path = folder / name.replace("__", ".")
        data = content if isinstance(content, bytes) else json.dumps(content, ensure_ascii=False).encode()
        if not path.is_file() or path.read_bytes() != data:
            path.write_bytes(data)


def folders(cache, training_text):
    """[(name, our folder, the reference's tokenizer.json)]; tokenizers that only differ in form share a reference."""
    made = pathlib.Path(vocabularies.__file__)
    stamp = vocabularies.sha256(made) + vocabularies.sha256(pathlib.Path(tokenizer_features.__file__))
    result = []
    for name, make in vocabularies.published(cache).items():
        folder = cache / name
        # Building takes seconds: done again only when the code that builds has changed.
        if not (folder / "stamp").is_file() or (folder / "stamp").read_text() != stamp or name == "smollm2":
            write(folder, tokenizer__json=make(cache))
            (folder / "stamp").write_text(stamp)
        result.append((name, folder, folder / "tokenizer.json"))
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>", "add_bos_token": True, "add_eos_token": False}
    for name, legacy, like in (("mistral-model", True, "mistral-prepend"), ("mistral-model-new", False, "mistral-metaspace")):
        write(cache / name, tokenizer__model=vocabularies.mistral_model(cache), tokenizer_config__json={**tokens, "legacy": legacy})
        result.append((name, cache / name, cache / like / "tokenizer.json"))
    for name, content in tokenizer_features.made(training_text).items():
        write(cache / name, tokenizer__json=content)
        result.append((name, cache / name, cache / name / "tokenizer.json"))
    return result


def ask(dump, folder, requests):
    lines = "".join(json.dumps(request) + "\n" for request in requests)
    run = subprocess.run([dump, str(folder)], input=lines, capture_output=True, text=True, encoding="utf-8")
    if run.returncode != 0:
        sys.exit(f"{folder}: tokenizer_dump failed: {run.stderr.strip()}")
    answers = [json.loads(line) for line in run.stdout.split("\n")[:-1]]
    if len(answers) != len(requests):
        sys.exit(f"{folder}: {len(answers)} answers to {len(requests)} requests")
    return answers


def sequences_to_decode(reference, encoded, rng):
    """Ids of real lines, and random ones: of the whole vocabulary, of single bytes, of both mixed with ids outside of it."""
    size = max(reference.get_vocab(with_added_tokens=True).values()) + 1
    byte_ids = [i for i in range(size) if (t := reference.id_to_token(i)) is not None and
                (len(t) == 1 or (len(t) == 6 and t.startswith("<0x")))]
    result = [ids for ids in encoded if len(ids) < 2000][::5]
    result += [ids[rng.randrange(len(ids)):] for ids in encoded[::7] if 0 < len(ids) < 2000]  # starts in mid-character
    for _ in range(RANDOM_SEQUENCES):
        result.append([rng.randrange(size) for _ in range(rng.randint(1, 30))])
        result.append([rng.choice(byte_ids) for _ in range(rng.randint(1, 12))])
        result.append([rng.choice([rng.choice(byte_ids), rng.randrange(size), size + 7]) for _ in range(rng.randint(1, 20))])
    return result


def compare(name, folder, reference_file, lines, dump):
    """Counts of differences, of lines and of sequences that were compared, and seconds."""
    reference = tokenizers.Tokenizer.from_file(str(reference_file))
    rng = random.Random(name)
    start = time.perf_counter()
    differences = 0

    def differ(what, ours, theirs):
        nonlocal differences
        differences += 1
        if differences <= SHOWN:
            print(f"{name}: {what}\n  ours      {str(ours)[:300]}\n  reference {str(theirs)[:300]}", flush=True)

    requests = [{"text": line, "special": i % 2 == 0} for i, line in enumerate(lines)]
    encoded = [reference.encode(line, add_special_tokens=i % 2 == 0).ids for i, line in enumerate(lines)]
    sequences = sequences_to_decode(reference, encoded, rng)
    requests += [{"ids": ids, "skip_special": i % 2 == 0} for i, ids in enumerate(sequences)]
    answers = ask(dump, folder, requests)
    for line, ids, answer in zip(lines, encoded, answers):
        if answer.get("ids") != ids:
            differ(f"ids of {line[:120]!r}", answer.get("ids", answer), ids)
    for i, (ids, answer) in enumerate(zip(sequences, answers[len(lines):])):
        text = reference.decode(ids, skip_special_tokens=i % 2 == 0)
        if answer["text"] != text:
            differ(f"text of {ids[:40]}", ascii(answer["text"]), ascii(text))
        if "".join(answer["pieces"]) != text:
            differ(f"streamed text of {ids[:40]}", ascii(answer["pieces"]), ascii(text))
    return differences, len(lines), len(sequences), time.perf_counter() - start


def measure(name, folder, reference_file, text, dump):
    """MB/s of both on one long text and on the same text line by line."""
    reference = tokenizers.Tokenizer.from_file(str(reference_file))
    megabytes = len(text.encode()) / 1e6
    reference.encode(text)
    start = time.perf_counter()
    reference.encode(text)
    theirs = megabytes / (time.perf_counter() - start)
    answer = ask(dump, folder, [{"text": text, "repeat": 1}, {"text": text, "repeat": 3}])[1]
    print(f"{name:20} ours {megabytes * 3 / answer['seconds']:7.2f} MB/s   reference {theirs:7.2f} MB/s   "
          f"{megabytes:.2f} MB, {answer['tokens'] // 3} tokens", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dump", required=True)
    parser.add_argument("--cache", type=pathlib.Path, default=pathlib.Path(".cache/tokenizers"))
    parser.add_argument("--only")
    parser.add_argument("--speed", action="store_true")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)

    special = ["<|endoftext|>", "<|im_start|>", "<|begin_of_text|>", "<|eot_id|>", "<s>", "</s>", "<unk>", "<think>",
               "<｜begin▁of▁sentence｜>", *tokenizer_features.ADDED]
    django = vocabularies.wheel(arguments.cache, "django").filename
    real, made = tokenizer_corpus.corpus(django, special)
    nfc = tokenizers.normalizers.NFC()
    newer = [line for line in made if nfc.normalize_str(line) != unicodedata.normalize("NFC", line)]
    if len(newer) > MOST_NEWER:
        sys.exit(f"the reference normalizes {len(newer)} lines otherwise than Python")
    made = [line for line in made if line not in newer]
    lines = real + made
    scripts = tokenizer_corpus.scripts_of(real)
    print(f"{len(lines)} lines, {len(real)} of them real text; scripts: {scripts}", flush=True)
    if len(lines) < LEAST_LINES or len(scripts) < LEAST_SCRIPTS:
        sys.exit("the text is not what it should be")

    chosen = [item for item in folders(arguments.cache, real[::3]) if arguments.only in (None, item[0])]
    if not chosen:
        sys.exit(f"there is no tokenizer {arguments.only}")
    if arguments.speed:
        for item in chosen:
            measure(*item, "\n".join(real), arguments.dump)
        return

    def text_for(name):
        if name.startswith("feature-"):
            return real[::8] + made[:tokenizer_corpus.ODD_LINES] + made[tokenizer_corpus.ODD_LINES::4]
        return real[::3] + made if name in SHORTENED else lines

    failed = []
    with concurrent.futures.ProcessPoolExecutor(2) as pool:
        results = pool.map(compare, *zip(*[(*item, text_for(item[0]), arguments.dump) for item in chosen]))
        for (name, _, _), (differences, encoded, decoded, seconds) in zip(chosen, results):
            print(f"{name:32} {encoded} lines, {decoded} sequences decoded: {differences} differences, {seconds:.1f} s",
                  flush=True)
            if differences:
                failed.append(name)
    if failed:
        sys.exit(f"different from the reference: {', '.join(failed)}")


if __name__ == "__main__":
    main()
