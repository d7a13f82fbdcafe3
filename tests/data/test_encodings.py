"""What is read as Windows-1252 is what was written; all that is not sure is refused."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from hf_gradguard.data.encodings import is_windows_1252
from hf_gradguard.data.samples import load_samples
from hf_gradguard.data.tables import DataError

TEXTS = {
    "Japanese": [
        "この映画はとても面白かったです",
        "話がつまらなくて退屈でした",
        "音楽が美しく映像も素晴らしい",
        "俳優の演技が下手だと思います",
        "値段が高い割に量が少なくて残念",
    ],
    "Chinese": [
        "这部电影非常好看，我很喜欢",
        "剧情无聊，浪费了我两个小时",
        "服务员态度不好，菜也不好吃",
        "价格便宜，质量不错，下次还会来",
    ],
    "Taiwanese": [
        "這部電影非常好看，我很喜歡",
        "劇情無聊，浪費了我兩個小時",
        "服務員態度不好，菜也不好吃",
    ],
    "Korean": [
        "이 영화는 정말 재미있었어요",
        "이야기가 지루하고 재미없었다",
        "배우들의 연기가 형편없다고 생각합니다",
    ],
    "Russian": [
        "Этот фильм мне очень понравился",
        "Скучный сюжет и плохая игра актёров",
        "Яркий и умный",
    ],
    "Ukrainian": [
        "Цей фільм мені дуже сподобався",
        "Нудний сюжет і погана гра",
        "Її музика чудова",
    ],
    "Bulgarian": [
        "Този филм много ми хареса",
        "Скучен сюжет и лоша игра",
        "Не го препоръчвам на никого",
    ],
    "Serbian": [
        "Овај филм ми се веома допао",
        "Досадна прича и лоша глума",
        "Љубав њена, ђак",
    ],
    "Kazakh": [
        "Бұл фильм маған қатты ұнады",
        "Әңгіме қызықсыз болды",
        "Өте жақсы, үлкен рахмет",
    ],
    "Greek": [
        "Αυτή η ταινία μου άρεσε πολύ",
        "Βαρετή ιστορία και κακές ερμηνείες",
        "Άσχημη εμπειρία, Ώρες",
    ],
    "Hebrew": [
        "הסרט הזה היה מאוד יפה",
        "סיפור משעמם ומשחק גרוע",
        "לא ממליץ לאף אחד לראות",
        "המוזיקה נהדרת וגם התמונה יפה מאוד",
        "השירות היה איטי והאוכל קר",
    ],
    "Arabic": [
        "هذا الفيلم جيد جدا وأعجبني",
        "القصة مملة والتمثيل سيئ",
        "لا أنصح أحدا بمشاهدته",
    ],
    "Thai": [
        "ภาพยนตร์เรื่องนี้ดีมาก",
        "เนื้อเรื่องน่าเบื่อ",
        "ดนตรีไพเราะและภาพสวย",
    ],
    "French": [
        "Ce film était très réussi",
        "Où êtes-vous allés ? Ça dépend du garçon",
        "C'est là que le cœur bat",
        "La fête fut très belle, même à Noël",
    ],
    "German": [
        "Der Film war schön und überraschend",
        "größter Unsinn",
        "Die Musik ist großartig, früher öde",
    ],
    "Spanish": [
        "La película me gustó muchísimo, señor",
        "¿Cómo se llama el niño pequeño?",
        "La canción",
    ],
    "Italian": [
        "Il film è bellissimo, perché c'è più musica",
        "La città era così triste",
        "Può andare",
    ],
    "Polish": [
        "Ten film był świetny, bardzo mi się podobał",
        "słaba gra aktorów, żałuję",
        "gęś",
        "Łódź, źle",
    ],
    "Czech": [
        "příliš žluťoučký kůň",
        "Nudný děj a špatné herectví",
        "Hudba je krásná",
        "Ďábelské ódy",
    ],
    "Hungarian": [
        "Ez a film nagyon tetszett, gyönyörű volt",
        "Unalmas történet",
        "őszintén, űrhajó",
    ],
    "Romanian": [
        "Acest film mi-a plăcut foarte mult",
        "Poveste plictisitoare şi actori slabi",
        "întâi, ţară",
    ],
    "Turkish": [
        "Bu film çok güzeldi, beğendim",
        "Sıkıcı bir hikâye",
        "İstanbul'da ağır bir gün, şaşkın",
    ],
    "Lithuanian": [
        "Šis filmas man labai patiko, gražus",
        "ačiū, ąžuolas, ūkis",
        "įdomi",
    ],
    "Danish": [
        "Filmen var meget god, jeg så den på søndag",
        "dårligt skuespil, æsel",
        "Også ødelagt, får",
    ],
    "English": [
        "It’s a café in the film… “fine” – good",
        "The naïve résumé of a writer",
        "This costs £5",
        "Word—word, don’t go to the © office",
        "At 20°C the piñata",
        "the façade of Gdańsk",
    ],
}
ENCODINGS = (
    "cp932", "shift_jis", "euc_jp", "iso2022_jp", "gb18030", "gbk", "gb2312", "big5", "cp950",
    "hz", "euc_kr", "cp949", "iso2022_kr", "johab", "koi8_r", "koi8_u", "cp1251", "iso8859_5",
    "cp866", "mac_cyrillic", "kz1048", "iso8859_7", "cp1253", "cp737", "cp1255", "iso8859_8",
    "cp862", "cp1256", "iso8859_6", "cp1250", "iso8859_2", "iso8859_16", "cp852", "mac_latin2",
    "cp1252", "latin_1", "iso8859_15", "mac_roman", "cp850", "cp437", "cp1254", "iso8859_9",
    "cp857", "cp1257", "iso8859_13", "iso8859_4", "cp775", "tis_620", "iso8859_11", "cp874",
)  # fmt: skip
ENGLISH = ["the plot was long and the actor was good", "a fine film of the year"] * 40
READ = ("French", "German", "Spanish", "Danish")
"""Western languages of which there is enough text to be sure."""


def encodable(language: str, encoding: str) -> list[str]:
    """The language's texts that an encoding has, and gives back."""
    texts = []
    for text in TEXTS[language]:
        try:
            if text.encode(encoding).decode(encoding) == text:
                texts.append(text.replace(",", " "))
        except UnicodeEncodeError:
            continue
    return texts


