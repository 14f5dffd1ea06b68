"""The 64 golden prompts: what is asked, in which form, and how long it is in tokens.

48 of up to 64 tokens (lengths block - 1, block and block + 1 for blocks of 16 and 32 among them), 12 of up to 300 and 4 of
1,000 to 1,900; chat and plain; several languages. Pure data: a tokenizer turns them into ids in `remake.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

PLAIN = (
    "The capital of France is",
    "Water boils at a temperature of",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Once upon a time, in a village between two rivers, there lived a",
    "The three laws of thermodynamics say that",
    "Die Hauptstadt von Deutschland ist Berlin, und die von Österreich ist",
    "Le petit prince habitait une planète à peine plus grande que lui, et il avait besoin d'un",
    "El sol sale por el este y se pone por el",
    "La ricetta della pasta al pomodoro comincia con",
    "O Brasil é o maior país da América do Sul e sua língua oficial é o",
    "Москва — столица России, а Париж — столица",
    "日本の首都は東京です。フランスの首都は",
    "中国的首都是北京，法国的首都是",
    "SELECT name, age FROM people WHERE age > 30 ORDER BY",
    "1, 1, 2, 3, 5, 8, 13, 21,",
    "A",
)

CHAT = (
    "What is the capital of Italy?",
    "Name three colours of the rainbow.",
    "Write one sentence about the sea.",
    "How many legs has a spider?",
    "Was ist die Hauptstadt von Spanien?",
    "Quelle est la couleur du ciel ?",
    "¿Cuántos días tiene una semana?",
    "Explain what a hash table is in one sentence.",
    "Give me a rhyme for 'cat'.",
    "Translate 'good morning' into French.",
    "What is 17 + 25?",
    "Who wrote Romeo and Juliet?",
    "Write a haiku about autumn leaves.",
    "Is a tomato a fruit?",
)

EXACT_SHORT_LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 15, 16, 17, 31, 33, 63, 64)
EXACT_MEDIUM_LENGTHS = (79, 80, 81, 127, 128, 129, 255, 300)
LONG_LENGTHS = (1000, 1024, 1537, 1900)

STORY = (
    "The lighthouse keeper had written down the weather every evening for forty years, and nobody had ever asked to read it. "
    "On the first page stood a storm from the north, on the second a fog that lasted nine days, and on the third a calm so "
    "complete that the gulls walked. When the new keeper arrived she carried the books down to the kitchen, opened them on "
    "the table, and began to count. There were more clear nights than she had expected, and fewer wrecks. "
)

ESSAY = (
    "Ein Uhrwerk besteht aus einer Feder, die Kraft speichert, einem Räderwerk, das sie weitergibt, und einer Hemmung, die sie "
    "in gleichen Schritten freigibt. Ohne Hemmung liefe die Feder in Sekunden ab. Une horloge n'est donc pas une machine qui "
    "avance, mais une machine qui retient. El péndulo lo hizo exacto: su periodo depende de la longitud y casi no de la "
    "amplitud. Galileo noticed it, Huygens built it, and for three hundred years it was how people agreed on the time. "
)


def record(number: int) -> str:
    """One line of an invented log, so that long prompts do not repeat themselves."""
    places = ("harbour", "mill", "station", "market", "bridge", "school", "quarry", "observatory", "ferry", "orchard")
    things = ("salt", "timber", "letters", "lamps", "apples", "rope", "paper", "coal", "glass", "honey")
    return (
        f"Entry {number}: at {(number * 7) % 24:02d}:{(number * 13) % 60:02d} the {places[number * 3 % 10]} received "
        f"{number * 37 % 91 + 3} crates of {things[number * 7 % 10]} and sent {number * 11 % 17} back. "
    )


@dataclass(frozen=True, slots=True)
class Prompt:
    """`text` is what a user wrote; `chat` puts it through the chat template; `length` cuts the ids to exactly that many."""

    name: str
    text: str
    chat: bool = False
    length: int | None = None


def golden_prompts() -> list[Prompt]:
    log = "".join(record(number) for number in range(1, 140))
    sources = (STORY, ESSAY, log)
    short = [Prompt(f"plain-{i:02d}", text) for i, text in enumerate(PLAIN)]
    short += [Prompt(f"chat-{i:02d}", text, chat=True) for i, text in enumerate(CHAT)]
    short += [
        Prompt(f"exact-{length}-{i:02d}", sources[i % 3][i * 5 :].lstrip(), length=length)
        for i, length in enumerate(EXACT_SHORT_LENGTHS)
    ]
    medium = [
        Prompt(f"exact-{length}-{i:02d}", (sources[i % 3] * 3)[i * 11 :].lstrip(), length=length)
        for i, length in enumerate(EXACT_MEDIUM_LENGTHS)
    ]
    medium += [
        Prompt("chat-summary-en", "Summarise this in one sentence: " + STORY, chat=True),
        Prompt("chat-summary-mixed", "Which languages occur in this text?\n" + ESSAY, chat=True),
        Prompt("chat-log", "What was delivered to the mill?\n" + log[:500], chat=True),
        Prompt("plain-essay", ESSAY + "Today,"),
    ]
    long = [
        Prompt("long-1000", log, length=LONG_LENGTHS[0]),
        Prompt("long-1024", "A ledger of the valley. " + log, length=LONG_LENGTHS[1]),
        Prompt("long-1537", "Questions about the ledger follow it. " + log, length=LONG_LENGTHS[2]),
        Prompt("long-1900", STORY + ESSAY + log, length=LONG_LENGTHS[3]),
    ]
    assert (len(short), len(medium), len(long)) == (48, 12, 4)
    return short + medium + long
