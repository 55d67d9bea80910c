"""What a run came to: its exit code, and the sum of cycles."""

from __future__ import annotations

import pytest

from saf.cli.forward import show
from saf.forwarding.summary import Summary

DONE, OTHER, USAGE, TRY_AGAIN = 0, 1, 2, 75


def met(*kinds: str) -> Summary:
    return Summary(problems=[{"broker": "app", "kind": kind, "error": ""} for kind in kinds])


@pytest.mark.parametrize(
    ("kinds", "code"),
    [
        ((), DONE),
        (("Unavailable",), TRY_AGAIN),
        *(
            ((kind,), USAGE)
            for kind in (
                *(
                    "SchemaMissing",
                    "RowsGone",
                    "SchemaMismatch",
                    "Restored",
                    "ConfigurationError",
                ),
                *("Ahead", "Behind", "Refused"),
            )
        ),
        (("Unavailable", "Ahead"), USAGE),
        (("Rejected",), OTHER),
        (("Ahead", "Rejected"), OTHER),
    ],
)
def test_the_exit_code_says_who_has_to_act(kinds: tuple[str, ...], code: int) -> None:
    assert met(*kinds).exit_code == code


def test_a_destination_that_is_down_is_to_be_tried_again_and_what_waits_for_a_person_is_not() -> (
    None
):
    assert Summary(waiting_lanes=1, down=["mom"]).exit_code == TRY_AGAIN
    assert Summary(waiting_lanes=1).exit_code == DONE


def test_a_sum_has_every_count_of_its_cycles() -> None:
    counts = ("forwarded", "dropped", "parked", "dead", "batches", "cycles")
    whole = Summary()
    for _ in range(2):
        cycle = Summary(
            by_destination={"mom": 3},
            by_broker={"shop": 3},
            **dict.fromkeys(counts, 5),  # type: ignore[arg-type]
        )
        cycle.add_services("mom", {"billing": 4})
        whole.add(cycle)
    assert {name: getattr(whole, name) for name in counts} == dict.fromkeys(counts, 10)
    assert whole.by_destination == {"mom": 6}
    assert whole.by_broker == {"shop": 6}
    assert whole.by_service == {"mom": {"billing": 8}}


AWAY = [{"broker": "app", "kind": "Unavailable", "error": "broker 'app' is unavailable"}]


@pytest.mark.parametrize(
    ("summary", "out"),
    [
        (Summary(problems=AWAY), ""),
        (Summary(down=["mom"]), ""),
        (Summary(down=["mom"], parked=2), "2 parked"),
        (Summary(problems=AWAY, stopped=True), "stopped on request"),
        (Summary(problems=AWAY, forwarded=1), "forwarded 1 message in 0.0 s"),
        (Summary(), "forwarded 0 messages in 0.0 s"),
        (Summary(dead=1), "forwarded 0 messages in 0.0 s, 1 dead (see `saf dead list`)"),
        (Summary(idle=True), "nothing to do: other forwarders hold all shards"),
    ],
)
def test_a_run_that_failed_does_not_begin_with_what_it_forwarded(
    summary: Summary, out: str, capsys: pytest.CaptureFixture[str]
) -> None:
    show(summary, as_json=False)
    said = capsys.readouterr()
    assert said.out == (f"{out}\n" if out else "")
    assert ("broker 'app' is unavailable" in said.err) == bool(summary.problems)


def test_a_lane_whose_time_has_passed_is_due(capsys: pytest.CaptureFixture[str]) -> None:
    lanes = [
        {
            "lane": f"lane of {year}",
            "next_attempt_at": f"{year}-01-31T12:00:00+00:00",
            "error": f"error of {year}",
        }
        for year in (2000, 2999)
    ]
    show(Summary(waiting=lanes, waiting_lanes=2), as_json=False)
    due, waiting, advice = capsys.readouterr().err.splitlines()
    assert due.startswith("saf: messages wait for lane of 2000, due since 2000-01-31 ")
    assert due.endswith("; last error: error of 2000")
    assert waiting.startswith("saf: messages wait for lane of 2999, next attempt 2999-01-31 ")
    assert "`saf parked retry-now`" in advice
