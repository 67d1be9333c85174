"""MaxRL inside host libraries: one module a library, imported by the user only."""
