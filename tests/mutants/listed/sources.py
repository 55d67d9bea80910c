"""Bugs of sources: topics of other brokers that are read into an inbox."""

from __future__ import annotations

from tests.mutants.mutant import harmless, mutant

SOURCES = "contract/test_sources.py::"
JUDGING = "saf/sources/judging.py"
DECODING = "saf/sources/decoding.py"
READER = "saf/sources/reader.py"
OWNERSHIP = "saf/sources/ownership.py"
STORING = "saf/sources/storing.py"
STREAM = "saf/sources/redis/stream.py"

MUTANTS = (
    mutant(
        "a_record_that_a_second_question_to_kafka_has_discarded_is_lost",
        "saf/sources/kafka/topic.py",
        "                self._next.pop(shard, None)  # waiting",
        "                pass  # waiting",
        "contract/test_source_conformance.py::"
        "test_a_second_question_about_a_partition_of_kafka_loses_no_record",
    ),
    mutant(
        "a_topic_that_was_set_back_is_read_on",
        JUDGING,
        "if extent.last < progress.position:",
        "if extent.last < progress.position and not extent.exists:",
        SOURCES + "test_a_stream_that_was_set_back_is_refused",
    ),
    mutant(
        "a_topic_made_again_with_more_messages_is_read_on",
        JUDGING,
        "if extent.removed < read:",
        "if extent.removed < 0:",
        SOURCES + "test_a_stream_that_was_deleted_is_refused_and_so_is_one_made_again",
    ),
    mutant(
        "messages_that_were_removed_unread_are_not_noticed",
        JUDGING,
        "if extent.removed > read:",
        "if extent.removed > extent.added:",
        SOURCES + "test_messages_that_were_removed_before_they_were_read_are_counted_and_refused",
    ),
    mutant(
        "messages_removed_before_the_first_turn_count_as_lost",
        OWNERSHIP,
        "return replace(self, start=BEGINNING, added=extent.removed)",
        "return replace(self, start=BEGINNING, added=0)",
        SOURCES + "test_a_purge_of_messages_that_were_read_is_nothing",
    ),
    mutant(
        "latest_begins_at_the_beginning",
        OWNERSHIP,
        'if start == "latest":',
        'if start == "newest":',
        SOURCES + "test_reading_may_begin_at_the_end",
    ),
    mutant(
        "another_topic_of_a_name_is_read_on",
        OWNERSHIP,
        "if (kind, topic) != (self.settings.kind, self.settings.topic):",
        "if kind != self.settings.kind:",
        SOURCES + "test_a_name_that_stands_for_another_topic_is_refused",
    ),
    harmless(
        "a_change_of_owner_raises_no_epoch",
        OWNERSHIP,
        "SET owner = %(member_id)s, epoch = epoch + 1",
        "SET owner = %(member_id)s, epoch = epoch",
        "the transaction that stores checks the owner too, and each process has an id of its own",
    ),
    mutant(
        "who_owns_a_partition_is_not_checked_as_it_is_stored",
        STORING,
        "if not cursor.ask(owned.as_string(None)):",
        "if cursor.ask(owned.as_string(None)) is None:",
        SOURCES + "test_an_operator_may_decide_between_reading_and_storing",
    ),
    mutant(
        "a_dead_letter_is_in_the_inbox_too",
        STORING,
        "good = rows.filter(pc.invert(is_dead)) if self.dead else rows",
        "good = rows",
        SOURCES + "test_a_record_that_no_inbox_takes_is_a_dead_letter_between_its_neighbours",
    ),
    mutant(
        "a_dialogs_message_is_taken_from_a_topic",
        DECODING,
        'if said["conversation_id"] is not None:',
        'if said["conversation_id"] == "":',
        SOURCES + "test_a_record_that_no_inbox_takes_is_a_dead_letter_between_its_neighbours",
    ),
    mutant(
        "a_topic_may_say_that_its_sender_is_verified",
        DECODING,
        "name = CLAIMED_FROM if given == VERIFIED_FROM else _name(given)",
        "name = _name(given)",
        SOURCES + "test_a_message_goes_to_the_service_that_it_names_only_if_the_settings_say_so",
    ),
    mutant(
        "a_messages_id_depends_on_when_it_is_read",
        DECODING,
        'return _uuid5(self.source.bytes, f"{shard}/{batch}-{number}")',
        'return _uuid5(self.source.bytes, f"{datetime.now(UTC)}")',
        SOURCES
        + "test_a_message_of_another_writer_has_its_headers_its_key_and_an_id_of_its_position",
    ),
    mutant(
        "a_chunk_is_read_once_more",
        STREAM,
        'first = f"({after[0]}-{after[1]}" if after > BEGINNING else "-"',
        'first = f"{after[0]}-{after[1]}" if after > BEGINNING else "-"',
        SOURCES + "test_only_undecodable_records_move_the_mark_too",
        SOURCES + "test_a_topic_is_read_in_order_and_once_over_many_turns",
    ),
    mutant(
        "the_chunk_after_is_read_from_the_same_place",
        READER,
        "ahead = self._start(self._after(read, left[0]))",
        "ahead = self._start(self._shares[left[0]])",
        SOURCES + "test_a_topic_is_read_in_order_and_once_over_many_turns",
    ),
    mutant(
        "a_service_that_does_not_live_there_is_not_noticed_first",
        READER,
        "if subscription_id is None:",
        'if subscription_id == "":',
        SOURCES + "test_a_service_that_does_not_live_there_is_named_before_anything_is_read",
    ),
    mutant(
        "a_source_that_is_down_ends_the_run",
        "saf/forwarding/sources.py",
        "except Exception as error:  # a kind of another package may raise anything",
        "except ArithmeticError as error:",
        SOURCES + "test_a_source_that_is_down_delays_no_outbox",
    ),
)
