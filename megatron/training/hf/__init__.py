"""Load and save weights in the Hugging Face format (safetensors files and a config.json).

llama.py deepseek_v2.py    architectures: flags, config.json and the sources of each model tensor
architectures.py           find the architecture of a config.json or a command line
layouts.py                 assemble a model tensor from source tensors, rank by rank
flags.py                   fill in and check the command line
reading.py loading.py      read files into the model; each rank reads only what it needs
writing.py folders.py      write the ranks' weights to files, either completely or not at all
convert.py                 convert between the formats without training

A model tensor is a parameter of megatron-core's model; a source tensor is a tensor of a Hugging
Face checkpoint.
"""
