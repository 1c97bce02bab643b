"""Pictures of the number formats; the only part of the package that needs matplotlib."""
