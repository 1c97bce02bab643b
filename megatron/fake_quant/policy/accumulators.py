"""Set one accumulator for all matmuls, as a flag or an environment variable requests.

The accumulator applies to every GEMM whose operands the unit multiplies: to GEMMs of two quantized
operands; and, if the unit multiplies 16-bit floating-point tensors, to GEMMs of two high-precision
operands. A GEMM of one quantized and one high-precision operand is summed by torch.matmul. If the
unit does not multiply the format of two quantized operands, the setting is an error.
"""

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace

from megatron.fake_quant.accumulate.accumulator import Accumulator
from megatron.fake_quant.accumulate.format_checks import HALVES
from megatron.fake_quant.accumulate.names import get_accumulator
from megatron.fake_quant.matmul.gemm_formats import GEMM_SLOTS, GemmFormats

ACCUMULATE_VARIABLE = "QUANT_ACCUMULATE"
ACCUMULATE_FLAG = "--quant-accumulate"


@dataclass(frozen=True, slots=True)
class AccumulatorChoice:
    """Accumulator for all matmuls, and the flag or variable that set it."""

    accumulator: Accumulator
    source: str

    def refuse(self, reason: str) -> ValueError:
        """Return an error that names the source of the accumulator."""
        return ValueError(f"{self.source}: {reason}")

    def check(self, formats: Iterable[GemmFormats | None]) -> None:
        """Raise ValueError if the unit cannot multiply some operands, or no matmul uses the unit.

        Raises:
            ValueError: if the accumulator is refused; the message names the flag or variable.
        """
        try:
            changed = [with_accumulator(each, self.accumulator) != each for each in formats]
        except ValueError as error:
            raise self.refuse(str(error)) from None
        if self.accumulator.simulated and not any(changed):
            multiplied = ", ".join(self.accumulator.elements)
            raise self.refuse(
                f"the accumulator {self.accumulator.name} applies to no matmul, because it "
                f"multiplies {multiplied} and no matmul has two such operands; set a format for "
                "the matmuls, or choose another accumulator"
            )


def chosen(flag: str | None, variable: str | None) -> AccumulatorChoice | None:
    """Return the accumulator set by a flag or, if no flag is given, by an environment variable.

    Raises:
        ValueError: if there is no accumulator with this name; the message names the source.
    """
    name = flag or variable
    if not name:
        return None
    source = f"flag {ACCUMULATE_FLAG}" if flag else f"environment variable {ACCUMULATE_VARIABLE}"
    try:
        return AccumulatorChoice(get_accumulator(name), source)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None


@functools.lru_cache(maxsize=1 << 10)
def with_accumulator(formats: GemmFormats | None, accumulator: Accumulator) -> GemmFormats | None:
    """Return the formats of a matmul with the accumulator in every GEMM to which it applies.

    None stands for high precision.

    Raises:
        ValueError: if the unit does not multiply two quantized operands of a GEMM.
    """
    if not accumulator.simulated:
        return formats
    known = GemmFormats() if formats is None else formats
    halves = not accumulator.elements or any(name in accumulator.elements for name in HALVES)
    fields = {}
    for gemm, slots in GEMM_SLOTS.items():
        quantized = [
            known.effective(slot).format is not None or known.effective(slot).source != "original"
            for slot in slots
        ]
        if all(quantized) or (halves and not any(quantized)):
            fields[f"{gemm}_accumulator"] = accumulator
    return replace(known, **fields) if fields else formats  # type: ignore[arg-type]
