"""Bugs of sources: topics of other brokers that are read into an inbox."""

from __future__ import annotations

from tests.mutants.mutant import harmless, mutant

SOURCES = "contract/test_sources.py::"
JUDGING = "saf/sources/judging.py"
DECODING = "saf/sources/decoding.py"
COLUMNS = "saf/sources/columns.py"
ALIKE = "unit/test_source_columns.py::"
READER = "saf/sources/reader.py"
OWNERSHIP = "saf/sources/ownership.py"
STORING = "saf/sources/storing.py"
STREAM = "saf/sources/redis/stream.py"
NATS = "contract/test_source_nats.py::TestNats::"
RABBIT = "contract/test_source_rabbitmq_stream.py::TestRabbitmqStream::"
RABBIT_STREAM = "saf/sources/rabbitmq_stream/stream.py"
NATS_STREAM = "saf/sources/nats/stream.py"

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
        'return uuid5(self.source.bytes, f"{shard}/{batch}-{number}")',
        'return uuid5(self.source.bytes, f"{datetime.now(UTC)}")',
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
        "a_stream_of_nats_made_again_is_read_on",
        JUDGING,
        "if None not in (progress.topic_id, extent.topic_id) and",
        "if None in (progress.topic_id, extent.topic_id) and",
        NATS + "test_a_stream_made_again_while_it_is_read_is_refused",
    ),
    mutant(
        "the_id_of_a_topic_is_not_stored",
        READER,
        "if share.topic_id is None and extent.topic_id is not None:",
        "if share.topic_id is None and extent.topic_id is None:",
        NATS + "test_a_stream_made_again_while_it_is_read_is_refused",
    ),
    mutant(
        "a_check_does_not_see_that_a_topic_was_made_again",
        "saf/operating/sources.py",
        "                topic_id=topic_id,\n",
        "                topic_id=None,\n",
        NATS + "test_a_stream_made_again_while_it_is_read_is_refused",
    ),
    mutant(
        "messages_that_another_server_of_a_cluster_lacks_are_lost",
        NATS_STREAM,
        "and not self._has_after(api, at):",
        "and api:",
        NATS + "test_a_server_that_lacks_the_newest_messages_hides_none",
    ),
    mutant(
        "other_subjects_of_a_stream_are_never_passed",
        NATS_STREAM,
        "                at = before.last[1]\n",
        "                pass\n",
        NATS + "test_only_the_subjects_of_the_topic_are_read_and_the_others_are_passed",
    ),
    mutant(
        "messages_purged_while_they_are_read_are_not_noticed",
        NATS_STREAM,
        "            extent = self._extent(api)  # after",
        "            extent = before  # after",
        NATS + "test_messages_that_are_purged_between_two_batches_are_noticed",
    ),
    mutant(
        "a_purge_of_a_whole_stream_of_nats_is_not_noticed",
        NATS_STREAM,
        "removed=first - 1 if has_any else last,",
        "removed=first - 1 if has_any else 0,",
        NATS + "test_messages_that_were_purged_before_they_were_read_are_counted",
    ),
    mutant(
        "marks_of_nats_are_messages",
        NATS_STREAM,
        "if subject.startswith(self._marks):",
        'if subject == b"":',
        NATS + "test_the_marks_of_safs_destination_are_no_messages",
    ),
    mutant(
        "values_of_nats_stay_encoded",
        NATS_STREAM,
        '"saf-source" in headers',
        '"saf-sources" in headers',
        NATS + "test_a_value_that_is_encoded_comes_back",
    ),
    mutant(
        "a_writer_can_forge_what_a_server_of_nats_adds",
        NATS_STREAM,
        "head.rfind(FIRST_ADDED)",
        "head.find(FIRST_ADDED)",
        NATS + "test_headers_that_look_like_the_servers_are_not_taken_for_them",
    ),
    mutant(
        "large_bodies_of_nats_are_read_by_number_only",
        NATS_STREAM,
        '            "max_bytes": min(size, BYTES_AT_ONCE),\n',
        "",
        NATS + "test_bodies_bound_what_is_read_at_a_time",
    ),
    mutant(
        "records_of_two_writers_are_stored_one_writer_after_the_other",
        "saf/sources/columns.py",
        "        others.sort()\n",
        "",
        "unit/test_source_columns.py::test_a_few_records_of_each_of_two_writers_keep_their_order",
    ),
    mutant(
        "a_record_that_cannot_be_read_is_a_message_among_many",
        "saf/sources/columns.py",
        "if record.problem is None else UNREADABLE",
        "if record.position else UNREADABLE",
        "unit/test_source_columns.py::test_records_that_cannot_be_read_are_dead_letters_among_many",
    ),
    mutant(
        "the_time_of_a_streams_first_chunk_is_ignored",
        RABBIT_STREAM,
        "            if not first.first\n",
        "            if first.first\n",
        RABBIT + "test_a_stream_made_again_with_more_messages_is_refused",
    ),
    mutant(
        "a_chunk_of_rabbitmq_is_read_from_its_beginning_again",
        RABBIT_STREAM,
        "for one in _records(chunk) if one.position > after)",
        "for one in _records(chunk))",
        "contract/test_source_rabbitmq_stream.py::test_a_read_may_begin_within_a_chunk",
    ),
    mutant(
        "what_is_no_message_of_amqp_ends_the_reading",
        RABBIT_STREAM,
        "            except ValueError as error:\n                problem = str(error)",
        "            except ArithmeticError as error:\n                problem = str(error)",
        RABBIT + "test_what_is_no_message_of_amqp_is_a_dead_letter_between_its_neighbours",
    ),
    mutant(
        "a_batch_that_cannot_be_read_is_taken_for_empty_messages",
        RABBIT_STREAM,
        "problem = entry, chunk.problems.get(place)",
        "problem = entry, None",
        RABBIT + "test_a_batch_that_cannot_be_read_is_a_dead_letter_for_each_message",
    ),
    mutant(
        "a_server_that_lacks_messages_of_a_stream_is_read",
        "saf/destinations/rabbitmq_stream/connection.py",
        "if leader is not None and leader != here:",
        "if leader is None and leader != here:",
        RABBIT + "test_only_the_leader_of_a_stream_is_read",
    ),
    mutant(
        "a_server_may_send_many_chunks_ahead",
        RABBIT_STREAM,
        "CREDIT = 2\n",
        "CREDIT = 2_000\n",
        RABBIT + "test_large_chunks_wait_at_the_server",
    ),
    mutant(
        "a_source_that_is_down_ends_the_run",
        "saf/forwarding/sources.py",
        "except Exception as error:  # a kind of another package may raise anything",
        "except ArithmeticError as error:",
        SOURCES + "test_a_source_that_is_down_delays_no_outbox",
    ),
    mutant(
        "records_of_several_writers_come_in_another_order",
        COLUMNS,
        "found = found.take(np.argsort(order))",
        "found = found.take(order)",
        ALIKE + "test_records_of_several_writers_stay_in_their_order",
    ),
    mutant(
        "an_odd_record_is_left_out",
        COLUMNS,
        "others += [place for place, odd in zip(places, alike.odd, strict=True) if odd]",
        "others += []",
        ALIKE + "test_an_odd_value_of_some_or_all_is_read_as_it_is_alone",
    ),
    mutant(
        "an_event_in_a_body_is_taken_for_the_body",
        COLUMNS,
        "self._each(kind, lambda text: None if is_event(text) else text)",
        "self._each(kind, lambda text: text)",
        ALIKE + "test_an_odd_value_of_some_or_all_is_read_as_it_is_alone",
    ),
    mutant(
        "a_header_that_is_the_same_in_the_first_and_last_record_is_the_same_in_all",
        COLUMNS,
        "if first == values[-1] and values.count(first) == len(values):",
        "if first == values[-1]:",
        ALIKE + "test_any_mixture_is_read_as_it_is_alone",
        ALIKE + "test_an_odd_value_of_some_or_all_is_read_as_it_is_alone",
    ),
    mutant(
        "many_alike_records_may_say_that_their_sender_is_verified",
        COLUMNS,
        "if VERIFIED_FROM in self.headers:  # a topic's",
        "if VERIFIED_FROM in ():  # a topic's",
        ALIKE + "test_headers_that_change_what_others_mean_are_read_as_they_are_alone",
    ),
    mutant(
        "many_alike_messages_of_a_dialog_are_taken",
        COLUMNS,
        'if said["conversation_id"] is not None or SENT_BY in self.headers:',
        "if SENT_BY in self.headers:",
        ALIKE + "test_headers_that_change_what_others_mean_are_read_as_they_are_alone",
    ),
    mutant(
        "a_zero_byte_in_a_column_is_stored",
        COLUMNS,
        "if text is not None and np.frombuffer(raw.buffers()[2], np.uint8).all():",
        "if text is not None:",
        ALIKE + "test_an_odd_value_of_some_or_all_is_read_as_it_is_alone",
    ),
    mutant(
        "a_time_beyond_the_calendar_is_stored",
        COLUMNS,
        "self._leave(np.asarray(pc.or_(early, late)))",
        "self._leave(np.asarray(early))",
        ALIKE + "test_an_odd_value_of_some_or_all_is_read_as_it_is_alone",
    ),
    mutant(
        "a_digit_that_is_none_is_read_as_one",
        COLUMNS,
        "self._leave(~dashes | (halves == NO_DIGIT).any(axis=1))",
        "self._leave(~dashes)",
        ALIKE + "test_an_odd_value_of_some_or_all_is_read_as_it_is_alone",
    ),
    mutant(
        "a_large_body_among_alike_records_is_stored",
        COLUMNS,
        "self._leave(np.asarray(pc.greater(pc.binary_length(body), self.decoder.max_bytes)))",
        "self._leave(np.asarray(pc.greater(pc.binary_length(body), 1 << 40)))",
        ALIKE + "test_large_bodies_and_headers_are_dead_letters_between_their_neighbours",
    ),
)
