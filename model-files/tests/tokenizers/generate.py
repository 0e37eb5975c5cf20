#!/usr/bin/env python3
"""Makes the tokenizer families of this folder: small vocabularies with each family's true rules, and what Hugging Face's
`tokenizers` (and Google's `sentencepiece`) make of 200 texts and more.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install tokenizers==0.22.2 sentencepiece==0.2.3 protobuf
    /tmp/v/bin/python generate.py            # writes FAMILY/tokenizer.json and FAMILY/cases.json (and FAMILY/gguf.json)

The vocabularies are trained here, on text that is made here: nothing of a published vocabulary is in them. The rules around
them (normalizer, pre-tokenizer, decoder, post-processor, how added tokens behave) are those of the published tokenizer.json.

FAMILY/cases.json holds
    gguf     keys of a GGUF file beside those that follow from tokenizer.json or gguf.json
    prefix, suffix   what is put around a text with special tokens (checked here for every text)
    cases    texts: `ids`; `decoded` where it is not the text; `skip` where leaving special tokens out gives other text;
             `gguf`: the same three where a GGUF file cannot say what tokenizer.json says (white space around added tokens,
             tokens that look special). Long texts: `repeat` [unit, times], and of the ids `count` and `fnv` (FNV-1a, 64 bits);
             `shorter`: what decoding loses at the begin.
    bytes    token sequences that are no text (cut and lone bytes), with what they decode to
"""

import json
import os
import tempfile

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

from texts import BROKEN, HARD, LONG, corpus, mixed, with_added

HERE = os.path.dirname(os.path.abspath(__file__))

# ------------------------------------------------------------------------------------------------------------- families


def token(content, special=True, normalized=False, lstrip=False, rstrip=False):
    return {"content": content, "special": special, "normalized": normalized, "lstrip": lstrip, "rstrip": rstrip}


def specials(*contents):
    return [token(content) for content in contents]


CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|" + TAIL
QWEN2 = CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|" + TAIL
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
BEFORE = r"[^\r\n\p{L}\p{N}]?"
SLASH_TAIL = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = f"{BEFORE}{UPPER}*{LOWER}+{CONTRACTIONS}?|{BEFORE}{UPPER}+{LOWER}*{CONTRACTIONS}?" + r"|\p{N}{1,3}|" + SLASH_TAIL
TEKKEN = f"{BEFORE}{UPPER}*{LOWER}+|{BEFORE}{UPPER}+{LOWER}*" + r"|\p{N}|" + SLASH_TAIL
GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
DEEPSEEK_LETTERS = (
    "\\s?[A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃]+"
)
DEEPSEEK_V3 = (
    "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*|\\s*[\r\n]+|\\s+(?!\\S)|\\s+"
)


def split(pattern, behavior="isolated", invert=False):
    return pre_tokenizers.Split(Regex(pattern), behavior, invert)


def plain():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def words():
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def digits():
    return pre_tokenizers.Digits(individual_digits=True)


def chain(*steps):
    return pre_tokenizers.Sequence(list(steps))


CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN_TOOLS = [token(name, special=False) for name in ("<tool_call>", "</tool_call>")]
DEEPSEEK = ("<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>")

