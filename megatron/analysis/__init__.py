"""What a dump says: load (`store`) -> compute (`statistics`, `measure`) -> draw (`plots`), joined
in `quick`; and whether it can be trusted (`verify`). `python -m megatron.analysis` is the way in.

Needs torch, numpy, pandas and matplotlib, and of this project only the record and the formats: a
laptop that has a dump and no megatron-core can analyze it.
"""
