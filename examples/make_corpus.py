"""Writes the example corpus: sums and times tables in words. `python make_corpus.py`."""

from __future__ import annotations

from pathlib import Path

ONES = [
    *("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten"),
    *("eleven", "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen"),
    *("eighteen", "nineteen"),
]
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]


def words(number: int) -> str:
    """Return a number below 1000 in words."""
    if number < 20:
        return ONES[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return TENS[tens - 2] + (f"-{ONES[ones]}" if ones else "")
    hundreds, rest = divmod(number, 100)
    return f"{ONES[hundreds]} hundred" + (f" and {words(rest)}" if rest else "")


def sentences(a: int, b: int) -> str:
    """Return what can be said of two numbers."""
    larger, smaller = max(a, b), min(a, b)
    out = f"{words(a)} plus {words(b)} is {words(a + b)}. "
    out += f"{words(larger)} less {words(smaller)} leaves {words(larger - smaller)}. "
    return out + (f"{words(a)} times {words(b)} is {words(a * b)}. " if a * b < 1000 else "")


def main() -> None:
    """Write sums.txt and tables.txt into corpus."""
    here = Path(__file__).parent / "corpus"
    sums = (sentences(a * 7 % 100, a * 11 % 100).capitalize() for a in range(1, 280))
    (here / "sums.txt").write_text("\n".join(sums) + "\n", encoding="utf-8")
    tables = (sentences(a, b).capitalize() for a in range(2, 21) for b in range(2, 14))
    (here / "tables.txt").write_text("\n".join(tables) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