# name: pre-tokenizer, added tokens, and what else is told apart.
BYTE_LEVEL = {
    "gpt2": dict(pre="gpt-2", rule=words, added=specials("<|endoftext|>")),
    "default": dict(
        pre="default", added=specials("<|endoftext|>"),
        rule=lambda: chain(split(r"[\p{P}\$\+<=>\^~\|]+"), split(GPT2), split(r"\p{N}+"), split("[0-9][0-9][0-9]"), plain()),
    ),
    "llama3": dict(
        pre="llama-bpe", rule=lambda: chain(split(LLAMA3), plain()), ignore_merges=True, bos="<|begin_of_text|>",
        added=specials("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|python_tag|>", "<|eot_id|>"),
    ),
    "smollm2": dict(pre="smollm", rule=lambda: chain(digits(), words()), added=specials(*CHATML, "<repo_name>", "<file_sep>")),
    "qwen2": dict(pre="qwen2", rule=lambda: chain(split(QWEN2), plain()), nfc=True, added=specials(*CHATML) + QWEN_TOOLS),
    "qwen3": dict(
        pre="qwen2", rule=lambda: chain(split(QWEN2), plain()), nfc=True,
        added=specials(*CHATML, "<|vision_start|>") + QWEN_TOOLS + [token("<think>", special=False), token("</think>", special=False)],
    ),
    "phi4": dict(
        pre="dbrx", rule=lambda: chain(split(LLAMA3), plain()),
        added=[token(name, lstrip=True, rstrip=True) for name in ("<|endoftext|>", "<|im_start|>", "<|im_sep|>", "<|im_end|>", "<|fim_prefix|>")],
    ),
    "olmo2": dict(
        pre="dbrx", rule=lambda: chain(split(LLAMA3, "removed", True), plain()),
        added=specials("<|endoftext|>", "<|endofprompt|>", "<|pad|>") + [token("<|user|>", special=False), token("<|assistant|>", special=False)],
    ),
    "gpt4o": dict(pre="gpt-4o", rule=lambda: chain(split(O200K), plain()), added=specials("<|endoftext|>", "<|user|>", "<|assistant|>", "<|end|>", "<|system|>")),
    "mistral-nemo": dict(
        pre="tekken", rule=lambda: chain(split(TEKKEN), plain()), ignore_merges=True, bos="<s>",
        added=specials("<s>", "</s>", "<unk>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "<pad>"),
    ),
    "granite": dict(pre="refact", rule=lambda: chain(digits(), words()), added=specials("<|end_of_text|>", "<|start_of_role|>", "<|end_of_role|>", "<|tool_call|>", "<fim_prefix>")),
    "starcoder": dict(pre="starcoder", rule=lambda: chain(digits(), words()), added=specials("<|endoftext|>", "<fim_prefix>", "<fim_middle>", "<fim_suffix>", "<filename>")),
    "command-r": dict(
        pre="command-r", rule=lambda: chain(digits(), words()), nfc=True, bos="<BOS_TOKEN>",
        added=specials("<BOS_TOKEN>", "<PAD>", "<|END_OF_TURN_TOKEN|>") + [token(f"<|{name}_TOKEN|>", special=False) for name in ("START_OF_TURN", "USER", "CHATBOT")],
    ),
    "deepseek-llm": dict(
        pre="deepseek-llm", bos=DEEPSEEK[0], added=specials(*DEEPSEEK) + [token("[PAD]", special=False, normalized=True)],
        rule=lambda: chain(
            split("[\r\n]"), split(DEEPSEEK_LETTERS), split("\\s?[!-/:-~！-／：-～‘-‟　-。]+"), split("\\s+$"), split("[一-龥ࠀ-一가-퟿]+"), digits(), plain(),
        ),
    ),
    "deepseek-coder": dict(
        pre="deepseek-coder", bos=DEEPSEEK[0], added=specials(*DEEPSEEK) + [token("<|EOT|>", special=False, normalized=True), token("<｜fim▁hole｜>", special=False, normalized=True)],
        rule=lambda: chain(split("[\r\n]"), split("\\s?\\p{L}+"), split("\\s?\\p{P}+"), split("[一-龥ࠀ-一가-퟿]+"), digits(), plain()),
    ),
    "deepseek-v3": dict(
        pre="deepseek-v3", bos=DEEPSEEK[0],
        added=specials(*DEEPSEEK) + [token(name, special=False) for name in ("<｜User｜>", "<｜Assistant｜>", "<｜tool▁calls▁begin｜>")] + [token("<think>", special=False)],
        rule=lambda: chain(split("\\p{N}{1,3}"), split("[一-龥぀-ゟ゠-ヿ]+"), split(DEEPSEEK_V3), plain()),
    ),
}

LLAMA_NORMALIZER = lambda: normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
INST = ("[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]")
SENTENCE = {
    "llama2": dict(arch="llama", controls=["<s>", "</s>"], bos="<s>", extra=[]),
    # Mistral's first tokenizers are Llama 2's; from v3 on a space is put before the first word alone.
    "mistral-v3": dict(arch="llama", controls=["<s>", "</s>"], bos="<s>", extra=specials(*INST), first_only=True),
    "phi3": dict(
        arch="phi3", controls=["<s>", "</s>"], bos="<s>",
        extra=specials("<|endoftext|>") + [token(name, rstrip=True) for name in ("<|assistant|>", "<|system|>", "<|end|>", "<|user|>")],
        rstrip=["</s>"],
    ),
    "gemma": dict(
        arch="gemma2", controls=["<pad>", "<eos>", "<bos>"], bos="<bos>", extra=[], gemma=True,
        user=["<start_of_turn>", "<end_of_turn>", "<table>", "</b>"] + ["\n" * n for n in range(1, 7)] + ["▁" * n for n in range(2, 9)] + ["\t\t"],
    ),
}


def looks_special(content):
    """What convert_hf_to_gguf.py of llama.cpp takes for a control token, flag or not."""
    return content in ("<pad>", "<mask>", "<2mass>", "[@BOS@]") or any(
        content.startswith(a) and content.endswith(b) for a, b in (("<|", "|>"), ("<｜", "｜>"), ("<unused", ">"))
    )


def add(tokenizer, added):
    tokenizer.add_tokens([AddedToken(t["content"], special=t["special"], normalized=t["normalized"], lstrip=t["lstrip"], rstrip=t["rstrip"]) for t in added])


def add_bos(tokenizer, bos, byte_level):
    steps = [processors.ByteLevel(trim_offsets=False)] if byte_level else []
    if bos:
        steps.append(processors.TemplateProcessing(single=f"{bos} $A", pair=f"{bos} $A {bos} $B:1", special_tokens=[(bos, tokenizer.token_to_id(bos))]))
    if steps:
        tokenizer.post_processor = processors.Sequence(steps)


def byte_level(spec, size=620):
    """The tokenizers of a byte-level family: as tokenizer.json says, and as a GGUF file can say it."""
    trained = Tokenizer(models.BPE())
    if spec.get("nfc"):
        trained.normalizer = normalizers.NFC()
    trained.pre_tokenizer = spec["rule"]()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False)
    trained.train_from_iterator(corpus(), trainer)
    state = json.loads(trained.to_str())["model"]
    vocab, merges = dict(state["vocab"]), [tuple(pair) for pair in state["merges"]]
    if spec.get("ignore_merges"):
        # Words that no merge leads to: such are taken whole.
        for word in ("Ġsupercali", "Donau", "漢字"):
            name = word if word[0] != "漢" else "".join(byte_names()[byte] for byte in word.encode())
            vocab.setdefault(name, len(vocab))

    def build(added):
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=spec.get("ignore_merges", False)))
        if spec.get("nfc"):
            tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = spec["rule"]()
        tokenizer.decoder = decoders.ByteLevel()
        add(tokenizer, added)
        add_bos(tokenizer, spec.get("bos"), True)
        return tokenizer

    as_gguf = [token(t["content"], special=t["special"] or looks_special(t["content"])) for t in spec["added"]]
    return build(spec["added"]), build(as_gguf)


