#!/usr/bin/env python3
"""Expectations for the tokenizers of real GGUF files, from Hugging Face's `tokenizers` alone: the vocabulary is read with the
`gguf` package, the rules are those of generate.py. SentencePiece vocabularies are put together for Google's `sentencepiece`
too; what both do not agree on is printed and left out.

    python3 -m venv /tmp/v && /tmp/v/bin/pip install tokenizers==0.22.2 sentencepiece==0.2.3 protobuf gguf
    /tmp/v/bin/python real.py smollm2 SmolLM2-135M-Instruct.Q4_1.gguf smollm2-135m.json
    /tmp/v/bin/python real.py gemma gemma-3-270m-q4_k_m.gguf gemma-3-270m.json
"""

import sys

from gguf import GGUFReader
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers

import generate
import texts

NORMAL, UNKNOWN, CONTROL, USER_DEFINED = 1, 2, 3, 4


def reader(path):
    fields = GGUFReader(path).fields
    return lambda key: fields[f"tokenizer.ggml.{key}"].contents() if f"tokenizer.ggml.{key}" in fields else None


def added(pieces, kinds, rstrip=()):
    found = zip(pieces, kinds)
    return [generate.token(piece, special=kind != USER_DEFINED, rstrip=piece in rstrip) for piece, kind in found if kind in (UNKNOWN, CONTROL, USER_DEFINED) and piece]


def byte_level(value, spec):
    tokens, kinds = value("tokens"), value("token_type")
    halves = lambda merge: (merge[: merge.index(" ", 1)], merge[merge.index(" ", 1) + 1 :])
    vocab = {piece: index for index, piece in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[halves(merge) for merge in value("merges")], ignore_merges=spec.get("ignore_merges", False)))
    if spec.get("nfc"):
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = spec["rule"]()
    tokenizer.decoder = decoders.ByteLevel()
    extra = added(tokens, kinds)
    generate.add(tokenizer, extra)
    return tokenizer, extra, None


def sentence(value, spec):
    import sentencepiece
    from sentencepiece import sentencepiece_model_pb2

    tokens, kinds, scores = value("tokens"), value("token_type"), [float(score) for score in value("scores")]
    pieces = [piece.replace(" ", "▁") if kind == USER_DEFINED else piece for piece, kind in zip(tokens, kinds)]
    unknown, gemma = pieces.index("<unk>"), spec.get("gemma", False)
    proto = sentencepiece_model_pb2.ModelProto()
    for index, (piece, kind, score) in enumerate(zip(pieces, kinds, scores)):
        kind = UNKNOWN if index == unknown else CONTROL if kind == UNKNOWN else kind
        proto.pieces.add(piece=piece, score=score, type=kind)
    proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback, proto.trainer_spec.unk_id = 2, True, unknown
    proto.normalizer_spec.name, proto.normalizer_spec.escape_whitespaces = "identity", True
    proto.normalizer_spec.add_dummy_prefix, proto.normalizer_spec.remove_extra_whitespaces = not gemma, False
    processor = sentencepiece.SentencePieceProcessor(model_proto=proto.SerializeToString())

    vocab = {piece: index for index, piece in enumerate(pieces)}
    # The files of converters have lost the score of user-defined pieces, which is 0: they come first.
    best = [(piece, 0.0 if kind == USER_DEFINED else score) for piece, kind, score in zip(pieces, kinds, scores)]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=generate.merges_of(vocab, best), unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if gemma:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        tokenizer.normalizer = generate.LLAMA_NORMALIZER()
        steps.append(decoders.Strip(" ", 1, 0))
    tokenizer.decoder = decoders.Sequence(steps)
    rstrip = [piece for piece in pieces if spec["arch"] == "phi3" and piece not in ("<unk>", "<s>", "<|endoftext|>")]
    extra = added(pieces, kinds, rstrip)
    generate.add(tokenizer, extra)
    return tokenizer, extra, processor


def main():
    family, path, out = sys.argv[1:]
    value = reader(path)
    spec = generate.BYTE_LEVEL.get(family) or generate.SENTENCE[family]
    tokenizer, extra, processor = (byte_level if family in generate.BYTE_LEVEL else sentence)(value, spec)
    by_name = {token["content"]: token for token in extra}
    known = [token["content"] for token in spec.get("added", spec.get("extra", []))] + spec.get("user", [])[:4]
    named = [by_name[name] for name in known if name in by_name] or extra[:2]
    prefix = [value("bos_token_id")] if value("add_bos_token") or (value("add_bos_token") is None and family == "llama3") else []
    cases = []
    runs = [" " * 40 + "x", "x" + " " * 100 + "y", "\n" * 40, "\t" * 35, *("a:\n" + " " * count + "b" for count in range(2, 34, 3))]
    for text in dict.fromkeys(texts.HARD + texts.mixed(40) + texts.with_added(named) + runs):
        case = {"text": text, **generate.outcome(tokenizer, text)}
        whole = not any(name in text for name in by_name if by_name[name]["special"]) and "\0" not in text
        if processor and whole and processor.encode(text) != case["ids"]:
            print("sentencepiece does not agree:", repr(text), case["ids"][:20], processor.encode(text)[:20])
            continue
        cases.append(case)
    for unit, times in texts.LONG:
        ids = tokenizer.encode(unit * times, add_special_tokens=False).ids
        cases.append({"repeat": [unit, times], "count": len(ids), "fnv": generate.fnv(ids)})
    names = generate.byte_names()
    byte_id = lambda byte: tokenizer.token_to_id(names[byte] if processor is None else f"<0x{byte:02X}>")
    known_bytes = [data for data in texts.BROKEN if all(byte_id(byte) is not None for byte in data)]
    texts.BROKEN[:] = known_bytes
    broken = generate.broken_of(tokenizer, byte_id, named)
    generate.dump(".", out, {"prefix": prefix, "suffix": [], "cases": cases, "bytes": broken})
    print(f"{family}: {len(cases)} texts, {len(broken)} byte sequences")


if __name__ == "__main__":
    main()
