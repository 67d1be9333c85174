"""The house rules of the workspace as checks: each returns the violations it finds, in words, with file and line."""
