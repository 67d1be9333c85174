"""Host libraries, each imported only by its user."""