def byte_names():
    """The character of each byte in byte-level BPE."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in kept]
    return {**{byte: chr(byte) for byte in kept}, **{byte: chr(256 + n) for n, byte in enumerate(rest)}}


def merges_of(vocab, scores):
    """The merges of pieces with scores, ordered as `generate_merges` of transformers orders them."""
    merges = []
    for piece, score in scores:
        local = [(piece[:cut], piece[cut:], score) for cut in range(1, len(piece)) if piece[:cut] in vocab and piece[cut:] in vocab]
        merges += sorted(local, key=lambda merge: (vocab[merge[0]], vocab[merge[1]]))
    merges.sort(key=lambda merge: (merge[2], len(merge[0]), len(merge[1])), reverse=True)
    return [(left, right) for left, right, _ in merges]


def train_sentence_piece(spec, folder):
    import sentencepiece

    text = os.path.join(folder, "corpus.txt")
    with open(text, "w", encoding="utf-8") as file:
        file.write("\n".join(line.replace("\n", " ") for line in corpus()))
    controls = spec["controls"]
    gemma = spec.get("gemma", False)
    ids = dict(pad_id=0, eos_id=1, bos_id=2, unk_id=3) if gemma else dict(unk_id=0, bos_id=1, eos_id=2, pad_id=-1)
    sentencepiece.SentencePieceTrainer.train(
        input=text, model_prefix=os.path.join(folder, "m"), model_type="bpe", vocab_size=900, byte_fallback=True, character_coverage=0.995,
        normalization_rule_name="identity", remove_extra_whitespaces=False, add_dummy_prefix=not gemma, split_digits=True, allow_whitespace_only_pieces=True,
        user_defined_symbols=spec.get("user", []), bos_piece="<bos>" if gemma else "<s>", eos_piece="<eos>" if gemma else "</s>", minloglevel=2, num_threads=1, **ids,
    )
    assert all(control in ("<s>", "</s>", "<pad>", "<eos>", "<bos>") for control in controls)
    return sentencepiece.SentencePieceProcessor(model_file=os.path.join(folder, "m.model"))


def sentence(spec):
    """The tokenizers of a SentencePiece family, the arrays of its GGUF file, and SentencePiece's own processor."""
    with tempfile.TemporaryDirectory() as folder:
        processor = train_sentence_piece(spec, folder)
    gemma = spec.get("gemma", False)
    pieces = [processor.id_to_piece(index) for index in range(len(processor))]
    scores = [processor.get_score(index) for index in range(len(processor))]
    vocab = {piece: index for index, piece in enumerate(pieces)}
    merges = merges_of(vocab, list(zip(pieces, scores)))
    inner = [token(name) for name in spec["controls"] + ["<unk>"]]
    if gemma:
        inner += [token(name, special=name in ("<start_of_turn>", "<end_of_turn>")) for name in spec["user"]]
    for added in inner:
        if added["content"] in spec.get("rstrip", []):
            added.update(rstrip=True, special=False)
    inner.sort(key=lambda added: vocab[added["content"]])

    def build(first_only):
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if gemma:
            tokenizer.normalizer = normalizers.Replace(" ", "▁")
            tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
        elif first_only:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
        else:
            tokenizer.normalizer = LLAMA_NORMALIZER()
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        tokenizer.decoder = decoders.Sequence(steps if gemma else [*steps, decoders.Strip(" ", 1, 0)])
        add(tokenizer, inner + spec["extra"])
        add_bos(tokenizer, spec["bos"], False)
        return tokenizer

    # What convert_hf_to_gguf.py writes: user-defined pieces with their spaces written out.
    kinds = [6 if processor.is_byte(index) else 1 for index in range(len(pieces))]
    names = list(pieces)
    for added in inner + spec["extra"]:
        content, special = added["content"], added["special"] or looks_special(added["content"])
        index = vocab.get(content, len(names))
        if index == len(names):
            names.append(None), scores.append(None), kinds.append(None)
        names[index] = content if special else content.replace("▁", " ")
        scores[index], kinds[index] = -1000.0, 3 if special else 4
    kinds[vocab["<unk>"]] = 2
    arrays = {"tokens": names, "scores": [round(score, 4) for score in scores], "token_type": kinds}
    return build(spec.get("first_only", False)), build(False), arrays, processor


