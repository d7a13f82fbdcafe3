"""Recognition of a file's encoding where it is not Unicode, only if no other one is possible.

A file is decoded by every encoding that fits it, and the results are compared with how languages
are written. An encoding is sure if all results that pass are one text. A wrong guess is worse than
none: whoever converts a file by it writes other letters.
"""

from __future__ import annotations

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import NamedTuple

from .languages import COMMON, CYRILLIC, LATIN, VOWELS

_SINGLE_BYTE = (
    "cp1252", "latin_1", "iso8859_15", "cp1250", "iso8859_2", "iso8859_16", "cp1254", "iso8859_9",
    "cp1257", "iso8859_13", "iso8859_4", "iso8859_10", "iso8859_3", "iso8859_14", "cp1258",
    "mac_roman", "mac_latin2", "mac_turkish", "mac_iceland", "mac_croatian", "mac_romanian",
    "cp850", "cp437", "cp852", "cp857", "cp858", "cp860", "cp861", "cp863", "cp865", "cp775",
    "cp1251", "koi8_r", "koi8_u", "koi8_t", "iso8859_5", "cp866", "cp1125", "cp855",
    "mac_cyrillic", "kz1048", "ptcp154", "cp1253", "iso8859_7", "cp737", "cp869", "mac_greek",
    "cp1255", "iso8859_8", "cp862", "cp856", "cp1256", "iso8859_6", "cp864", "cp720", "tis_620",
    "iso8859_11", "cp874",
)  # fmt: skip
_MULTI_BYTE = (
    "cp932", "shift_jis", "shift_jisx0213", "shift_jis_2004", "euc_jp", "euc_jisx0213",
    "euc_jis_2004", "gb18030", "gbk", "gb2312", "big5", "cp950", "big5hkscs", "euc_kr", "cp949",
    "johab",
)  # fmt: skip
_SEVEN_BIT = {
    b"\x1b": ("iso2022_jp", "iso2022_jp_2", "iso2022_jp_3", "iso2022_jp_ext", "iso2022_kr"),
    b"~{": ("hz",), b"+": ("utf_7",),
}  # fmt: skip
"""Encodings that write other letters in ASCII's bytes, by what begins such letters."""
_SHIFTED = re.compile(rb"\x1b[$(]|~\{(?:[!-w][!-~])+~\}")
"""Where ISO-2022 and HZ go over to other letters."""
_NAMES = {"latin_1": "iso8859-1", "mac_roman": "macintosh"} | {
    f"iso2022_{country}": f"iso-2022-{country}" for country in ("jp", "kr")
}
"""Names of encodings that Python and iconv share, where they are not Python's name with a hyphen.
"""
_UNNAMED = {
    "hz", "kz1048", "ptcp154", "cp856", "cp720", "cp858", "cp1125", "mac_latin2", "mac_turkish",
    "mac_iceland", "mac_croatian", "mac_romanian", "mac_greek", "shift_jisx0213", "shift_jis_2004",
    "euc_jis_2004", "iso2022_jp_2", "iso2022_jp_3", "iso2022_jp_ext",
}  # fmt: skip
"""Encodings that iconv does not have everywhere."""


class _Standard(NamedTuple):
    """The standard that a text of a script has to meet.

    Args:
        letters: The fewest letters that say anything.
        fraction: The fraction of the letters that has to be common ones.
        rival: The fraction of the best text's share at which another text may be the one meant.
    """

    letters: int
    fraction: float
    rival: float


