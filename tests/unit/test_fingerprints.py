"""Fingerprints: errors of one cause have the same one, whatever values they quote."""

from __future__ import annotations

import string
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from saf.setaside.fingerprint import MOST_CHARACTERS, PLACEHOLDER, fingerprint

WORDS = st.text(string.ascii_letters, min_size=1, max_size=8)
INSIDE = st.text(st.characters(exclude_characters="\"'\\", exclude_categories=["Cs"]), max_size=12)
VALUES = st.one_of(
    st.integers(),
    st.floats(allow_nan=False, allow_infinity=False),
    st.uuids(),
    st.datetimes().map(str),
    st.datetimes().map(lambda moment: moment.isoformat()),
    st.integers(min_value=0).map(lambda number: f"ORD-{number}"),
    st.integers(min_value=0).map(lambda number: f"order_{number:,}"),
    st.ip_addresses(v=4).map(lambda address: f"{address}:5432"),
    INSIDE.map(lambda text: f"'{text}'"),
    INSIDE.map(lambda text: f'"{text}"'),
    st.binary(max_size=6).map(lambda value: repr(value).replace("\\", "")),
).map(str)
ANY = st.text(st.sampled_from("ab zZ09'\"\\.,:;-_/+@\n…éDETAIL ") | st.characters(), max_size=60)


@given(before=st.lists(WORDS, min_size=1), after=st.lists(WORDS, min_size=1), a=VALUES, b=VALUES)
def test_errors_that_differ_in_a_value_have_one_fingerprint(
    before: list[str], after: list[str], a: str, b: str
) -> None:
    one, other = (f"{' '.join(before)} {value}: {' '.join(after)}" for value in (a, b))
    assert fingerprint(one) == fingerprint(other)


@given(words=st.lists(WORDS), others=st.lists(WORDS))
def test_errors_with_different_words_have_different_fingerprints(
    words: list[str], others: list[str]
) -> None:
    one, other = " ".join(words), " ".join(others)
    assert (fingerprint(one) == fingerprint(other)) == (
        one[:MOST_CHARACTERS] == other[:MOST_CHARACTERS]
    )


@given(values=st.lists(VALUES, min_size=1), words=WORDS)
def test_several_values_in_a_row_count_as_one(values: list[str], words: str) -> None:
    assert fingerprint(f"{words} [{', '.join(values)}]") == f"{words} [{PLACEHOLDER}]"


@given(ANY)
def test_no_digit_and_nothing_of_a_database_row_is_left(error: str) -> None:
    found = fingerprint(f"{error} DETAIL: {error}")
    assert not {*found} & {*string.digits}
    assert "DETAIL: " not in found
    assert len(found) <= MOST_CHARACTERS


@given(secret=st.text(string.ascii_letters, min_size=9, max_size=20), words=WORDS)
def test_what_is_quoted_is_not_in_the_fingerprint(secret: str, words: str) -> None:
    for quoted in (f"'{secret}'", f'"{secret}"', f"b'{secret}'", f"['{secret}', \"{secret}\"]"):
        assert secret not in fingerprint(f"{words}: {quoted} {words}")
    assert secret not in fingerprint(f"{words} 'a {secret}"), "cut before the closing quote"


def test_an_apostrophe_begins_no_value() -> None:
    for error in ("it can't be, isn't it", "the users' orders and the shop's", "don't"):
        assert fingerprint(error) == error


def test_a_value_after_an_apostrophe_is_found() -> None:
    found = {fingerprint(f"can't find customer '{name}' today") for name in ("Jones", "O'Brien")}
    assert found == {"can't find customer … today"}


def test_only_the_beginning_of_an_error_counts() -> None:
    error = f"{UUID(int=7)} {'word ' * MOST_CHARACTERS}"
    assert fingerprint(error) == fingerprint(f"{error} and its end")
