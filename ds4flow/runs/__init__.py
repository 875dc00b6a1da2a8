"""Reading what runs left behind: records, search, comparison. Nothing here starts a run."""