_STANDARDS = defaultdict(lambda: _Standard(20, 0.6, 0.85)) | {
    "LATIN": _Standard(1, 0.97, 0.8), "HANGUL": _Standard(10, 0.25, 0.6),
    "CJK": _Standard(10, 0.25, 0.5),
}  # fmt: skip
_FEW_LETTERS, _MANY_LETTERS, _SAMPLE = 10, 20, 1 << 16
_SCRIPTS = {"HIRAGANA": "CJK", "KATAKANA": "CJK", "KATAKANA-HIRAGANA": "CJK", "FULLWIDTH": "CJK"}
_MAY_MIX = {"CJK", "HANGUL"}
"""Scripts that Latin letters and digits stand beside without a space."""
_JOINING = "’ʼ׳״·"
"""Marks that stand within words."""
_INTERRUPTED = re.compile("[A-Za-z][\u3040-\U0010ffff]+[a-z]")
"""A Latin word with ideographs or syllables in it."""
_UNREADABLE = re.compile("[\0\x7f-\x9f\ue000-\uf8ff\ufffd]")
_BETWEEN = re.compile(
    "[\\s!-/:-@\\[-`{-\x7f“”‘„‚«»‹›–—…。、，．！？「」『』【】《》〈〉（）・：；～¿¡]+"
)
_ALONE = r"(?<![^\s,;:\"'()]){}(?![^\s,;:\"'().!?])"
_AMOUNT = re.compile(_ALONE.format("(?:[€£¥]?[0-9][0-9.,]*[€£¥°ºª½¼¾²³%]*|[€£¥©®™°§])"))
_ENGLISH = re.compile(rb"\b(?:the|and|of|is|was|to|in|it|this|that|with|for|but)\b", re.IGNORECASE)
_MARKED = re.compile(
    rb"(?<=[A-Za-z])\x92(?=(?:s|t|re|ll|ve|d|m)\b)"  # it’s
    rb"|(?<![A-Za-z0-9])\x91\w[^\x91\n]*?[\w.,!?\x85]\x92(?!\w)"  # ‘so’
    rb"|(?<![A-Za-z0-9])\x93\w[^\x93\n]*?[\w.,!?\x85]\x94(?!\w)"  # “so”
    rb"|(?<=\s)[\x96\x97](?=\s)|(?<=[0-9])\x96(?=[0-9])|(?<=\w)\x85(?=[\s.,\"')\x92\x94]|$)"
    rb"|[\x80\xa3](?=[0-9])|(?<=[0-9])[\x80\xa3\xb0](?!\w)|(?<=[.,:;!?])\xa0",
    re.MULTILINE,
)
"""Marks and signs of Windows', where English texts have them."""


def sure_encoding(content: bytes) -> str | None:
    """Find the one encoding that a text is in, if no other is possible.

    Args:
        content: The bytes of a file that is not UTF-8, or that has ASCII's bytes only.

    Returns:
        A name that Python and iconv know; `None` if nothing is sure.

    Example:
        >>> sure_encoding("この映画は話が面白く、音楽も美しい。俳優の演技は下手".encode("euc_jp"))
        'euc-jp'
        >>> sure_encoding("Łódź".encode("cp1250"))
    """
    names = ["cp1252"] if _is_english(content) else _names_of_only_text(content)
    return next((_NAMES.get(n, n.replace("_", "-")) for n in names if n not in _UNNAMED), None)


def _names_of_only_text(content: bytes) -> list[str]:
    """Return the encodings that give the one text that passes; none if there are several texts."""
    encodings: Iterable[str] = _SINGLE_BYTE + _MULTI_BYTE
    if content.isascii():
        encodings = next((names for start, names in _SEVEN_BIT.items() if start in content), ())
    texts = _decoded(_distinct_lines(content), encodings)
    looks = {text: _Look.of(text) for text in texts if _is_readable(text)}
    passing = [text for text, look in looks.items() if look.passes()]
    best = max(passing, key=lambda text: looks[text].fraction, default=None)
    # Of four letters it may be a formula, in which a plus is a plus.
    if best is None or (content.isascii() and looks[best].letters < 5):
        return []
    rivals = [text for text, look in looks.items() if text != best and look.rivals(looks[best])]
    readings = list(_decoded(content, texts[best]).values())
    return readings[0] if len(readings) == 1 and not rivals else []


