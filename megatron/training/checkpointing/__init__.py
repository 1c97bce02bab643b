"""Checkpoints: writing, finding, checking and reading them.

save_load.py            saves a run to a checkpoint and loads it
files.py                manages checkpoint folders and the tracker file
compatibility.py        records the run in a checkpoint, and refuses one that does not fit
common_state.py, optimizer_state.py, random_state.py
                        handle the parts of a checkpoint
safe_reading.py, index.py, checked_archive.py, plain_pickle.py
                        read a checkpoint without running code that it contains
"""
