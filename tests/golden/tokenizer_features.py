"""Small tokenizers, trained here, that try the features of tokenizer.json that the published ones do not use."""

import json

import tokenizers

from tokenizer_vocabularies import added, byte_level, split

ADDED = ["[both]", "[left]", "[right]", "[word]", "[Norm É]", "[plain]", "  two", "[pl"]


def trained(text, pre_tokenizer, size, alphabet=None):
    """The model of a BPE trained on text: {"vocab", "merges"}."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizer
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=size, special_tokens=["[UNK]"], show_progress=False,
                                             initial_alphabet=alphabet or [], limit_alphabet=150)
    tokenizer.train_from_iterator(text, trainer)
    return json.loads(tokenizer.to_str())["model"]


def made(text):
    """{name: tokenizer.json}."""
    pre = tokenizers.pre_tokenizers
    by_bytes = trained(text, pre.ByteLevel(add_prefix_space=False), 1500, pre.ByteLevel.alphabet())
    by_characters = trained(text, pre.Metaspace(prepend_scheme="always"), 1500)
    small_alphabet = trained(text[:50], pre.ByteLevel(add_prefix_space=False), 200)

    def document(base, **fields):
        size = len(base["vocab"])
        tokens = [added(size, "[both]", lstrip=True, rstrip=True), added(size + 1, "[left]", lstrip=True),
                  added(size + 2, "[right]", False, rstrip=True), added(size + 3, "[word]", False, single_word=True),
                  added(size + 4, "[Norm É]", False, normalized=True), added(size + 5, "[plain]", False),
                  added(size + 6, "  two", False, normalized=True), added(size + 7, "[pl")]
        result = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": tokens, "normalizer": None,
                  "pre_tokenizer": None, "post_processor": None, "decoder": None,
                  "model": {**base, **fields.pop("model", {})}}
        result.update(fields)
        return result

    def sequence(*steps):
        return {"type": "Sequence", "pretokenizers": list(steps)}

    metaspace = {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always", "split": True}
    template = {"type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": "[both]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}},
                           {"SpecialToken": {"id": "[UNK]", "type_id": 0}}, {"SpecialToken": {"id": "[both]", "type_id": 0}}],
                "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
                "special_tokens": {"[both]": {"id": "[both]", "ids": [len(by_bytes["vocab"])], "tokens": ["[both]"]},
                                   "[UNK]": {"id": "[UNK]", "ids": [0], "tokens": ["[UNK]"]}}}
    # The reference panics where a token is shorter than stop, so only the start is compared.
    strip = {"type": "Strip", "content": " ", "start": 2, "stop": 0}
    features = {
        "prefix-space": document(by_bytes, pre_tokenizer=byte_level(add_prefix_space=True), decoder=byte_level(),
                                 post_processor={"type": "Sequence", "processors": [byte_level(), template]}),
        "digits": document(by_bytes, pre_tokenizer=sequence({"type": "Digits", "individual_digits": False},
                                                            byte_level(use_regex=False)), decoder=byte_level()),
        "not-last": document(by_bytes, pre_tokenizer=sequence(byte_level(), split("Ġ", "MergedWithNext", kind="String")),
                             decoder={"type": "Sequence", "decoders": [byte_level(), strip]}),
        "few-bytes": document(small_alphabet, pre_tokenizer=byte_level(), decoder=byte_level()),
        "few-bytes-fused": document(small_alphabet, pre_tokenizer=byte_level(), decoder=byte_level(), model={"fuse_unk": True}),
        "no-unknown": document(small_alphabet, pre_tokenizer=byte_level(), decoder=byte_level(), model={"unk_token": None}),
        "metaspace": document(by_characters, pre_tokenizer=metaspace, decoder=metaspace),
        "metaspace-never": document(by_characters, model={"fuse_unk": True},
                                    pre_tokenizer={**metaspace, "prepend_scheme": "never"},
                                    decoder={**metaspace, "prepend_scheme": "never"}),
        "plain": document(by_characters),
        "normalizers": document(by_characters, pre_tokenizer=split(r"\s+", "Removed"), normalizer={
            "type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Replace", "pattern": {"Regex": r"\d{2,}|[aeiou]*x"},
                                                                  "content": "<n>"},
                                                {"type": "Replace", "pattern": {"String": "é"}, "content": "e"}]},
            decoder={"type": "Sequence", "decoders": [strip, {"type": "Fuse"}, strip]}),
    }
    patterns = [r"\w+|[^\w\s]+", r"\b", r"[\s\-]+|\h+", r"(?i)the|[^\S\n]+", r"^.*$", r"\p{Han}+|\p{^L}", r"(?<=\d)\D|\p{Lu}\p{Ll}*+",
                r"[^\r\n/]{2,3}?|{x}", r"\u0041|[\x41-\x5a]", r"a*"]
    behaviors = ["Isolated", "Removed", "Contiguous", "MergedWithPrevious", "MergedWithNext"]
    for i, pattern in enumerate(patterns):
        for invert in (False, True):
            behavior = behaviors[(i + 2 * invert) % len(behaviors)]
            features[f"split-{i}-{behavior}-{invert}"] = document(
                by_bytes, pre_tokenizer=sequence(split(pattern, behavior, invert), byte_level(use_regex=False)), decoder=byte_level())
    return {f"feature-{name}": content for name, content in features.items()}
