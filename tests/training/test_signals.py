"""Tests of Ctrl-C and SIGTERM within this process."""

import os
import signal

import pytest

from megatron.collection.deferred_signals import signals_deferred
from megatron.training import signals
from megatron.training.errors import Interrupted


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_raises_and_is_remembered(number):
    with pytest.raises(Interrupted) as caught, signals.interruptible():
        signal.raise_signal(number)
    assert caught.value.status == 128 + number
    with pytest.raises(Interrupted):
        signals.raise_if_received()
    with signals.interruptible():
        signals.raise_if_received()  # a signal of an earlier block is forgotten


def interrupted(block) -> None:
    """Run `block` as a training does, and assert that the signal is raised at its end."""
    with pytest.raises(Interrupted), signals.interruptible():
        block()


def test_what_a_collection_is_at_is_done_first():
    done = []

    def collecting():
        with signals_deferred:
            with signals_deferred:
                signal.raise_signal(signal.SIGTERM)
                done.append("inner")
            done.append("outer")
        done.append("never")

    interrupted(collecting)
    assert done == ["inner", "outer"]
    with signals_deferred:
        pass  # the signal is raised only once


def test_an_error_in_the_block_does_not_hide_the_signal():
    def failing():
        with signals_deferred:
            signal.raise_signal(signal.SIGTERM)
            raise ValueError

    interrupted(failing)


@pytest.mark.parametrize(("seconds", "left"), [(1.0, []), (10.0, [130])])
def test_a_second_signal_ends_the_process_unless_it_is_the_first_passed_on(
    monkeypatch, seconds, left
):
    now, ended = [100.0], []
    monkeypatch.setattr(signals.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(os, "_exit", ended.append)

    def twice():
        with signals_deferred:
            signal.raise_signal(signal.SIGTERM)
            now[0] += seconds
            signal.raise_signal(signal.SIGINT)

    interrupted(twice)
    assert ended == left
