"""Files and folders: atomic writes, JSON, folders of results, errors of the system."""
