"""Test that a signal during a weak reference's callback ends a drawing process quietly."""

import weakref

import pytest

from megatron.analysis.outputs import render


class _Referent:
    pass


def test_an_interrupt_that_python_drops_is_not_printed_and_ends_the_output(monkeypatch, capsys):
    monkeypatch.setattr("sys.unraisablehook", render._report_unraisable)
    monkeypatch.setattr(render, "_order", [object()])
    monkeypatch.setattr(render, "_making", ["distributions"])
    referent = _Referent()
    reference = weakref.ref(referent, render._stop)
    del referent  # the callback raises KeyboardInterrupt, which Python drops
    assert reference() is None
    assert capsys.readouterr().err == ""
    assert render._order == []
    figures = [("a figure", lambda: pytest.fail("a figure was drawn after the signal"))]
    output = type("Output", (), {"load": lambda self: lambda data: iter(figures)})()
    monkeypatch.setitem(render.OUTPUTS, "distributions", output)
    order = type("Order", (), {"figure_data": None})()
    with pytest.raises(KeyboardInterrupt):
        render.make("distributions", order)


def test_another_dropped_exception_is_printed(monkeypatch, capsys):
    monkeypatch.setattr("sys.unraisablehook", render._report_unraisable)

    def fail(_):
        raise ValueError("of a callback")

    referent = _Referent()
    reference = weakref.ref(referent, fail)
    del referent
    assert reference() is None
    assert "ValueError: of a callback" in capsys.readouterr().err