# ---------------------------------------------------------------------------------------------------------------- cases


def fnv(ids):
    state = 0xCBF29CE484222325
    for number in ids:
        for byte in number.to_bytes(4, "little"):
            state = ((state ^ byte) * 0x100000001B3) & 0xFFFFFFFFFFFFFFFF
    return f"{state:016x}"


def views(tokenizer, ids):
    return tokenizer.decode(ids, skip_special_tokens=False), tokenizer.decode(ids, skip_special_tokens=True)


def outcome(tokenizer, text):
    """Ids and decodings of a text, without what is plain from the text."""
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    decoded, skip = views(tokenizer, ids)
    found = {"ids": ids}
    if decoded != text:
        found["decoded"] = decoded
    if skip != decoded:
        found["skip"] = skip
    return found


def around(tokenizer, texts):
    """What special tokens add: the same around every text."""
    ids = tokenizer.encode("", add_special_tokens=True).ids
    for text in texts:
        plain_ids = tokenizer.encode(text, add_special_tokens=False).ids
        assert tokenizer.encode(text, add_special_tokens=True).ids == ids + plain_ids, text
    return ids


def cases_of(tokenizer, as_gguf, added):
    texts = list(dict.fromkeys(HARD + mixed(25) + with_added(added)))
    prefix = around(tokenizer, texts)
    cases = []
    for text in texts:
        case = {"text": text, **outcome(tokenizer, text)}
        other = outcome(as_gguf, text)
        if other != {key: value for key, value in case.items() if key != "text"}:
            case["gguf"] = other
        cases.append(case)
    for unit, times in LONG:
        text = unit * times
        ids, other = (each.encode(text, add_special_tokens=False).ids for each in (tokenizer, as_gguf))
        case = {"repeat": [unit, times], "count": len(ids), "fnv": fnv(ids)}
        if other != ids:
            case["gguf"] = {"count": len(other), "fnv": fnv(other)}
        if tokenizer.decode(ids) != text:
            # The space that was put in front of a text was there already.
            assert tokenizer.decode(ids) == text[1:]
            case["shorter"] = 1
        cases.append(case)
    return prefix, cases


