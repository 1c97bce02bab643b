"""The log of a made-up training run, as script/study.py reads it."""

#: Log of two iterations on two tensor parallel ranks, with its head and end left open.
LOG = """{head} > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 1000
 > number of parameters on (tensor, pipeline) model parallel rank (1, 0): 900
 > number of parameters of the model: 1800
 [2026-01-01 00:00:00] iteration        1/       2 | consumed samples:            2 | \
learning rate: 1.000000E-03 | lm loss: 7.500000E+00 | loss scale: 1.0 | grad norm: 2.125 |
 [2026-01-01 00:00:01] iteration        2/       2 | consumed samples:            4 | \
learning rate: 1.000000E-04 | lm loss: 7.250000E+00 | loss scale: 1.0 | grad norm: 1.500 |
 validation loss at iteration 2 on validation set | lm loss value: 7.375000E+00 | \
lm loss PPL: 1.595634E+03 |
{end}"""
