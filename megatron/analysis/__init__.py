"""What a dump says: load (`store`) -> compute (`statistics`, `measure`) -> draw (`plots`), joined
in `quick`.

Needs torch, numpy, pandas and matplotlib, and of this project only the record and the formats: a
laptop that has a dump and no megatron-core can analyze it.
"""
