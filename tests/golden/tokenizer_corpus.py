"""The text of the tokenizer test: real text in many scripts, code, and what breaks tokenizers.

Real text is Django's: its translations into some ninety languages and its source files, from the
pinned wheel. The rest is made here from Unicode's tables and a fixed seed. Nothing depends on the
machine but Python's Unicode version (14 in Debian 12's, the one that PCRE2 there has as well).
"""

import ast
import random
import re
import unicodedata
import zipfile

LINES_A_LANGUAGE = 110
CODE_LINES = 2500
ODD_LINES = 2000  # at least so many come first of the made text

EMOJI = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "🇫🇷🇯🇵🇧🇷", "👍🏽", "🤷🏿‍♀️", "❤️‍🔥", "1️⃣2️⃣", "🧑‍🚀", "😀😃😄", "☃️", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "🫱🏻‍🫲🏿"]
SPACES = ["\t", "\n", "\v", "\f", "\r", "\r\n", " ", "\x1c", "\x85", "\xa0", "\u1680", "\u180e", "\u2000", "\u2003",
          "\u2009", "\u200a", "\u200b", "\u2028", "\u2029", "\u202f", "\u205f", "\u2060", "\u3000", "\ufeff"]
COMPOSED = ["Café", "Cafe\u0301", "\u1e69", "s\u0323\u0307", "s\u0307\u0323", "\u212b", "A\u030a", "\uac00", "\u1100\u1161",
            "\u1100\u1161\u11a8", "q\u0323\u0307\u0301\u0327", "\u0958", "\u0915\u093c", "\u2126", "\ufb1d", "\u05d9\u05b4", "\U0001d15e",
            "\u0344", "e\u0315\u0300\u05ae\u0062", "\u0061\u0315\u0300\u05ae\u0301\u0062", "\uf900", "\u3099\u304b", "\u304b\u3099"]
CONTRACTIONS = ["I'm we're they've he'll she'd it's don't", "I'M WE'RE THEY'VE HE'LL SHE'D IT'S DON'T", "'s's'S'ſ'tT'",
                "l’été aujourd'hui 'll'LL'lL '' ' s", "rock'n'roll y'all'd've"]
FAMILIES = ["LATIN", "CYRILLIC", "GREEK", "ARABIC", "HEBREW", "DEVANAGARI", "BENGALI", "TAMIL", "TELUGU", "KANNADA",
            "MALAYALAM", "GURMUKHI", "THAI", "MYANMAR", "KHMER", "GEORGIAN", "ARMENIAN", "HANGUL", "CJK", "HIRAGANA", "KATAKANA"]


def translations(wheel, rng):
    """Lines of translated messages, some of every language."""
    by_language = {}
    for name in sorted(n for n in wheel.namelist() if n.endswith("LC_MESSAGES/django.po")):
        language = name.split("/locale/")[1].split("/")[0]
        text = wheel.read(name).decode()
        for block in re.findall(r'^msgstr(?:\[\d\])? ((?:"(?:[^"\\]|\\.)*"\s*)+)', text, re.M):
            message = "".join(ast.literal_eval(part) for part in re.findall(r'"(?:[^"\\]|\\.)*"', block))
            if message and not message.startswith(("Project-Id", "\nProject-Id")):
                by_language.setdefault(language, []).append(message)
    lines = []
    for language in sorted(by_language):
        messages = by_language[language]
        rng.shuffle(messages)
        lines += messages[:LINES_A_LANGUAGE]
    return lines


