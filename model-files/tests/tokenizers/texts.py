"""The texts of generate.py: those to train on, and those to tokenise."""

import random

WORDS = (
    "the of and to in is that for it was on are as with they be at this have from or one had by word but not what all were "
    "we when your can said there use an each which she do how their if will up other about out many then them these so some "
    "her would make like him into time has look two more write go see number no way could people my than first water been "
    "call who its now find long down day did get come made may part token model server prefill decode cache block request "
    "return function import class print error value string list index None True False self Hello World I'm you're don't "
    "it's we've he'll she'd"
).split()
OTHER = (
    "こんにちは 世界 日本語 東京 漢字 仮名 你好 世界 中文 分词 模型 我们 可以 한국어 안녕하세요 Привет мир модель слово Ελληνικά λόγος "
    "العربية مرحبا עברית नमस्ते हिन्दी ภาษาไทย café naïve über straße Ärger señor français coração Łódź İstanbul žluťoučký "
    "😀 🎉 👍 🚀 ❤️ 👩‍💻 🇩🇪 … — “quotes” € £ → ≠ ½ ²"
).split()
CODE = [
    "def f(x):\n    return x + 1\n",
    "for (int i = 0; i < n; i++) {\n\tsum += a[i];\n}\n",
    'fn main() {\n    println!("{}", 42);\n}\n',
    '{"key": [1, 2.5, null, true], "s": "x\\n"}\n',
    "SELECT * FROM t WHERE id >= 10 AND name != 'a';\n",
    "<div class=\"x\">\n  <p>text</p>\n</div>\n",
    "https://example.com/a/b?c=d&e=%20f#g ",
    "x = y ** 2 // 3 % 7 == 0 && !z || (a->b) ",
]


def corpus():
    """Text to train on: words in all writings, numbers, code, white space. The same on every run."""
    chance = random.Random(7)
    lines = []
    for _ in range(1500):
        words = [chance.choice(WORDS if chance.random() < 0.8 else OTHER) for _ in range(chance.randint(3, 14))]
        if chance.random() < 0.3:
            words.insert(chance.randrange(len(words)), str(chance.randrange(10 ** chance.randint(1, 7))))
        if chance.random() < 0.2:
            words = [word.capitalize() if chance.random() < 0.5 else word.upper() for word in words]
        lines.append(" ".join(words) + chance.choice([".", "!", "?", ",", "...", " -", "\n", "\n\n", "  ", ""]))
    return lines + CODE * 12


HARD = [
    "", " ", "  ", "   ", "    ", "     ", "        ", "\t", "\t\t", "\n", "\n\n", "\n\n\n", "\n\n\n\n\n", " \n", "\n ", "\r\n", "\r\n\r\n", " \t\n ",
    "\r", "a\rb", "a", " a", "  a", "   a", "a ", "a  ", "a\n", "a\n\n", "a \n b", "\n\na", "a\tb", "\ta", "  \n  \n  a", "a   b    c     d",
    "\u00a0", "a\u00a0b", "\u2003x", "\u3000y", "a\u3000b", "\u200bz", "x\u200dy", "\ufeffa", "a\u0085b", "\u2028",
    "Hello World", "hello world!", "Hello, world. How are you?", "HELLO WORLD", "HeLLo WoRLD", "helloWorld camelCase XMLHttpRequest",
    "I'm you're we've he'll she'd it's don't", "I'M YOU'RE WE'VE HE'LL SHE'D IT'S DON'T", "'s 't 're", "rock'n'roll ''quoted'' 'x'", "l’été c’est",
    "0", "7", "42", "123", "1234", "12345", "123456", "1234567", "1234567890123", " 1", " 12 345", "3.14159", "1,000,000", "1.5e-10", "0x1F", "v1.2.3",
    "a1b2c3", "1st 2nd", "٣٤٥", "१२३", "½ ² ³ ①", "Ⅷ", "年2024月12日31", "100%", "$9.99", "+49 (30) 123-456",
    "!", "!!", "...", "!?!?", "\"quoted\"", "(a) [b] {c} <d>", "a-b_c/d\\e", "=====", "------", "```rust\n", "# Title\n## Sub", "* a\n* b\n", "&amp; &lt;", "~`@^|",
    "a.b.c", "user@example.com", "https://example.com/a/b?c=d&e=%20f#g", "C:\\Users\\x", "/usr/bin/env", "a && b || !c", "x->y::z", "a!=b==c>=d", "—–-", "“x” ‘y’ «z»",
    "你好", "你好世界", "我们 可以", "日本語の文章です。", "漢字とかなカナ", "東京 2024年", "こんにちは、世界！", "한국어 안녕하세요", "我想在apple工作1314", "中文,英文mixed。",
    "Привет мир", "ПРИВЕТ", "Ελληνικά", "العربية مرحبا", "עברית", "नमस्ते", "हिन्दी भाषा", "ภาษาไทย", "កាន់តែពិសេស", "ქართული",
    "café", "cafe\u0301", "e\u0301e\u0301", "naïve über straße", "ǅ ǆ ß ſ", "ﬁ ﬂ", "Å Å A\u030a", "İi ıI", "żółć", "n\u0303o",
    "😀", "😀😀", "😀 😀", "a😀b", "👩‍💻", "🇩🇪🇫🇷", "👍🏽", "❤️", "🎉!", "text🚀text", "\U0001f468\u200d\U0001f469\u200d\U0001f467", "🀄1🀄", "\U00010348", "\U0001d400x", "\U00020000",
    "\x00", "a\x00b", "\x01\x02", "\x7f", "\x1b[0m", "\ufffd", "a\ufffd", "\uffff", "\ue000", "\U0010ffff",
    "def f(x):\n    return x + 1\n", "if x:\n\tpass\n", "for (int i=0;i<n;i++) {\n\tsum += a[i];\n}", "{\"k\": [1, 2.5, null]}", "<p class=\"x\">t</p>", "SELECT * FROM t;\n", "    x\n        y\n    z",
    "a\n\n\nb", "a \n\n b", "a  \nb", "\n  a", "x\r\ny", "a.\n\nB", "end.\n", "?\n!\n", "!\n\n\n", " !\n", "\n!", " \n\n ", "\t \t",
    "<", ">", "<|", "|>", "<s", "</", "<|im", "<0x41>", "<0x0A>", "<unk", "[INST", "▁", "▁▁", "a▁b", " ▁", "Ġ", "Ċ a", "Ġthe",
    "aaaaaaaaaaaaaaaaaaaaaaaa", "abababababababababab", "thethethethe", "Donaudampfschifffahrtsgesellschaft", "supercalifragilistic",
    "zzzzzzzzzzzzzzzzzzzzzzzzz", "--------------------", "..........", "1 2 3 4 5 6 7 8 9", "          a", "a          b",
]

