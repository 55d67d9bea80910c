"""Search: which step a receiver takes next."""

from __future__ import annotations

from saf.receiving.polling import Search, Step


def searching(*, tries_first: bool = False) -> Search:
    search = Search(tries_first=tries_first)
    search.tries(troubled=True)
    return search


def test_half_of_the_searches_begin_with_messages_that_failed_before() -> None:
    assert searching(tries_first=True).step is Step.TRY
    assert searching(tries_first=False).step is Step.TAKE
    untroubled = Search(tries_first=True)
    assert not untroubled.tries(troubled=False)
    assert untroubled.step is Step.TAKE


def test_where_nothing_is_to_be_taken_failed_messages_are_tried() -> None:
    search = searching()
    search.took(None, more=False, troubled=True)
    assert search.step is Step.TRY


def test_where_nothing_is_to_be_taken_and_nothing_has_failed_it_waits() -> None:
    search = searching()
    search.took(None, more=False, troubled=False)
    assert search.step is Step.WAIT


def test_a_search_that_had_nothing_to_try_waits_before_it_tries_again() -> None:
    search = searching(tries_first=True)
    search.tried(found=False)
    assert not search.tries(troubled=True)
    search.took(None, more=False, troubled=True)
    assert search.step is Step.WAIT
    search.waited()
    assert search.tries(troubled=True)


def test_what_was_tried_may_be_tried_again_at_once() -> None:
    search = searching(tries_first=True)
    search.tried(found=True)
    assert search.tries(troubled=True)


def test_shards_with_more_messages_are_read_on_without_a_wait() -> None:
    search = searching()
    steps = []
    for more in (True, False):
        search.took(None, more=more, troubled=False)
        steps.append(search.step)
    assert steps == [Step.TAKE, Step.WAIT]


def test_after_a_failure_the_next_step_looks_for_messages_to_try() -> None:
    search = searching()
    search.took(None, more=False, troubled=False)
    search.failed()
    assert search.step is Step.TAKE
    assert search.tries(troubled=True)
