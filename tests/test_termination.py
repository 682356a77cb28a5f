"""Why and where a completion ends, and the text that is scored."""

from __future__ import annotations

import numpy as np
import pytest
from conftest import BOS, EOS, ids

from textrl_env.pretrain import byte_tokenizer
from textrl_env.tasks import FunctionTask, Sample, Task
from textrl_env.termination import Finish, Termination


def decode(sequences):
    return byte_tokenizer().batch_decode([list(s) for s in sequences], skip_special_tokens=True)


class UntilFullStop(Task):
    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Sample("p", index=index)

    def score(self, completion, sample):
        return 0.0

    def is_finished(self, completion, sample):
        return completion.endswith(".")


PLAIN = FunctionTask(["p"], ["a"])


def ending(tokens, *, stop=(), task=PLAIN, eos=(EOS,), limit=20):
    """The step, reason and text at which the tokens end."""
    termination = Termination(decode, eos, stop, task, limit)
    for t in range(1, len(tokens) + 1):
        so_far = np.array(tokens[:t])
        reason = termination.reasons(
            lambda i, so_far=so_far: so_far, so_far[-1:], np.array([t]), [task[0]]
        )[0]
        if reason:
            return t, Finish(reason), termination.texts([so_far], [reason])[0]
    return None


def test_end_of_sequence_is_not_in_the_text():
    assert ending([*ids("ab"), EOS, *ids("c")]) == (3, Finish.EOS, "ab")
    assert ending([EOS]) == (1, Finish.EOS, "")


def test_any_of_several_end_tokens_ends():
    # The second is an ordinary token of the tokenizer, as in models whose configuration adds one.
    assert ending(ids("abc"), eos=(EOS, *ids("b"))) == (2, Finish.EOS, "a")


def test_limit_keeps_the_last_token():
    assert ending(ids("abcd"), limit=3) == (3, Finish.LENGTH, "abc")
    assert ending(ids("ab"), limit=3) is None


def test_stop_string_over_several_tokens():
    assert ending(ids("ab##c"), stop=["##"]) == (4, Finish.STOP, "ab")
    assert ending(ids("a#b#c"), stop=["##"]) is None


def test_stop_string_of_bytes_that_are_tokens_of_their_own():
    assert ending(ids("aé€b"), stop=["€"]) == (6, Finish.STOP, "aé")


def test_first_of_two_stop_strings_cuts():
    # Both are complete with the same token; the one that begins first cuts.
    assert ending(ids("abcd"), stop=["cd", "bcd"]) == (4, Finish.STOP, "a")


def test_a_text_may_be_nothing_but_the_stop_string():
    assert ending(ids("\n"), stop=["\n"]) == (1, Finish.STOP, "")


def test_task_ends_with_its_text_kept():
    assert ending(ids("ab.c"), task=UntilFullStop()) == (3, Finish.TASK, "ab.")


def test_order_of_the_reasons():
    task = UntilFullStop()
    assert ending(ids("a."), task=task, limit=2)[1] == Finish.TASK
    assert ending(ids("a."), task=task, stop=["."], limit=2)[1] == Finish.STOP
    assert ending([*ids("a"), EOS], task=task, stop=["a!"], limit=2)[1] == Finish.EOS


def test_special_tokens_are_no_text():
    assert ending([*ids("a"), BOS, *ids("b"), EOS]) == (4, Finish.EOS, "ab")


def test_text_is_not_read_where_no_rule_needs_it():
    def forbidden(_):
        raise AssertionError("decoded")

    termination = Termination(forbidden, [EOS], (), PLAIN, 5)
    reasons = termination.reasons(forbidden, np.array([EOS, 9]), np.array([1, 5]), [PLAIN[0]] * 2)
    assert reasons.tolist() == [Finish.EOS, Finish.LENGTH]


@pytest.mark.parametrize("batch", [1, 5])
def test_a_batch_is_judged_row_by_row(batch):
    termination = Termination(decode, [EOS], ["#"], PLAIN, 3)
    rows = [np.array(r) for r in (ids("a#"), ids("ab"), [*ids("a"), EOS], ids("abc"), ids("b"))]
    rows = rows[:batch]
    reasons = termination.reasons(
        lambda i: rows[i],
        np.array([r[-1] for r in rows]),
        np.array([len(r) for r in rows]),
        [PLAIN[0]] * batch,
    )
    assert reasons.dtype == np.int8
    expected = [Finish.STOP, Finish.RUNNING, Finish.EOS, Finish.LENGTH, Finish.RUNNING]
    assert reasons.tolist() == expected[:batch]
