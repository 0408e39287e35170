"""How each kind of layer runs, so that its contributions are seen."""
