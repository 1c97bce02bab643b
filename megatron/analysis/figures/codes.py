"""Counts of codes in the order of their numbers."""

from __future__ import annotations

import numpy as np
import pandas as pd

from megatron.analysis.figures.sums import FormatSum
from megatron.fake_quant import get_format
from megatron.fake_quant.code_points import code_values
from megatron.fake_quant.inspect import format_properties


def usage(fmt: str, found: FormatSum) -> pd.DataFrame:
    """Codes of finite numbers that something rounds to, rising; for `plot_code_usage`."""
    element = get_format(fmt).element
    values = code_values(element).numpy().astype(np.float64)
    usable = np.isfinite(values)
    usable[format_properties.never_produced(element).numpy()] = False
    codes = np.flatnonzero(usable)
    negative_zero = (values[codes] == 0) & np.signbit(values[codes])
    order = codes[np.lexsort((~negative_zero, values[codes]))]
    return pd.DataFrame({"format": fmt, "value": values[order], "count": found.codes[order]})