def broken_of(tokenizer, byte_id, added):
    """Token sequences that are no text, alone and among whole tokens."""
    word, special = tokenizer.encode("the", add_special_tokens=False).ids[:1], tokenizer.token_to_id(added[0]["content"])
    sequences = [[byte_id(byte) for byte in data] for data in BROKEN]
    for cut in (b"\xe4\xbd", b"\xf0\x9f\x98", b"\xc3"):
        ids = [byte_id(byte) for byte in cut]
        sequences += [ids + word, word + ids, word + ids + word, ids + [special], ids + [special] + ids, [special] + ids + [special]]
    sequences += [[byte_id(0xC3), special, byte_id(0xA9)], [byte_id(0xF0), byte_id(0x9F), special, byte_id(0x98), byte_id(0x80)]]
    found = []
    for ids in sequences:
        decoded, skip = views(tokenizer, ids)
        found.append({"ids": ids, "decoded": decoded, **({"skip": skip} if skip != decoded else {})})
    return found


def dump(folder, name, rows):
    """JSON with one line per entry of the outer lists."""
    line = lambda value: json.dumps(value, ensure_ascii=False, separators=(",", ":"))
    parts = []
    for key, value in rows.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            parts.append(f"{line(key)}:[\n" + ",\n".join(line(entry) for entry in value) + "\n]")
        else:
            parts.append(f"{line(key)}:{line(value)}")
    with open(os.path.join(folder, name), "w", encoding="utf-8") as file:
        file.write("{" + ",\n".join(parts) + "}\n")


def write(name, tokenizer, as_gguf, byte_id, added, gguf, arrays=None):
    folder = os.path.join(HERE, name)
    os.makedirs(folder, exist_ok=True)
    state = json.loads(tokenizer.to_str())
    with open(os.path.join(folder, "tokenizer.json"), "w", encoding="utf-8") as file:
        file.write(json.dumps(state, ensure_ascii=False, separators=(",", ":")).replace(',"model":', ',\n"model":') + "\n")
    prefix, cases = cases_of(tokenizer, as_gguf, added)
    if arrays:
        dump(folder, "gguf.json", arrays)
    differ = sum("gguf" in case for case in cases)
    broken = broken_of(tokenizer, byte_id, added)
    dump(folder, "cases.json", {"gguf": gguf, "prefix": prefix, "suffix": [], "cases": cases, "bytes": broken})
    print(f"{name}: {tokenizer.get_vocab_size()} tokens, {len(cases)} texts ({differ} of them other in GGUF), {len(broken)} byte sequences")
    return cases


def compare(name, processor, cases, names):
    """SentencePiece itself, on the texts without added tokens: an opinion that does not come from the same merges."""
    same, other = 0, []
    for case in cases:
        text = case.get("text") if "text" in case else None
        if text is None or any(added in text for added in names) or "\x00" in text:
            continue
        ids = case.get("gguf", case)["ids"]
        if processor.encode(text) == ids:
            same += 1
        else:
            other.append((text, ids, processor.encode(text)))
    print(f"  sentencepiece agrees on {same} texts and not on {len(other)}")
    for entry in other[:12]:
        print("   ", entry)


def main():
    names = byte_names()
    for name, spec in BYTE_LEVEL.items():
        tokenizer, as_gguf = byte_level(spec)
        gguf = {"general.architecture": "llama", "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": spec["pre"]}
        if spec.get("bos"):
            gguf.update({"tokenizer.ggml.bos_token_id": tokenizer.token_to_id(spec["bos"]), "tokenizer.ggml.add_bos_token": True})
        write(name, tokenizer, as_gguf, lambda byte: tokenizer.token_to_id(names[byte]), spec["added"], gguf)
    for name, spec in SENTENCE.items():
        tokenizer, as_gguf, arrays, processor = sentence(spec)
        gguf = {"general.architecture": spec["arch"], "tokenizer.ggml.model": "llama", "tokenizer.ggml.pre": "default"}
        gguf["tokenizer.ggml.bos_token_id"] = tokenizer.token_to_id(spec["bos"])
        gguf["tokenizer.ggml.unknown_token_id"] = tokenizer.token_to_id("<unk>")
        if spec.get("gemma"):
            gguf["tokenizer.ggml.add_space_prefix"] = False
        added = spec["extra"] + [token(content) for content in spec.get("user", [])[:4] + spec["controls"]]
        byte_id = lambda byte: tokenizer.token_to_id(f"<0x{byte:02X}>")
        cases = write(name, tokenizer, as_gguf, byte_id, added, gguf, arrays)
        compare(name, processor, cases, [token["content"] for token in added] + ["<unk>"])


if __name__ == "__main__":
    main()
