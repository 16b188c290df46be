"""The SentencePiece model: one piece for each word that the agent says, as it is written, and for the prompts' words.

A trained tokenizer would number its pieces as it likes; the text ids must be the model's, so the file is written here,
field by field (`sentencepiece_model.proto`). Words that are in no sentence become one unknown token each.
"""

import struct
from pathlib import Path

from sentencepiece import SentencePieceProcessor

from scripts.train_tiny.sentences import ASSISTANT_PROMPTS, HOTEL_PROMPTS, agent_sentences

UNKNOWN, PAD = 0, 3
SYSTEM_TAG = "<system>"
SPACE = "\u2581"
MARKS = (".", ",", "!", "?", ":", ";")
_NORMAL, _UNKNOWN, _CONTROL = 1, 2, 3
_UNIGRAM = 1


def pieces() -> tuple[str, ...]:
    """All pieces in the order of their ids."""
    spoken = {SPACE + word for sentence in agent_sentences() for word in sentence.words}
    prompts = {SPACE + word for text in (*HOTEL_PROMPTS, *ASSISTANT_PROMPTS) for word in _bare_words(text)}
    hotel = {
        SPACE + word for word in ("hotel", "Hotel", "front", "desk", "reception", "receptionist", "guest", "guests")
    }
    words = sorted(spoken | prompts | hotel | {SPACE + SYSTEM_TAG})
    return ("<unk>", "<s>", "</s>", "<pad>", *words, *MARKS)


def _bare_words(text: str) -> list[str]:
    for mark in MARKS:
        text = text.replace(mark, " ")
    return text.split()


def write_tokenizer(path: Path) -> SentencePieceProcessor:
    """Write the model and read it back; raises ValueError if the ids of a sentence do not spell the sentence."""
    path.write_bytes(_model(pieces()))
    tokenizer = SentencePieceProcessor(model_file=str(path))
    for sentence in agent_sentences():
        ids = tokenizer.encode(sentence.text)
        if tokenizer.decode(ids) != sentence.text or len(ids) != len(sentence.words):
            raise ValueError(f"the tokenizer spells {sentence.text!r} as {tokenizer.decode(ids)!r}")
    return tokenizer


def _model(names: tuple[str, ...]) -> bytes:
    kinds = {0: _UNKNOWN, 1: _CONTROL, 2: _CONTROL, 3: _CONTROL}
    vocabulary = b"".join(_bytes(1, _piece(name, kinds.get(index, _NORMAL))) for index, name in enumerate(names))
    trainer = _number(3, _UNIGRAM) + _number(4, len(names)) + b"".join(_number(40 + k, k) for k in range(4))
    normalizer = _bytes(1, b"identity") + _number(3, 1) + _number(4, 1) + _number(5, 1)
    return vocabulary + _bytes(2, trainer) + _bytes(3, normalizer)


def _piece(name: str, kind: int) -> bytes:
    return _bytes(1, name.encode()) + b"\x15" + struct.pack("<f", -1.0) + _number(3, kind)


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _bytes(field: int, content: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    out = bytearray()
    while value >= 0x80:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)
