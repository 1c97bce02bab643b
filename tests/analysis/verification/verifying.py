"""Helpers that the tests of the verification share."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.analysis.store import TensorStore
from megatron.analysis.verification import completeness
from megatron.analysis.verification.verify import Verification

RUN = "20250908_095200_abc123"  #: id of the run that `write_dump` writes


def verify(folder, **how):
    return Verification(TensorStore(folder), **how).run()


def count(counter, word):
    return sum(number for what, number in counter.items() if word in what)


def path_of(folder, **conditions):
    """Return the path of the only tensor that meets the conditions."""
    [record] = TensorStore(folder).select(**conditions).itertuples()
    return Path(record.path)


def change_card(folder, **content):
    """Put `content` into the one run card of a folder."""
    [card] = folder.glob("run_*.json")
    card.write_text(json.dumps(json.loads(card.read_text()) | content))


def rewrite(folder, change, run_id=RUN):
    """Replace each record of a run by `change(record)`; None deletes the record and its file.

    Returns the index, to which events can be added.
    """
    [index] = folder.glob(f"index_{run_id}_*.jsonl")
    lines = []
    for line in map(json.loads, index.read_text().splitlines()):
        changed = change(dict(line))
        if changed is None or changed["file"] != line["file"]:
            (folder / line["file"]).unlink()
        if changed is not None:
            lines.append(json.dumps(changed) + "\n")
    index.write_text("".join(lines))
    return index


def errors(folder, status="finished"):
    """Check a run for completeness; return its errors as texts, and its notes."""
    store = TensorStore(folder).only(RUN)
    card, events = store.run_card(RUN) | {"status": status}, store.events
    findings = list(completeness.check_run(store.records, card, events))
    errors = [str(finding) for finding in findings if not finding.note]
    return errors, [finding for finding in findings if finding.note]
