"""Tables, descriptions and pictures of the number formats; only the pictures need matplotlib."""
