"""Files that are not Unicode: whether one is sure to be Windows-1252, the only other encoding read.

A wrong guess is worse than none: a file of another encoding decodes without an error, to other
letters.
"""

from __future__ import annotations

import re

_WESTERN = (
    "éèàçêâîôûùëïœ", "äüöß", "óíáéñúü", "ãçáéíóõêâàúô", "èàùòìé", "äöåé", "øåæéò", "éëïöóèü",
    "àéèçòíóïüú",
)  # fmt: skip
"""Languages' letters beside ASCII's. A text has one of the first two at least."""
_FEWEST_LETTERS, _FEWEST_KINDS = 7, 3
"""How many letters beside ASCII's, and how many different ones, say which language a text is in."""
_SHIFTED = re.compile(rb"\x1b[$(]|~\{(?:[!-w][!-~])+~\}")
"""Where ISO-2022 and HZ go over to other letters."""
_BETWEEN = re.compile("[\\s!-/:-@\\[-`{-\x7f“”‘„‚«»‹›–—…¡¿]+")
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


def is_windows_1252(content: bytes) -> bool:
    """Say whether a file is sure to be Windows-1252, of which Latin-1's letters are a part.

    It is if it is English but for marks of Windows', or written like one western language.

    Args:
        content: The content of a file that is not Unicode.

    Example:
        >>> is_windows_1252("Noël fut une fête ratée à côté, déçu à l'hôpital".encode("latin-1"))
        True
        >>> is_windows_1252("słaba gra aktorów, żałuję".encode("cp1250"))
        False
    """
    return _is_english(content) or _is_western(content)


def has_shifted_letters(content: bytes) -> bool:
    """Say whether a text in ASCII's bytes stands for other letters, as ISO-2022-JP and HZ do.

    Example:
        >>> has_shifted_letters("映画".encode("iso2022_jp")), has_shifted_letters(b"a + b")
        (True, False)
    """
    return content.isascii() and _SHIFTED.search(content) is not None


def _is_english(content: bytes) -> bool:
    """Return whether a text is English apart from marks and signs of Windows-1252."""
    # Quotations first: marks of other kinds may stand in them.
    is_marked = not content.isascii() and _MARKED.sub(b"", _MARKED.sub(_inside, content)).isascii()
    words = len(re.findall(rb"[A-Za-z]+", content))
    return is_marked and len(_ENGLISH.findall(content)) >= max(1, 0.1 * words)


def _inside(marked: re.Match[bytes]) -> bytes:
    """Return what a quotation holds, without its marks."""
    return marked[0].strip(b"\x91\x92\x93\x94") if len(marked[0]) > 1 else b""


def _is_western(content: bytes) -> bool:
    """Return whether a text reads as one western language in Windows-1252."""
    try:
        text = content.decode("cp1252")
    except UnicodeDecodeError:
        return False
    words = {word for word in _BETWEEN.split(_AMOUNT.sub(" ", text)) if not word.isascii()}
    letters = [
        letter
        for word in words
        for letter in word.lower()
        if letter.isalpha() and not letter.isascii()
    ]
    is_written = (
        sum(not _is_spelt(word) for word in words) <= 0.02 * len(words)
        and len(letters) <= 0.5 * sum(map(len, words))
        and not _is_half_quoted(text)
    )
    if not is_written or len(letters) < _FEWEST_LETTERS or len(set(letters)) < _FEWEST_KINDS:
        return False
    return any(
        sum(letter in alphabet for letter in letters) >= 0.97 * len(letters)
        and any(letter in letters for letter in alphabet[:2])
        for alphabet in _WESTERN
    )


def _is_spelt(word: str) -> bool:
    """Return whether a word has letters alone, few accents, and capitals where words have them."""
    accented = [letter for letter in word.replace("’", "") if not letter.isascii()]
    inner = [letter for letter in word[1:] if not letter.isascii() and letter.isupper()]
    is_usual = len(word) <= 3 or len(accented) <= 0.75 * len(word)
    return word.replace("’", "").isalpha() and is_usual and (not inner or word.isupper())


def _is_half_quoted(text: str) -> bool:
    """Return whether quotations end that did not begin, as letters of other encodings look."""
    return bool(set("”»") & set(text)) and not set("“„«") & set(text)
