"""Write, find, check and read checkpoints.

save_load.py            saves a run to a checkpoint and loads it
files.py                manages checkpoint folders and the tracker file
compatibility.py        records the run in a checkpoint, and checks that a checkpoint fits the run
common_state.py, optimizer_state.py, random_state.py
                        check, correct or restore one part of a checkpoint each
safe_reading.py, index.py, checked_archive.py, plain_pickle.py
                        read a checkpoint without running code that it contains
"""