LONG = [["a", 12000], ["ab1", 3000], ["漢", 4000], ["😀", 2500], ["xyzzy", 2400], [" ", 900], ["\n", 700], ["é", 5000], ["-", 3000], ["The quick brown fox. ", 300]]


def mixed(count):
    """Texts put together by chance."""
    chance = random.Random(11)
    parts = WORDS + OTHER + ["\n", "\n\n", "  ", "\t", "12", "345", "6789", "!", "?!", "(", ")", "'s", "'LL", "=", "+=", "\r\n", "    "]
    texts = []
    for _ in range(count):
        pieces = [chance.choice(parts) for _ in range(chance.randint(2, 6))]
        texts.append(chance.choice(["", " "]).join(pieces))
    return texts


def with_added(added):
    """Texts around a family's added tokens."""
    names = [token["content"] for token in added]
    texts = []
    for name in names[:6]:
        texts += [name, f"a{name}b", f" {name} ", f"a {name} b", f"{name}\n", f"{name}{name}"]
    first, last = names[0], names[-1]
    texts += [
        f"  {last}  x", f"{first}Hello{last}", f"{first}\n\nHello {last}\n\n{first} 12", f"\n{last}\n", f"a{first[:-1]}b", f"{last[1:]}", f"é{last}é",
        f"😀{first}😀", f"{first} {last}", f"{last}\t{first}", f"it's{last}'s", f"123{first}456", first.upper(), f"x{last} ", f"{last} 你好{first}世界",
    ]
    return texts


# Bytes that are no text, and text of single bytes.
BROKEN = [
    b"\x80", b"\xbf\xbf", b"\xc3", b"\xe4", b"\xe4\xbd", b"\xf0", b"\xf0\x9f", b"\xf0\x9f\x98", b"\xff", b"\xfe\xff", b"\xc0\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80",
    b"\xc3\xa9", b"\xe4\xbd\xa0", b"\xf0\x9f\x98\x80", b"\xc3\xa9\xff", b"\xff\xc3\xa9", b"\xe4\xbd\xa0\xe5\xa5", b"\xf0\x9f\x98\x80\xf0\x9f\x98", b"\xf0\x9f\xe4\xbd\xa0",
    b"\xe4\xbd\xe4\xbd\xa0", b"\xc3\xc3\xa9", b"\x80\x80\x80\x80", b"\xf5\x80", b"\xe0\x80\xaf", b"\xf0\x80\x80\xaf", b"\xc3\xa9\xc3\xa9", b"\xf0\x9f\x98\xff", b"\xe4\xffA\xbd",
]
