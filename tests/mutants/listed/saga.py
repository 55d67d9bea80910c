"""Sagas: processes, their state, their dialogs, and messages that fit none."""

from __future__ import annotations

from tests.mutants.mutant import Mutant, mutant

SAGA, SHOWN = "saf/dialogs/saga.py", "saf/dialogs/conversations.py"
SAGAS = "contract/test_sagas.py"

MUTANTS: list[Mutant] = [
    mutant(
        "the state of a process is not stored",
        SAGA,
        "            enter(self.connection).execute(SAVE, params)\n",
        "            pass\n",
        f"{SAGAS}::test_messages_with_its_key_find_a_process_and_others_another_one",
    ),
    mutant(
        "a process that fails ends its dialogs in order",
        SAGA,
        "dialog.fail(enter(self.connection), code, text, ending=True)",
        "dialog.end(self.connection)",
        f"{SAGAS}::test_an_error_of_one_service_fails_the_process_and_reaches_the_others",
    ),
    mutant(
        "a process that ends leaves its dialogs open",
        SAGA,
        "            self._opened(handle).end(self.connection)\n",
        "            pass\n",
        f"{SAGAS}::test_the_end_of_a_process_ends_its_dialogs_in_order",
    ),
    mutant(
        "a process that has ended handles messages",
        SAGA,
        "        elif process.has_ended:\n            self._late",
        "        elif False:\n            self._late",
        f"{SAGAS}::test_a_message_whose_process_has_ended_is_a_dead_letter",
    ),
    mutant(
        "a second start begins the process again",
        SAGA,
        "elif process.is_new and starts is not None:",
        "elif starts is not None:",
        f"{SAGAS}::test_a_second_start_finds_the_running_process_and_is_a_dead_letter",
    ),
    mutant(
        "a message without a process is handled silently",
        SAGA,
        '        if ("missing", None) not in self._calls:\n            raise error\n',
        '        if ("missing", None) not in self._calls:\n            return\n',
        f"{SAGAS}::test_a_message_without_a_process_is_a_dead_letter_after_one_attempt",
    ),
    mutant(
        "a message without a process is tried again",
        SAGA,
        "permanent = (*policy.permanent, NotCorrelated, UnreadableState)",
        "permanent = policy.permanent",
        f"{SAGAS}::test_a_message_without_a_process_is_a_dead_letter_after_one_attempt",
    ),
    mutant(
        "a message for a dialog that its process has just ended is not counted",
        SAGA,
        "            self._current.delivery.drop(message, Reason.ENDED)\n",
        "            pass\n",
        f"{SAGAS}::test_a_message_in_the_delivery_that_ends_its_process_is_dropped_and_counted",
    ),
    mutant(
        "an Error without a handler is ignored",
        SAGA,
        "            process.fail(code, text)\n",
        "            pass\n",
        f"{SAGAS}::test_an_error_of_one_service_fails_the_process_and_reaches_the_others",
    ),
    mutant(
        "an Error goes to the handler of any service first",
        SAGA,
        "self._calls.get((role, dialog.far_service)) or self._calls.get((role, None))",
        "self._calls.get((role, None)) or self._calls.get((role, dialog.far_service))",
        f"{SAGAS}::test_an_error_goes_to_the_handler_of_its_service_or_of_any",
    ),
    mutant(
        "a timer that cannot be handled goes to the handler of errors",
        SAGA,
        "if handler is None or process._is_own(dialog):",
        "if handler is None:",
        f"{SAGAS}::test_a_timer_that_cannot_be_handled_fails_the_process",
    ),
    mutant(
        "the other side of an ended dialog is left open",
        SAGA,
        "            end_too(message.dialog, connection)\n",
        "            pass\n",
        f"{SAGAS}::test_an_error_goes_to_the_handler_of_its_service_or_of_any",
        f"{SAGAS}::test_an_end_closes_the_dialog_and_goes_to_its_handler",
    ),
    mutant(
        "a state that could not be read is stored",
        SAGA,
        "            self._decoded()\n            params",
        "            params",
        f"{SAGAS}::test_a_state_that_could_not_be_read_is_not_stored",
    ),
    mutant(
        "each message to a service begins a dialog",
        SAGA,
        "dialog = self.dialog(service) or self.begin_dialog(service)",
        "dialog = self.begin_dialog(service)",
        f"{SAGAS}::test_a_process_sends_to_a_service_on_one_dialog",
    ),
    mutant(
        "a plain message does not wait for the receiver that has its process",
        SAGA,
        "    CAST(%(group_id)s AS uuid))\nFOR NO KEY UPDATE\n",
        "    CAST(%(group_id)s AS uuid))\n",
        f"{SAGAS}::test_receivers_of_one_process_take_turns",
    ),
    mutant(
        "sagas share the processes of a key",
        SAGA,
        'f"{self.subscription}\\0{message.lane}"',
        'f"{message.lane}"',
        f"{SAGAS}::test_two_sagas_of_one_database_have_processes_of_their_own",
    ),
    mutant(
        "a list of conversations shows the states of groups",
        SHOWN,
        "CASE WHEN CAST(%(handle)s AS uuid) IS NOT NULL THEN",
        "CASE WHEN true THEN",
        f"{SAGAS}::test_an_operator_sees_the_state_of_a_process",
    ),
]