def table(texts: list[str]) -> str:
    return "text,label\n" + "".join(f"{text},{row % 2}\n" for row, text in enumerate(texts))


def forms(texts: list[str]) -> list[list[str]]:
    """Long files, short ones down to a word, and English ones with a few of the texts."""
    words = [word for text in texts for word in text.split()]
    return [
        texts, texts * 60, [*ENGLISH, texts[0]], ENGLISH + texts, *([text] for text in texts),
        *([word] for word in words), *(list(pair) for pair in pairwise(words)),
    ]  # fmt: skip


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("language", TEXTS)
def test_what_is_taken_for_windows_1252_decodes_to_what_was_written(
    language: str, encoding: str
) -> None:
    texts = encodable(language, encoding)
    for rows in forms(texts) if texts else []:
        written = table(rows)
        content = written.encode(encoding)
        if not content.isascii() and is_windows_1252(content):
            assert content.decode("cp1252") == written, rows[-1]


@pytest.mark.parametrize("language", READ)
def test_western_texts_are_read(language: str) -> None:
    """Also if but few lines of a file are in that language."""
    texts = encodable(language, "cp1252")
    for rows in (texts, texts * 60, ENGLISH + texts):
        assert is_windows_1252(table(rows).encode("cp1252"))


def read(content: bytes, folder: Path, count: int) -> set[str] | str:
    """What is read of a table, or why it is not."""
    path = folder / "t.csv"
    path.write_bytes(content)
    try:
        return {text for text, _ in load_samples(str(path), kind="text", count=count)}
    except DataError as error:
        return str(error)


@pytest.mark.parametrize("encoding", [*ENCODINGS, "utf_8", "utf_8_sig", "utf_16", "utf_32"])
def test_what_is_read_is_what_was_written(encoding: str, tmp_path: Path) -> None:
    """What is refused is refused in a line that quotes nothing."""
    for language in TEXTS:
        texts = encodable(language, encoding)
        if len(texts) < 2:
            continue
        content = table(texts).encode(encoding)
        found = read(content, tmp_path, len(texts))
        if isinstance(found, set):
            assert found == set(texts)
            continue
        assert "t.csv is not UTF-8 (line" in found
        assert "`iconv -f ENCODING -t utf-8`" in found
        assert not any(text in found for text in texts)


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be", "utf-32-le", "utf-32-be"])
def test_unicode_without_a_mark(encoding: str, tmp_path: Path) -> None:
    for language in TEXTS:
        texts = [text.replace(",", " ") for text in TEXTS[language]]
        assert read(table(texts).encode(encoding), tmp_path, len(texts)) == set(texts)


@pytest.mark.parametrize(
    "text", ["C++ and +1 (555) 0100", "a+b-c, x+yz-", "~{a}~ {b}", "SGVsbG8+d29ybGQ/IQ==", "++"]
)
def test_ascii_stays_ascii(text: str, tmp_path: Path) -> None:
    assert read(f'text,label\n"{text}",0\n'.encode(), tmp_path, 1) == {text}