def has_other_letters(content: bytes) -> bool:
    """Return whether a text in ASCII's bytes stands for other letters, as ISO-2022-JP does.

    Example:
        >>> has_other_letters("映画".encode("iso2022_jp")), has_other_letters(b"a + b")
        (True, False)
    """
    return _SHIFTED.search(content) is not None or bool(_names_of_only_text(content))


def _is_english(content: bytes) -> bool:
    """Return whether a text is English except for marks and signs of Windows' encoding."""
    # Quotations first: marks of other kinds may stand in them.
    is_marked = not content.isascii() and _MARKED.sub(b"", _MARKED.sub(_inside, content)).isascii()
    words = len(re.findall(rb"[A-Za-z]+", content))
    return is_marked and len(_ENGLISH.findall(content)) >= max(1, 0.1 * words)


def _inside(marked: re.Match[bytes]) -> bytes:
    """Return what a quotation holds, without its marks."""
    return marked[0].strip(b"\x91\x92\x93\x94") if len(marked[0]) > 1 else b""


def _distinct_lines(content: bytes) -> bytes:
    """Return lines with letters beyond ASCII, each once, and no more of them than are needed."""
    starts = tuple(_SEVEN_BIT) if content.isascii() else ()
    sample, size = dict[bytes, None](), 0
    for line in re.split(rb"[\r\n]+", content):
        if not line.isascii() or any(start in line for start in starts):
            size += len(line) if line not in sample else 0
            sample[line] = None
            if size > _SAMPLE:
                break
    return b"\n".join(sample)


def _decoded(content: bytes, encodings: Iterable[str]) -> dict[str, list[str]]:
    """Return the texts that encodings give, and for each the encodings that give it."""
    texts = defaultdict[str, list[str]](list)
    for encoding in encodings:
        try:
            texts[content.decode(encoding)].append(encoding)
        except UnicodeDecodeError:
            continue
    return texts


def _is_readable(text: str) -> bool:
    """Return whether a text has letters beyond ASCII, closed quotations and no unreadable signs."""
    quotes = {mark: text.count(mark) for mark in "“„«”»"}
    opened = [mark for mark, count in quotes.items() if count]
    is_quoted = len(opened) != 1 or opened[0] in "”»" or quotes[opened[0]] < 2
    return not text.isascii() and is_quoted and _UNREADABLE.search(text) is None


class _Look(NamedTuple):
    """The measures of how much a decoded text looks like written language.

    Args:
        words: How many words have letters beyond ASCII, each counted once.
        length: The number of letters of these words, ASCII's too.
        wrong: How many of these words nobody writes.
        script: The script of most letters.
        letters: How many letters are in that script, without ASCII's.
        fraction: The fraction of them that is common; of Latin ones, that belongs to one language.
    """

    words: int
    length: int
    wrong: int
    script: str
    letters: int
    fraction: float

    @classmethod
    def of(cls, text: str) -> _Look:
        """Look at the words of a text."""
        words = {word for word in _BETWEEN.split(_AMOUNT.sub(" ", text)) if not word.isascii()}
        scripts = [(word, _script_of(word)) for word in words]
        sizes = Counter[str]()
        for word, script in scripts:
            sizes[script] += sum(not letter.isascii() for letter in word) if script else 0
        main = max(sizes, key=sizes.__getitem__, default="")
        counts = Counter(
            letter for word, script in scripts if script == main for letter in word.lower()
            if not (letter.isascii() or letter in _JOINING or "ぁ" <= letter <= "ー")
        )  # fmt: skip
        wrong = sum(script != main for _, script in scripts)
        length = sum(letter not in _JOINING for word in words for letter in word)
        return cls(len(words), length, wrong, main, counts.total(), _fraction(main, counts))

    def passes(self) -> bool:
        """Return whether the text is accepted as written language."""
        standard = _STANDARDS[self.script]
        is_written = self.wrong <= 0.02 * self.words
        if self.script == "LATIN":
            is_written &= self.letters <= 0.5 * self.length
        return (
            is_written and self.letters >= standard.letters and self.fraction >= standard.fraction
        )

    def rivals(self, best: _Look) -> bool:
        """Return whether this may be the text in place of the best one."""
        if self.wrong > 0.03 * self.words:
            return False
        if not self.letters:
            return True  # signs say nothing
        standard = _STANDARDS[self.script]
        if self.script != best.script:
            return self.fraction >= standard.rival * standard.fraction
        # A short text may be of names from everywhere.
        is_short = self.script == "LATIN" and self.letters < _FEW_LETTERS
        return self.fraction >= (0.5 if is_short else standard.rival) * best.fraction


