"""The records: schema, readers, checks, splits and the shipped sample."""
