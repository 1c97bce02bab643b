"""What the tests of the verification share."""

from __future__ import annotations

import json
from pathlib import Path

from megatron.analysis.store import TensorStore
from megatron.analysis.verification import completeness
from megatron.analysis.verification.verify import Verification

RUN = "20250908_095200_abc123"  #: of `write_dump`


def verify(folder, **how):
    return Verification(TensorStore(folder), **how).run()


def count(counter, word):
    return sum(number for what, number in counter.items() if word in what)


def path_of(folder, **conditions):
    """The one file, relative to which damage is done."""
    [record] = TensorStore(folder).select(**conditions).itertuples()
    return Path(record.path)


def change_card(folder, **content):
    """Put `content` into the one run card of a folder."""
    [card] = folder.glob("run_*.json")
    card.write_text(json.dumps(json.loads(card.read_text()) | content))


def rewrite(folder, change, run_id=RUN):
    """Put each record of a run through a function; None loses it and its file. Later ones follow.

    Returns the index, to which events can be added.
    """
    [index] = folder.glob(f"index_{run_id}_*.jsonl")
    kept = []
    for line in map(json.loads, index.read_text().splitlines()):
        changed = change(dict(line))
        if changed is None or changed["file"] != line["file"]:
            (folder / line["file"]).unlink()
        if changed is not None:
            kept.append(json.dumps(changed) + "\n")
    index.write_text("".join(kept))
    return index


def errors(folder, status="finished"):
    """What the schedule says of a run: its errors as texts, and its notes."""
    store = TensorStore(folder).only(RUN)
    card, events = store.run_card(RUN) | {"status": status}, store.events
    everything = TensorStore(folder).records
    others = everything[everything["run_id"] != RUN]
    found = list(completeness.check_run(store.records, card, events, others=others))
    return [str(each) for each in found if not each.note], [each for each in found if each.note]
