"""The picture of a run: `data` folds its record, `charts` draws it, `report` writes the file."""