def _fraction(script: str, counts: Counter[str]) -> float:
    total = counts.total()
    if not total or script not in {*COMMON, "LATIN"}:
        return 0.0
    if script == "LATIN":
        return max(_part_of(alphabet, counts) for alphabet in LATIN)
    if script == "CYRILLIC" and max(sum(counts[c] for c in a) for a in CYRILLIC) < 0.98 * total:
        return 0.0
    common = set(COMMON[script])
    return sum(count for letter, count in counts.items() if _plain(letter) in common) / total


def _part_of(alphabet: str, counts: Counter[str]) -> float:
    """Return the fraction of the letters that a language has, 0 if it cannot be that language."""
    is_possible = counts.total() < _MANY_LETTERS or any(c in counts for c in alphabet[:2])
    return sum(counts[c] for c in set(alphabet)) / counts.total() if is_possible else 0.0


def _plain(letter: str) -> str:
    """Return a Greek letter without its accent, and any other letter unchanged."""
    if unicodedata.name(letter, "").startswith("GREEK"):
        return unicodedata.normalize("NFD", letter)[0]
    return letter


def _script_of(word: str) -> str:
    """Return the script that a word is in, or an empty string if nobody writes so."""
    scripts, previous = set[str](), ""
    for letter in word:
        kind = unicodedata.category(letter)
        if letter in _JOINING and previous.isalpha():
            continue
        if kind[0] == "N" and letter.isascii():
            scripts.add("DIGIT")
        elif kind[0] not in "LM" or letter in "ªº" or (kind == "Lm" and letter not in "ーๆ々"):
            return ""
        elif kind != "Mn" or not unicodedata.name(letter, "").startswith("COMBINING"):
            name = unicodedata.name(letter, "?").split()[0]
            scripts.add(_SCRIPTS.get(name, name))
        previous = letter
    foreign = scripts - {"LATIN", "DIGIT"} or {"LATIN"}
    script = foreign.pop()
    mixes = len(scripts) > 1 and script not in _MAY_MIX
    is_known = script in COMMON or script == "LATIN"
    return script if is_known and not (foreign or mixes) and _is_spelt(word, script) else ""


def _is_spelt(word: str, script: str) -> bool:
    """Return whether a word of one script has capitals, vowels and accents where words do."""
    if script == "LATIN":
        not_ascii = sum(not letter.isascii() for letter in word)
        if len(word) > 3 and not_ascii > 0.75 * len(word):
            return False
    if script in VOWELS:
        letters = word.lower() if script == "CYRILLIC" else "".join(map(_plain, word.lower()))
        longest = max(map(len, re.split(f"[{VOWELS[script]}’ʼ]", letters)))
        if longest > 5 or (len(letters) > 4 and longest == len(letters)):
            return False
        if re.search("ς.|(?<=.)σ$", word):
            return False
    stems = re.split(f"[{_JOINING}]", word)
    return not _INTERRUPTED.search(word) and all(map(_has_capitals_first, stems))


def _has_capitals_first(stem: str) -> bool:
    """Return whether capitals beyond ASCII come first, or make up the whole word."""
    inner = stem[1:]
    is_usual = all(letter.isascii() or not letter.isupper() for letter in inner)
    return is_usual or stem == stem.upper()
