"""Read the local settings file, which sets number formats for later runs."""

from pathlib import Path

from megatron.bounded_files import UnusableFileError, printable, read_json
from megatron.fake_quant.quant_type import OPERATIONS

SIZE_LIMIT = 1 << 16  #: maximum size of the settings file, in bytes
SETTINGS_VARIABLE = "QUANT_SETTINGS_FILE"
SETTINGS_FILE = Path(__file__).resolve().parents[3] / ".quant_settings.json"


def read_settings(path: Path) -> dict[str, str]:
    """Read the local settings file, a JSON object with any of the keys linear, qk and pv.

    Return an empty dict if the file does not exist.

    Raises:
        ValueError: if the file cannot be read or does not contain such an object.
    """
    try:
        settings = read_json(path, limit=SIZE_LIMIT)
    except FileNotFoundError:
        return {}
    except UnusableFileError as error:
        raise ValueError(f"settings file {error}; fix or remove it") from None
    known = isinstance(settings, dict) and settings.keys() <= set(OPERATIONS)
    if not known or not all(isinstance(value, str) for value in settings.values()):
        raise ValueError(
            f"settings file {path} holds {printable(repr(settings))}; it takes an object with any "
            f"of the keys {', '.join(OPERATIONS)}, each with a format's name; fix or remove it"
        )
    return dict(settings)
