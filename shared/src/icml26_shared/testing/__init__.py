"""What the tests of several packages share. `plugin` is a pytest plugin, found by pytest through its entry point."""
