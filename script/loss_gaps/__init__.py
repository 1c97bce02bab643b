"""Train each configuration and bf16, and compare the gaps in loss with the offline errors.

`script/study.py` is the program. The modules, in the order in which it uses them:

    configurations   what is trained: quantization types and recipes
    held_out         cut the tokens into training data and the held-out text
    launcher         run trainings in forks of one process, or by torchrun
    run_heads        the first line of a log, which identifies the run
    run_log          read the log of a run
    offline          the errors of the matmuls of one iteration, and the recipe under a bit budget
    gaps             the tables: runs, gaps and their correlation with the offline errors
    page             the page and the picture
"""
