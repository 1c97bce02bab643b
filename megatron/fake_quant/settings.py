"""The local settings file, which keeps formats from one run to the next."""

import json
from pathlib import Path

from megatron.fake_quant.quant_type import OPERATIONS

SETTINGS_VARIABLE = "QUANT_SETTINGS_FILE"
SETTINGS_FILE = Path(__file__).resolve().parents[2] / ".quant_settings.json"


def read_settings(path: Path) -> dict[str, str]:
    """The local settings file: a JSON object with any of the keys linear, qk, pv. No file: nothing
    is set.

    Raises:
        ValueError: the file is not such an object.
    """
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ValueError(
            f"settings file {path} cannot be read: {error}; mend or remove it"
        ) from None
    known = isinstance(settings, dict) and settings.keys() <= set(OPERATIONS)
    if not known or not all(isinstance(value, str) for value in settings.values()):
        raise ValueError(
            f"settings file {path} holds {settings!r}; it takes an object with any of the keys "
            f"{', '.join(OPERATIONS)} and a format's name each; mend or remove it"
        )
    return dict(settings)
