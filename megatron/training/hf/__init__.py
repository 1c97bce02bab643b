"""Weights from and to the Hugging Face format (safetensors beside a config.json).

llama.py, deepseek_v2.py   an architecture: its flags, its config.json, its tensors in ours
architectures.py           which of them a config.json or a command line means
layouts.py                 how a tensor of ours is put together from theirs, rank by rank
flags.py                   the command line, filled in and checked
reading.py loading.py      from the files into the model: what a rank needs and no more
writing.py folders.py      from the ranks into the files, whole or not at all
convert.py                 from one to the other without training
"""