def code(wheel, rng):
    """Lines of Python, JavaScript, CSS, HTML and SQL-like text, alone and in small runs."""
    names = sorted(n for n in wheel.namelist() if n.endswith((".py", ".js", ".css", ".html")))
    lines = []
    for name in rng.sample(names, 160):
        source = wheel.read(name).decode().split("\n")
        for _ in range(CODE_LINES // 160 + 1):
            at = rng.randrange(len(source))
            lines.append("\n".join(source[at:at + rng.choice([1, 1, 1, 2, 5, 12])]))
    return [line for line in lines if line][:CODE_LINES]


def every_character():
    """Every assigned character but private ones, each next to letters, digits, spaces and marks."""
    around = ["a{}b", " {}", "{} ", "1{}2", "{}", "'{}", "\n{}", ".{}!", "\u05d0{}", "\u6f22{}"]
    characters = [chr(c) for c in range(0x110000) if unicodedata.category(chr(c)) not in ("Cn", "Cs", "Co")]
    common = [c for c in characters if unicodedata.name(c, "").startswith(("CJK UNIFIED", "HANGUL SYLLABLE", "TANGUT", "NUSHU"))]
    rare = sorted(set(characters) - set(common))
    lines = []
    for i in range(0, len(rare), 40):
        lines.append("".join(around[(i // 40 + k) % len(around)].format(c) for k, c in enumerate(rare[i:i + 40])))
    # Letters of the large blocks are all alike: in longer runs.
    lines += ["".join(common[i:i + 100]) for i in range(0, len(common), 100)]
    # Once more, alone between letters, for the properties that patterns ask for.
    lines += ["x".join(rare[i:i + 100]) for i in range(0, len(rare), 100)]
    return lines


def odd_lines(rng, special_tokens):
    lines = ["", " ", "  ", "\n", "\n\n\n", " \n \n", "\r\n\r\n", "\t\tx", "x  ", "  x  y   z    ", "a\x00b", "".join(map(chr, range(32)))]
    lines += CONTRACTIONS + COMPOSED + EMOJI + ["".join(EMOJI), "".join(COMPOSED), "x" * 300, "ab" * 200, " " * 257, "é" * 100, "=" * 90]
    lines += ["0" * n for n in range(1, 24)] + ["12345678901234567890 3.14159 1,000,000 ١٢٣٤٥٦ १२३ Ⅷ½²³①", "٠٫٥ 50% $1.99 €3 №5"]
    lines += ["السلام عليكم world שלום abc 123 \u202eabc\u202c", "中文English混排，標點。「引號」", "日本語カタカナひらがなｶﾀｶﾅ", "ไทยภาษา ກ ខ မြန်မာ"]
    lines += ["a" * 5000, "ab c" * 700, "漢字" * 900, "\n" * 400, " \n" * 300, "\t" * 129 + "x", "aAbB" * 300 + " tail"]
    pool = SPACES + EMOJI + COMPOSED + CONTRACTIONS + ["the", "Word", "123", "4567", "über", "слово", "كلمة", "字", "!", "...", "//", "{}", "_", "-", "'s", "<", "|>"]
    for _ in range(1500):
        lines.append("".join(rng.choice(pool) for _ in range(rng.randint(2, 14))))
    for _ in range(300):
        lines.append("".join(rng.choice(SPACES + ["a", "1"]) for _ in range(rng.randint(2, 30))))
    for token in special_tokens:
        for text in ("{}", "a{}b", " {} ", "{0}{0}", "Hello {} world\n", "é{}1", "{}\n\n{}", "x  {}  y"):
            lines.append(text.replace("{0}", token).replace("{}", token))
        lines += [token[:-1], token[1:], token.upper(), token[: len(token) // 2] + " " + token[len(token) // 2:]]
    return lines


def scripts_of(lines):
    found = {}
    for line in lines:
        seen = {unicodedata.name(c, "").split(" ")[0] for c in line if c.isalpha()}
        for family in seen.intersection(FAMILIES):
            found[family] = found.get(family, 0) + 1
    return found


def corpus(django_wheel, special_tokens):
    """(real text, made text): two lists of lines; a line may hold line ends."""
    rng = random.Random(20261)
    with zipfile.ZipFile(django_wheel) as wheel:
        real = translations(wheel, rng) + code(wheel, rng)
    return real, odd_lines(rng, special_tokens) + every_character()
