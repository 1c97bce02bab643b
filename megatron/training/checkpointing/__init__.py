"""Write, find, check and read checkpoints.

save_load.py                       a checkpoint as a whole: written, and loaded into a run
files.py                           its folder, the tracker file, and the rename that completes it
compatibility.py                   what it records of its run, and which runs may load it
common_state.py optimizer_state.py random_state.py     its parts
safe_reading.py index.py checked_archive.py plain_pickle.py     read it without running its code
"""
